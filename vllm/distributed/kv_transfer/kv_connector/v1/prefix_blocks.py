"""Which blocks of a request carry which content, and which of them a prefix needs.

The scheduler side of connectors that store whole blocks. Knows tokens and block ids of
every KV cache group; what a group keeps of a prefix it asks the group's manager. Knows
nothing of bytes and of where blocks are stored.
"""

import hashlib
from array import array
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from math import gcd, lcm
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger(__name__)

_DIGEST_BYTES = 32


@dataclass(frozen=True, kw_only=True)
class BlockRef:
    """A block of the pool and the name of what it holds, or is to hold. `index` is its
    place among the blocks of its request."""

    key: str
    group_id: int
    block_id: int
    index: int = -1


def _digest(*parts: bytes) -> bytes:
    state = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        state.update(part)
    return state.digest()


class _Keys:
    """Names of a request's blocks, chained: one link for every `unit` tokens.

    Equal in every process: they depend on tokens, adapter, salt and media only.
    """

    def __init__(self, request: Any, unit: int) -> None:
        self.unit = unit
        lora = request.lora_request
        root = (None if lora is None else lora.lora_name, request.cache_salt)
        self._last = _digest(repr(root).encode())
        self.links: list[bytes] = []

    def extend(self, request: Any) -> None:
        """Adds the links of tokens that came since."""
        if request.prompt_embeds is not None:
            return  # no token says what was embedded
        tokens, unit = request.all_token_ids, self.unit
        for start in range(len(self.links) * unit, len(tokens) - unit + 1, unit):
            content = array("q", tokens[start : start + unit]).tobytes()
            media = [
                (item.identifier, item.mm_position.offset - start)
                for item in request.mm_features
                if item.mm_position.offset < start + unit
                and item.mm_position.offset + item.mm_position.length > start
            ]
            extra = repr(media).encode() if media else b""
            self._last = _digest(self._last, content, extra)
            self.links.append(self._last)


class _Progress:
    """Which blocks of one group of a request have been handed out to be saved: all
    before `cursor`, and those in `ahead`."""

    def __init__(self) -> None:
        self.cursor = 0
        self.ahead: set[int] = set()

    def has(self, index: int) -> bool:
        return index < self.cursor or index in self.ahead

    def note(self, index: int) -> None:
        self.ahead.add(index)
        while self.cursor in self.ahead:
            self.ahead.discard(self.cursor)
            self.cursor += 1


class PrefixBlocks:
    """Blocks by content, for the requests of one engine.

    A hit ends where blocks of all groups end together. Groups whose blocks cannot be
    found by token position make `is_usable` False: nothing is hit or saved then.
    """

    def __init__(self, kv_cache_config: KVCacheConfig) -> None:
        groups = kv_cache_config.kv_cache_groups
        self.sizes = [group.kv_cache_spec.block_size for group in groups]
        self.unit = gcd(*self.sizes) if self.sizes else 1
        self.alignment = lcm(*self.sizes) if self.sizes else 1
        self.is_usable = False
        self.requests: dict[str, Any] = {}
        self._keys: dict[str, _Keys] = {}
        self._progress: dict[str, list[_Progress]] = {}
        self._managers: list[Any] = []
        self._kv_cache_manager: Any = None

    def bind(self, kv_cache_manager: Any) -> None:
        """Takes the engine's KV cache manager."""
        self._kv_cache_manager = kv_cache_manager
        self._managers = list(kv_cache_manager.coordinator.single_type_managers)
        self.is_usable = bool(self._managers) and all(
            not manager.counts_encoder_tokens
            and manager.num_required_blocks(4 * size) == 4
            and (manager.can_step_back or kv_cache_manager.enable_caching)
            for manager, size in zip(self._managers, self.sizes, strict=True)
        )
        if not self.is_usable:
            logger.warning_once(
                "the KV connector neither saves nor loads: a KV cache group keeps its "
                "blocks for one request only, so no prefix of another can be found"
            )

    def add(self, request: Any) -> None:
        self.requests[request.request_id] = request

    def forget(self, request_id: str) -> None:
        self.requests.pop(request_id, None)
        self._keys.pop(request_id, None)
        self._progress.pop(request_id, None)

    # --- names ------------------------------------------------------------------------

    def _links(self, request: Any) -> list[bytes]:
        keys = self._keys.get(request.request_id)
        if keys is None:
            keys = self._keys[request.request_id] = _Keys(request, self.unit)
        keys.extend(request)
        return keys.links

    def _key(self, links: list[bytes], group_id: int, index: int) -> str | None:
        """The name of block `index` of a group, None while it is not full."""
        last = (index + 1) * self.sizes[group_id] // self.unit
        return f"{links[last - 1].hex()}-{group_id}" if last <= len(links) else None

    def published(self, request: Any, group_id: int, index: int) -> tuple[bytes, range]:
        """The hash by which the engine's own events name block `index` of a group, and
        the positions of its tokens."""
        size = self.sizes[group_id]
        hashes = self._kv_cache_manager.block_hashes_of(request, group_id)
        return hashes[index], range(index * size, (index + 1) * size)

    # --- hits -------------------------------------------------------------------------

    def needed_keys(self, request: Any, num_local: int, end: int) -> list[str]:
        """Names of the blocks that must be loaded to go on after `end` tokens, of which
        the first `num_local` are here."""
        return [ref.key for ref in self.needed(request, num_local, end)]

    def needed(self, request: Any, num_local: int, end: int) -> list[BlockRef]:
        """The same blocks with their places, and no block of the pool (-1)."""
        links = self._links(request)
        return [
            BlockRef(key=key, group_id=group_id, block_id=-1, index=index)
            for group_id in range(len(self.sizes))
            for index in self._needed(group_id, num_local, end)
            if (key := self._key(links, group_id, index)) is not None
        ]

    def _needed(self, group_id: int, num_local: int, end: int) -> range:
        size = self.sizes[group_id]
        skipped = self._managers[group_id].get_num_skipped_tokens(end)
        return range(max(skipped, num_local) // size, -(-end // size))

    def longest_hit(
        self, request: Any, num_local: int, has: Callable[[str], bool]
    ) -> int:
        """How many tokens after the first `num_local` can be loaded from blocks that
        `has` says are stored. The last token of a request is never among them."""
        limit = (request.num_tokens - 1) // self.alignment * self.alignment
        if not self.is_usable or num_local % self.alignment:
            return 0
        links, known = self._links(request), dict[str, bool]()

        def is_stored(group_id: int, index: int) -> bool:
            key = self._key(links, group_id, index)
            if key is None:
                return False
            if key not in known:
                known[key] = has(key)
            return known[key]

        # Groups that need all of a prefix say how far it can reach at most.
        others = []
        for group_id, (manager, size) in enumerate(
            zip(self._managers, self.sizes, strict=True)
        ):
            if manager.get_num_skipped_tokens(limit):
                others.append(group_id)
                continue
            end = num_local
            while end < limit and is_stored(group_id, end // size):
                end += size
            limit = min(limit, end // self.alignment * self.alignment)
        for end in range(limit, num_local, -self.alignment):
            if all(
                is_stored(group_id, index)
                for group_id in others
                for index in self._needed(group_id, num_local, end)
            ):
                return end - num_local
        return 0

    def to_load(
        self, request: Any, blocks: Any, num_local: int, num_external: int
    ) -> list[BlockRef]:
        """The blocks to fill so that the tokens of a hit are there."""
        links, end, found = self._links(request), num_local + num_external, []
        for group_id, group in enumerate(blocks.blocks):
            for index in self._needed(group_id, num_local, end):
                key = self._key(links, group_id, index)
                if key is None:
                    raise ValueError(
                        f"request {request.request_id!r} is to load {num_external} "
                        f"tokens after {num_local}, which is within a block: expected "
                        f"multiples of {self.alignment}"
                    )
                if not group[index].is_null:
                    block_id = group[index].block_id
                    found.append(
                        BlockRef(
                            key=key,
                            group_id=group_id,
                            block_id=block_id,
                            index=index,
                        )
                    )
        return found

    def num_tokens_of(self, refs: list[BlockRef], keys: Container[str]) -> int:
        """Tokens for which a load of `refs` needs a block that is among `keys`: one
        such block, of any group, counts for all of its tokens."""
        units: set[int] = set()
        for ref in refs:
            if ref.key in keys:
                per_block = self.sizes[ref.group_id] // self.unit
                units.update(range(ref.index * per_block, (ref.index + 1) * per_block))
        return len(units) * self.unit

    # --- saves ------------------------------------------------------------------------

    def to_save(
        self, scheduled: SchedulerOutput, prompt_only: bool = False
    ) -> Iterator[tuple[Any, list[BlockRef]]]:
        """For each request of a step, the blocks that are complete once the step is
        computed and were not handed out before.

        Where blocks are cached by their hash, that hash says that a block's content can
        be relied on: blocks of a load within this step have none yet. Elsewhere only
        what earlier steps computed counts.
        """
        if not self.is_usable:
            return
        for req_id, num_tokens in scheduled.num_scheduled_tokens.items():
            request = self.requests.get(req_id)
            if request is None:
                continue
            end = request.num_computed_tokens
            if self._kv_cache_manager.enable_caching:
                end += num_tokens
            if prompt_only:
                end = min(end, request.num_prompt_tokens)
            found = self._complete(request, end)
            if found:
                yield request, found

    def _is_certain(self, groups: Any, end: int) -> Callable[[int, int], bool]:
        """Tells of block `index` of a group whether its content will be what its name
        says, once the request's first `end` tokens are computed."""
        if not self._kv_cache_manager.enable_caching:
            return lambda group_id, index: True

        def is_hashed(group_id: int, index: int) -> bool:
            return groups[group_id][index].block_hash is not None

        # States get their hash a step later, when they may be gone. They are as certain
        # as the last tokens of a group that keeps tokens, where the step ends at the
        # block's end or every block gets its state.
        by_token = [
            group_id
            for group_id, manager in enumerate(self._managers)
            if manager.can_step_back
        ]
        tokens_are_certain = bool(by_token) and all(
            is_hashed(group_id, end // self.sizes[group_id] - 1)
            for group_id in by_token
            if end >= self.sizes[group_id]
        )

        def is_certain(group_id: int, index: int) -> bool:
            manager = self._managers[group_id]
            if manager.can_step_back or not tokens_are_certain:
                return is_hashed(group_id, index)
            ends_here = (index + 1) * self.sizes[group_id] == end
            return ends_here or manager.step_alignment_tokens == 1

        return is_certain

    def _complete(self, request: Any, end: int) -> list[BlockRef]:
        req_id = request.request_id
        progress = self._progress.get(req_id)
        if progress is None:
            progress = self._progress[req_id] = [_Progress() for _ in self.sizes]
        if all(
            end // size <= done.cursor
            for size, done in zip(self.sizes, progress, strict=True)
        ):
            return []
        links, found = self._links(request), []
        groups = self._kv_cache_manager.get_blocks(req_id).blocks
        is_certain = self._is_certain(groups, end)
        for group_id, group in enumerate(groups):
            done = progress[group_id]
            for index in range(
                done.cursor, min(end // self.sizes[group_id], len(group))
            ):
                block, key = group[index], self._key(links, group_id, index)
                if key is None or done.has(index):
                    continue
                if block.is_null:
                    done.note(index)
                elif is_certain(group_id, index):
                    done.note(index)
                    found.append(
                        BlockRef(
                            key=key,
                            group_id=group_id,
                            block_id=block.block_id,
                            index=index,
                        )
                    )
        return found
