"""Several groups, one pool: every act on a request reaches all of its groups.

Knows which prefix all groups can serve. Knows nothing of policy.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import lcm
from typing import Any

from vllm.v1.core.block_hash import (
    BlockHash,
    BlockHashList,
    BlockHashListWithBlockSize,
    KVCacheBlock,
)
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector
from vllm.v1.core.managers.base import SingleTypeKVCacheManager
from vllm.v1.core.single_type_kv_cache_manager import get_manager_for_kv_cache_spec
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

BlocksByGroup = tuple[list[KVCacheBlock], ...]


class KVCacheCoordinator(ABC):
    """Passes every act on to the managers of all groups, in the order of the groups."""

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        max_model_len: int,
        max_in_flight_tokens: int,
        use_eagle: bool,
        enable_caching: bool,
        enable_kv_cache_events: bool,
        dcp_world_size: int,
        pcp_world_size: int,
        scheduler_block_size: int,
        hash_block_size: int,
        metrics_collector: KVCacheMetricsCollector | None = None,
        num_prefill_lookahead: int = 0,
    ) -> None:
        self.kv_cache_config = kv_cache_config
        self.max_model_len = max_model_len
        self.use_eagle = use_eagle
        self.enable_caching = enable_caching
        self.dcp_world_size = dcp_world_size
        self.pcp_world_size = pcp_world_size
        self.hash_block_size = hash_block_size
        self.num_prefill_lookahead = num_prefill_lookahead
        self.block_pool = BlockPool(
            kv_cache_config.num_blocks,
            enable_caching,
            hash_block_size,
            enable_kv_cache_events,
            metrics_collector,
        )
        self.single_type_managers: tuple[SingleTypeKVCacheManager, ...] = tuple(
            get_manager_for_kv_cache_spec(
                kv_cache_spec=group.kv_cache_spec,
                max_in_flight_tokens=max_in_flight_tokens,
                max_model_len=max_model_len,
                block_pool=self.block_pool,
                enable_caching=enable_caching,
                kv_cache_group_id=group_id,
                scheduler_block_size=scheduler_block_size,
                dcp_world_size=dcp_world_size,
                pcp_world_size=pcp_world_size,
                needs_kv_cache_zeroing=kv_cache_config.needs_kv_cache_zeroing,
            )
            for group_id, group in enumerate(kv_cache_config.kv_cache_groups)
        )
        #: Says whether `remove_skipped_blocks` can find anything in any group.
        self.gives_back_early = any(
            manager.gives_back_early for manager in self.single_type_managers
        )
        self._set_up()

    @abstractmethod
    def _set_up(self) -> None:
        """Ends construction: a subclass checks what it is given and looks at groups."""

    def has_slots(
        self, request_id: str, num_tokens: int, num_encoder_tokens: int
    ) -> bool:
        """Says whether a request holds the blocks of so many tokens in all groups."""
        for manager in self.single_type_managers:
            counted = (
                num_encoder_tokens if manager.counts_encoder_tokens else num_tokens
            )
            if not manager.has_slots(request_id, counted):
                return False
        return True

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: tuple[Sequence[KVCacheBlock], ...],
        num_encoder_tokens: int,
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
    ) -> int:
        """Free blocks that all groups together take for `num_tokens` slots."""
        total = 0
        for manager, computed in zip(
            self.single_type_managers, new_computed_blocks, strict=True
        ):
            counts_encoder = manager.counts_encoder_tokens
            total += manager.get_num_blocks_to_allocate(
                request_id,
                num_encoder_tokens if counts_encoder else num_tokens,
                computed,
                0 if counts_encoder else total_computed_tokens,
                0 if counts_encoder else num_local_computed_tokens,
                num_encoder_tokens if counts_encoder else num_tokens_main_model,
                apply_admission_cap,
            )
        return total

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: tuple[Sequence[KVCacheBlock], ...],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        """Starts a request with its cached blocks in every group. Comes before any
        group takes new blocks, which could be the cached ones of another group."""
        for manager, computed in zip(
            self.single_type_managers, new_computed_blocks, strict=True
        ):
            manager.add_local_computed_blocks(
                request_id,
                computed,
                num_local_computed_tokens,
                num_external_computed_tokens,
            )

    def allocate_new_blocks(
        self,
        request_id: str,
        num_tokens: int,
        num_tokens_main_model: int,
        num_encoder_tokens: int = 0,
    ) -> BlocksByGroup:
        """Extends every group to `num_tokens` slots; returns the new blocks."""
        return tuple(
            manager.allocate_new_blocks(
                request_id,
                num_encoder_tokens if manager.counts_encoder_tokens else num_tokens,
                num_tokens_main_model,
            )
            for manager in self.single_type_managers
        )

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Caches the full blocks of the first `num_computed_tokens` tokens."""
        for manager in self.single_type_managers:
            manager.cache_blocks(request, num_computed_tokens)

    def free(self, request_id: str) -> None:
        """Frees a request's blocks in every group."""
        for manager in self.single_type_managers:
            manager.free(request_id)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Forgets a request; returns its blocks, for the caller to free in order."""
        return [
            block
            for manager in self.single_type_managers
            for block in manager.pop_blocks_for_free(request_id)
        ]

    def remove_skipped_blocks(
        self,
        request_id: str,
        processed_computed_tokens: int,
        num_prompt_tokens: int | None = None,
    ) -> None:
        """Gives back blocks that no later token attends to."""
        for manager in self.single_type_managers:
            manager.remove_skipped_blocks(
                request_id, processed_computed_tokens, num_prompt_tokens
            )

    def get_blocks(self, request_id: str) -> BlocksByGroup:
        """The request's blocks of every group; empty lists when it has none."""
        return tuple(
            manager.req_to_blocks.get(request_id) or []
            for manager in self.single_type_managers
        )

    @property
    def can_step_back(self) -> bool:
        """Says whether a request can go back by a token in all groups."""
        return all(manager.can_step_back for manager in self.single_type_managers)

    @property
    def step_alignment_tokens(self) -> int:
        """Positions at which the results of a step can be cached in all groups."""
        return lcm(*(m.step_alignment_tokens for m in self.single_type_managers))

    def take_new_block_ids(self) -> list[int]:
        """Blocks handed out since the last call that workers must zero."""
        return [
            block_id
            for manager in self.single_type_managers
            for block_id in manager.take_new_block_ids()
        ]

    def new_step_starts(self) -> None:
        """Tells the managers that earlier steps are behind."""
        for manager in self.single_type_managers:
            manager.new_step_starts()

    @abstractmethod
    def find_longest_cache_hit(
        self, block_hashes: list[BlockHash], max_cache_hit_length: int
    ) -> tuple[BlocksByGroup, int, int]:
        """The longest prefix that every group has cached, at most so many tokens.

        Returns its blocks by group, its length, and how many tokens beyond it the
        groups that keep everything have cached.
        """


class KVCacheCoordinatorNoPrefixCache(KVCacheCoordinator):
    """No caching, any number of groups: nothing is ever hit."""

    def _set_up(self) -> None:
        if self.enable_caching:
            raise ValueError("this coordinator serves engines without prefix caching")

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        return

    def find_longest_cache_hit(
        self, block_hashes: list[BlockHash], max_cache_hit_length: int
    ) -> tuple[BlocksByGroup, int, int]:
        return tuple([] for _ in self.single_type_managers), 0, 0


@dataclass(kw_only=True)
class _Kind:
    """Groups with equal specs: they hit together, so they are searched together."""

    manager: SingleTypeKVCacheManager
    group_ids: list[int] = field(default_factory=list)

    def find(
        self,
        coordinator: KVCacheCoordinator,
        block_hashes: list[BlockHash],
        max_length: int,
        alignment_tokens: int,
        drop_eagle_block: bool = False,
    ) -> tuple[BlocksByGroup, int]:
        hashes: BlockHashList = block_hashes
        if self.manager.block_size != coordinator.hash_block_size:
            hashes = BlockHashListWithBlockSize(
                block_hashes, coordinator.hash_block_size, self.manager.block_size
            )
        return self.manager.find_longest_cache_hit(
            block_hashes=hashes,
            max_length=max_length,
            kv_cache_group_ids=self.group_ids,
            block_pool=coordinator.block_pool,
            kv_cache_spec=self.manager.kv_cache_spec,
            drop_eagle_block=drop_eagle_block,
            alignment_tokens=alignment_tokens,
            dcp_world_size=coordinator.dcp_world_size,
            pcp_world_size=coordinator.pcp_world_size,
        )


class UnitaryKVCacheCoordinator(KVCacheCoordinator):
    """One group."""

    def _set_up(self) -> None:
        if len(self.single_type_managers) != 1:
            raise ValueError(
                f"expected one KV cache group, got {len(self.single_type_managers)}"
            )
        self._kind = _Kind(manager=self.single_type_managers[0], group_ids=[0])

    def find_longest_cache_hit(
        self, block_hashes: list[BlockHash], max_cache_hit_length: int
    ) -> tuple[BlocksByGroup, int, int]:
        blocks, length = self._kind.find(
            self,
            block_hashes,
            max_cache_hit_length,
            alignment_tokens=self._kind.manager.block_size,
            drop_eagle_block=self.use_eagle,
        )
        return blocks, length, 0


class HybridKVCacheCoordinator(KVCacheCoordinator):
    """Several groups, of any kinds and block sizes.

    A hit ends where the blocks of all groups end. Each kind of group is asked in turn
    for its longest hit within the others'; the answer stands when no kind shortens it.
    Lengths only shrink, so this ends.
    """

    def _set_up(self) -> None:
        if self.use_eagle:
            raise ValueError("draft models are not served with several KV cache groups")
        kinds: list[_Kind] = []
        for group_id, manager in enumerate(self.single_type_managers):
            for kind in kinds:
                if kind.manager.kv_cache_spec == manager.kv_cache_spec:
                    kind.group_ids.append(group_id)
                    break
            else:
                kinds.append(_Kind(manager=manager, group_ids=[group_id]))
        # Those whose hits can be cut are searched once, first.
        kinds.sort(key=lambda kind: not kind.manager.hits_are_prefix_closed)
        self._kinds = kinds
        self.lcm_block_size = lcm(*(k.manager.block_size for k in kinds))

    def find_longest_cache_hit(
        self, block_hashes: list[BlockHash], max_cache_hit_length: int
    ) -> tuple[BlocksByGroup, int, int]:
        length = max_cache_hit_length
        found: list[tuple[BlocksByGroup, int] | None] = [None] * len(self._kinds)
        longest = 0
        num_agreeing = turn = 0
        while num_agreeing < len(self._kinds):
            index = turn % len(self._kinds)
            kind, previous = self._kinds[index], found[index]
            if previous is not None and kind.manager.hits_are_prefix_closed:
                hit_length = min(previous[1], length)
                found[index] = (previous[0], hit_length)
            else:
                blocks, hit_length = kind.find(
                    self, block_hashes, length, self.lcm_block_size
                )
                found[index] = (blocks, hit_length)
                if kind.manager.hits_are_prefix_closed:
                    longest = max(longest, hit_length)
            num_agreeing = num_agreeing + 1 if hit_length == length else 1
            length = hit_length
            turn += 1
        by_group: list[list[KVCacheBlock]] = [[] for _ in self.single_type_managers]
        for kind, hit in zip(self._kinds, found, strict=True):
            if hit is None:
                continue
            num_blocks = length // kind.manager.block_size
            for group_id, group_blocks in zip(kind.group_ids, hit[0], strict=True):
                by_group[group_id] = group_blocks[:num_blocks]
        return tuple(by_group), length, max(longest - length, 0)

    def find_longest_cache_hit_per_group(
        self, block_hashes: list[BlockHash], max_cache_hit_length: int
    ) -> tuple[BlocksByGroup, tuple[int, ...]]:
        """Each group's own longest hit, in its own block size, and its length."""
        by_group: list[list[KVCacheBlock]] = [[] for _ in self.single_type_managers]
        lengths = [0] * len(by_group)
        for kind in self._kinds:
            blocks, length = kind.find(
                self, block_hashes, max_cache_hit_length, kind.manager.block_size
            )
            for group_id, group_blocks in zip(kind.group_ids, blocks, strict=True):
                by_group[group_id], lengths[group_id] = group_blocks, length
        return tuple(by_group), tuple(lengths)


def get_kv_cache_coordinator(
    kv_cache_config: KVCacheConfig, enable_caching: bool, **kwargs: Any
) -> KVCacheCoordinator:
    """The coordinator for this many groups, with or without caching."""
    coordinator_class: type[KVCacheCoordinator]
    num_groups = len(kv_cache_config.kv_cache_groups)
    if not enable_caching or num_groups == 0:
        coordinator_class, enable_caching = KVCacheCoordinatorNoPrefixCache, False
    elif num_groups == 1:
        coordinator_class = UnitaryKVCacheCoordinator
    else:
        coordinator_class = HybridKVCacheCoordinator
    return coordinator_class(
        kv_cache_config=kv_cache_config, enable_caching=enable_caching, **kwargs
    )
