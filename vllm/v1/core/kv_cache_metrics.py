"""How long sampled blocks live, idle and wait between uses. Decides nothing."""

import random
import time
from collections import deque
from dataclasses import dataclass
from itertools import pairwise

from vllm.v1.core.block_hash import KVCacheBlock

_NS = 1e-9
_KEPT_ACCESSES = 4


@dataclass(frozen=True, kw_only=True)
class KVCacheEvictionEvent:
    """The life of one evicted block, in seconds."""

    lifetime_seconds: float
    idle_seconds: float
    reuse_gaps_seconds: tuple[float, ...]


class BlockMetricsState:
    """Times of one block: its allocation, its last use, its last few uses."""

    def __init__(self) -> None:
        now = time.monotonic_ns()
        self.birth_time_ns = now
        self.last_access_ns = now
        self.access_history: deque[int] = deque(maxlen=_KEPT_ACCESSES)

    def record_access(self) -> None:
        """Notes a use now."""
        self.last_access_ns = time.monotonic_ns()
        self.access_history.append(self.last_access_ns)

    def get_lifetime_seconds(self) -> float:
        """Seconds since allocation."""
        return (time.monotonic_ns() - self.birth_time_ns) * _NS

    def get_idle_time_seconds(self) -> float:
        """Seconds since the last use."""
        return (time.monotonic_ns() - self.last_access_ns) * _NS

    def get_reuse_gaps_seconds(self) -> list[float]:
        """Seconds between the last few uses; empty when there were fewer than two."""
        return [(b - a) * _NS for a, b in pairwise(self.access_history)]


class KVCacheMetricsCollector:
    """Follows a random share of the blocks from allocation to eviction."""

    def __init__(self, sample_rate: float = 0.01) -> None:
        if not 0.0 < sample_rate <= 1.0:
            raise ValueError(
                f"sample_rate must be in (0, 1.0], got {sample_rate}: it is the share "
                "of blocks to follow"
            )
        self.sample_rate = sample_rate
        self.block_metrics: dict[int, BlockMetricsState] = {}
        self._events: list[KVCacheEvictionEvent] = []

    def should_sample_block(self) -> bool:
        return random.random() < self.sample_rate

    def on_block_allocated(self, block: KVCacheBlock) -> None:
        """Starts to follow the block, or not, by chance."""
        if self.should_sample_block():
            self.block_metrics[block.block_id] = BlockMetricsState()

    def on_block_accessed(self, block: KVCacheBlock) -> None:
        """Notes a prefix hit on a followed block."""
        state = self.block_metrics.get(block.block_id)
        if state is not None:
            state.record_access()

    def on_block_evicted(self, block: KVCacheBlock) -> None:
        """Closes the record of a followed block."""
        state = self.block_metrics.pop(block.block_id, None)
        if state is None:
            return
        self._events.append(
            KVCacheEvictionEvent(
                lifetime_seconds=state.get_lifetime_seconds(),
                idle_seconds=state.get_idle_time_seconds(),
                reuse_gaps_seconds=tuple(state.get_reuse_gaps_seconds()),
            )
        )

    def reset(self) -> None:
        """Forgets all blocks being followed."""
        self.block_metrics.clear()

    def drain_events(self) -> list[KVCacheEvictionEvent]:
        """The evictions since the last call."""
        events, self._events = self._events, []
        return events
