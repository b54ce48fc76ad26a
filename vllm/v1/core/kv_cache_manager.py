"""Blocks for requests: what the scheduler asks and what it gets.

Knows how many tokens a request has and needs. The groups behind it are the
coordinator's matter, the order of requests is the scheduler's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, overload

from vllm.distributed.kv_events import BlockStored, KVCacheEvent
from vllm.logger import init_logger
from vllm.v1.core.block_hash import BlockHash, KVCacheBlock, block_hashes_of_size
from vllm.v1.core.kv_cache_coordinator import get_kv_cache_coordinator
from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
)
from vllm.v1.metrics.stats import PrefixCacheStats
from vllm.v1.request import Request, RequestStatus

logger = init_logger(__name__)


@dataclass
class KVCacheBlocks:
    """Blocks of one request: one sequence for each KV cache group."""

    blocks: tuple[Sequence[KVCacheBlock], ...]

    def __add__(self, other: "KVCacheBlocks") -> "KVCacheBlocks":
        """The blocks of both, group by group."""
        return KVCacheBlocks(
            tuple(
                [*mine, *theirs]
                for mine, theirs in zip(self.blocks, other.blocks, strict=True)
            )
        )

    @overload
    def get_block_ids(
        self, allow_none: Literal[False] = False
    ) -> tuple[list[int], ...]: ...

    @overload
    def get_block_ids(
        self, allow_none: Literal[True] = True
    ) -> tuple[list[int], ...] | None: ...

    def get_block_ids(self, allow_none: bool = False) -> tuple[list[int], ...] | None:
        """Block ids by group; with `allow_none`, None when there is no block."""
        if allow_none and not any(self.blocks):
            return None
        return tuple([block.block_id for block in group] for group in self.blocks)

    def get_unhashed_block_ids(self) -> list[int]:
        """Ids of the blocks that are not cached, of the only group."""
        if len(self.blocks) != 1:
            raise ValueError(f"expected one KV cache group, got {len(self.blocks)}")
        return [block.block_id for block in self.blocks[0] if block.block_hash is None]

    def new_empty(self) -> "KVCacheBlocks":
        """No blocks, for as many groups."""
        return KVCacheBlocks(tuple(() for _ in self.blocks))


def _no_slots(request: Request) -> ValueError:
    return ValueError(
        f"request {request.request_id!r} asks for no slots: it has no token to compute "
        "or to load"
    )


class KVCacheManager:
    """Allocates, caches and frees the blocks of requests over all groups.

    `hash_block_size` divides the block size of every group. `watermark` is the share of
    blocks kept free when requests are admitted beside others.
    """

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        max_model_len: int,
        scheduler_block_size: int,
        hash_block_size: int,
        max_in_flight_tokens: int | None = None,
        enable_caching: bool = True,
        use_eagle: bool = False,
        num_prefill_lookahead: int = 0,
        log_stats: bool = False,
        enable_kv_cache_events: bool = False,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
        metrics_collector: KVCacheMetricsCollector | None = None,
        watermark: float = 0.0,
    ) -> None:
        self.max_model_len = max_model_len
        self.log_stats = log_stats
        self.kv_cache_config = kv_cache_config
        self.coordinator = get_kv_cache_coordinator(
            kv_cache_config=kv_cache_config,
            enable_caching=enable_caching,
            max_model_len=max_model_len,
            max_in_flight_tokens=max_in_flight_tokens or max_model_len,
            use_eagle=use_eagle,
            enable_kv_cache_events=enable_kv_cache_events,
            dcp_world_size=dcp_world_size,
            pcp_world_size=pcp_world_size,
            scheduler_block_size=scheduler_block_size,
            hash_block_size=hash_block_size,
            metrics_collector=metrics_collector,
            num_prefill_lookahead=num_prefill_lookahead,
        )
        self.enable_caching = self.coordinator.enable_caching
        self.block_pool = self.coordinator.block_pool
        self.num_kv_cache_groups = len(kv_cache_config.kv_cache_groups)
        self.num_watermark_blocks = int(watermark * self.block_pool.num_usable_blocks)
        self.empty_kv_cache_blocks = KVCacheBlocks(
            tuple(() for _ in range(self.num_kv_cache_groups))
        )
        self.prefix_cache_stats = PrefixCacheStats() if log_stats else None
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        self._kinds = [get_kv_cache_spec_kind(spec).value for spec in specs]
        self._windows = [get_kv_cache_spec_sliding_window(spec) for spec in specs]

    @property
    def usage(self) -> float:
        """The share of blocks that requests hold, 0 to 1."""
        return self.block_pool.get_usage()

    # Looking up

    def get_computed_blocks(self, request: Request) -> tuple[KVCacheBlocks, int, int]:
        """The cached blocks of a request's longest cached prefix, and its length.

        The last token is never among them: its logits are wanted. The third value tells
        how many tokens beyond the prefix some groups, but not all, have cached.
        """
        if request.skip_reading_prefix_cache or not self.enable_caching:
            return self.empty_kv_cache_blocks, 0, 0
        blocks, num_tokens, num_beyond = self.coordinator.find_longest_cache_hit(
            request.block_hashes, request.num_tokens - 1
        )
        if self.prefix_cache_stats is not None:
            self.prefix_cache_stats.record(
                num_tokens=request.num_tokens,
                num_hits=num_tokens,
                preempted=request.num_preemptions > 0,
            )
        return self.create_kv_cache_blocks(blocks), num_tokens, num_beyond

    def discard_lookup(self, request: Request, num_cached_tokens: int) -> None:
        """Takes a look-up out of the statistics: the request waits and asks again."""
        stats = self.prefix_cache_stats
        if (
            stats is None
            or request.skip_reading_prefix_cache
            or not self.enable_caching
        ):
            return
        if request.num_preemptions > 0:
            stats.preempted_requests -= 1
            stats.preempted_queries -= request.num_tokens
            stats.preempted_hits -= num_cached_tokens
        else:
            stats.requests -= 1
            stats.queries -= request.num_tokens
            stats.hits -= num_cached_tokens

    def estimate_cached_tokens(self, request: Request) -> int:
        """How many tokens of the request are cached now. Leaves statistics alone."""
        if request.skip_reading_prefix_cache or not self.enable_caching:
            return 0
        return self.coordinator.find_longest_cache_hit(
            request.block_hashes, request.num_tokens - 1
        )[1]

    # Allocating

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        has_scheduled_reqs: bool = True,
    ) -> KVCacheBlocks | None:
        """Gives a request slots for its next tokens, or None when blocks are short.

        The tokens, in order: those computed already; `num_new_computed_tokens` just hit
        in `new_computed_blocks`; `num_external_computed_tokens` that a connector loads;
        `num_new_tokens` to compute; `num_lookahead_tokens` for drafts. Returns the new
        blocks, without the hit ones; full ones are cached, unless their content comes
        later (`delay_cache_blocks`). When it returns None, all that happened is that
        blocks came free which the request does not need any more.

        `full_sequence_must_fit` refuses a request of which not all known tokens fit;
        `reserved_blocks` free blocks are left alone, and so is the watermark when a
        request is admitted beside others (`has_scheduled_reqs`).
        """
        if num_new_tokens + num_external_computed_tokens <= 0:
            raise _no_slots(request)
        num_local = request.num_computed_tokens + num_new_computed_tokens
        num_computed = num_local + num_external_computed_tokens
        num_known = min(num_computed + num_new_tokens, self.max_model_len)
        num_slots = min(num_known + num_lookahead_tokens, self.max_model_len)
        if self.coordinator.gives_back_early:
            self._give_back_skipped(request)
        new_blocks: KVCacheBlocks | None = self.empty_kv_cache_blocks
        # Most steps of a running request end within a block that it holds.
        if (
            new_computed_blocks is not None
            or full_sequence_must_fit
            or not self.coordinator.has_slots(
                request.request_id, num_slots, num_encoder_tokens
            )
        ):
            new_blocks = self._take_blocks(
                request,
                (new_computed_blocks or self.empty_kv_cache_blocks).blocks,
                num_local,
                num_computed,
                num_known,
                num_slots,
                num_encoder_tokens,
                full_sequence_must_fit,
                self._num_available(request, has_scheduled_reqs) - reserved_blocks,
            )
        # Tokens not known yet (drafts, samples under way) cannot be hashed.
        if new_blocks is not None and not delay_cache_blocks:
            self.cache_blocks(request, min(num_known, request.num_tokens))
        return new_blocks

    def _take_blocks(
        self,
        request: Request,
        hit: tuple[Sequence[KVCacheBlock], ...],
        num_local: int,
        num_computed: int,
        num_known: int,
        num_slots: int,
        num_encoder_tokens: int,
        full_sequence_must_fit: bool,
        num_available: int,
    ) -> KVCacheBlocks | None:
        """Extends a request to `num_slots` slots in all groups, from `num_available`
        free blocks; None, and nothing happens, when these are too few."""
        # Even if all tokens are loaded, what the last one attends to is kept.
        num_attended = min(num_computed, max(request.num_tokens - 1, num_local))
        needed = partial(
            self.coordinator.get_num_blocks_to_allocate,
            request.request_id,
            new_computed_blocks=hit,
            num_encoder_tokens=num_encoder_tokens,
            total_computed_tokens=num_attended,
            num_local_computed_tokens=num_local,
            num_tokens_main_model=num_known,
        )
        num_needed = needed(num_slots)
        if full_sequence_must_fit:
            full = max(min(request.num_tokens, self.max_model_len), num_slots)
            num_needed = max(num_needed, needed(full, apply_admission_cap=True))
        if num_needed > num_available:
            return None
        self.coordinator.add_local_computed_blocks(
            request.request_id, hit, num_local, num_attended - num_local
        )
        new_blocks = self.coordinator.allocate_new_blocks(
            request.request_id, num_slots, num_known, num_encoder_tokens
        )
        return self.create_kv_cache_blocks(new_blocks)

    def _give_back_skipped(self, request: Request) -> None:
        # Tokens under way are not certain: what they attend to may be read once more.
        certain = request.num_computed_tokens - request.num_output_placeholders
        self.remove_skipped_blocks(
            request.request_id, certain, request.num_prompt_tokens
        )

    def _num_available(self, request: Request, has_others: bool) -> int:
        """Free blocks, without the watermark for a request that is admitted."""
        num_free = self.block_pool.get_num_free_blocks()
        if request.status != RequestStatus.RUNNING and has_others:
            return num_free - self.num_watermark_blocks
        return num_free

    def num_blocks_short_of(self, request: Request, num_tokens: int) -> int:
        """Free blocks that a request with blocks still takes to reach `num_tokens`, the
        most it holds at once."""
        return self.coordinator.get_num_blocks_to_allocate(
            request_id=request.request_id,
            num_tokens=min(num_tokens, self.max_model_len),
            new_computed_blocks=self.empty_kv_cache_blocks.blocks,
            num_encoder_tokens=0,
            total_computed_tokens=request.num_computed_tokens,
            num_local_computed_tokens=request.num_computed_tokens,
            num_tokens_main_model=num_tokens,
            apply_admission_cap=True,
        )

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Caches the full blocks of the first `num_computed_tokens` tokens."""
        if self.enable_caching:
            self.coordinator.cache_blocks(request, num_computed_tokens)

    # Giving back

    def free(self, request: Request) -> None:
        """Frees a request's blocks. Those cached stay so until they are reused; its
        last block is reused first. Does nothing for a request without blocks."""
        self.coordinator.free(request.request_id)

    def pop_blocks_for_free(self, request: Request) -> list[KVCacheBlock]:
        """Forgets a request; the caller frees the returned blocks in this order, when
        nothing reads or writes them any more."""
        return self.coordinator.pop_blocks_for_free(request.request_id)

    def remove_skipped_blocks(
        self,
        request_id: str,
        processed_computed_tokens: int,
        num_prompt_tokens: int | None = None,
    ) -> None:
        """Gives back blocks that no token after so many attends to."""
        self.coordinator.remove_skipped_blocks(
            request_id, processed_computed_tokens, num_prompt_tokens
        )

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Forgets what these blocks cache. Their holders keep them."""
        self.block_pool.evict_blocks(block_ids)

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached blocks; False while a request holds any."""
        if not self.block_pool.reset_prefix_cache():
            return False
        if self.prefix_cache_stats is not None:
            self.prefix_cache_stats.reset = True
        return True

    # Reporting

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """All blocks of a request."""
        return self.create_kv_cache_blocks(self.coordinator.get_blocks(request_id))

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """The ids of all blocks of a request, by group."""
        return self.get_blocks(request_id).get_block_ids()

    def create_kv_cache_blocks(
        self, blocks: tuple[list[KVCacheBlock], ...]
    ) -> KVCacheBlocks:
        """Wraps block lists; the empty ones share one object."""
        return KVCacheBlocks(blocks) if any(blocks) else self.empty_kv_cache_blocks

    def truncate_computed_blocks(
        self, blocks: KVCacheBlocks, num_computed_tokens: int
    ) -> KVCacheBlocks:
        """The blocks of the first `num_computed_tokens` tokens of a hit. ValueError
        unless blocks of all groups end there."""
        managers = self.coordinator.single_type_managers
        cut = []
        for group, manager in zip(blocks.blocks, managers, strict=True):
            if num_computed_tokens % manager.block_size:
                raise ValueError(
                    f"a hit cannot end after {num_computed_tokens} tokens: blocks of "
                    f"group {manager.kv_cache_group_id} hold {manager.block_size}"
                )
            cut.append(list(group[: num_computed_tokens // manager.block_size]))
        return self.create_kv_cache_blocks(tuple(cut))

    def make_prefix_cache_stats(self) -> PrefixCacheStats | None:
        """Look-ups since the last call, or None when statistics are off."""
        if self.prefix_cache_stats is None:
            return None
        stats, self.prefix_cache_stats = self.prefix_cache_stats, PrefixCacheStats()
        return stats

    def block_hashes_of(self, request: Request, group_id: int) -> Sequence[BlockHash]:
        """The hashes of a request's full blocks in one KV cache group."""
        size = self.coordinator.single_type_managers[group_id].block_size
        return block_hashes_of_size(request, self.block_pool.hash_block_size, size)

    def take_events(self) -> list[KVCacheEvent]:
        """Block events since the last call."""
        events = self.block_pool.take_events()
        for event in events:
            if isinstance(event, BlockStored) and event.group_idx is not None:
                event.kv_cache_spec_kind = self._kinds[event.group_idx]
                event.kv_cache_spec_sliding_window = self._windows[event.group_idx]
        return events

    def take_new_block_ids(self) -> list[int]:
        """Blocks handed out since the last call that workers must zero."""
        return self.coordinator.take_new_block_ids()

    def new_step_starts(self) -> None:
        """Tells that the steps scheduled so far come before what is decided next."""
        self.coordinator.new_step_starts()
