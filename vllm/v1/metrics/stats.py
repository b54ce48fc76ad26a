"""Numbers about scheduling, caching and latency: plain data, summed by the loggers."""

import time
from collections import deque
from dataclasses import dataclass, field


@dataclass
class BaseCacheStats:
    """Queries and hits of a cache since the last report, in tokens or items."""

    reset: bool = False
    requests: int = 0
    queries: int = 0
    hits: int = 0


@dataclass
class PrefixCacheStats(BaseCacheStats):
    """Prefix-cache look-ups in tokens; requests resumed after preemption apart."""

    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0

    def record(self, num_tokens: int, num_hits: int, preempted: bool) -> None:
        """Adds one look-up of `num_tokens` tokens, `num_hits` of them cached."""
        if preempted:
            self.preempted_requests += 1
            self.preempted_queries += num_tokens
            self.preempted_hits += num_hits
        else:
            self.requests += 1
            self.queries += num_tokens
            self.hits += num_hits


@dataclass
class ConnectorPrefixCacheStats(PrefixCacheStats):
    """Look-ups through a connector, and where it found the tokens of its hits."""

    hits_by_source: dict[str, int] = field(default_factory=dict)

    def add_sources(self, sources: dict[str, int]) -> None:
        for source, count in sources.items():
            self.hits_by_source[source] = self.hits_by_source.get(source, 0) + count


class CachingMetrics:
    """Hit rate over the most recent requests."""

    def __init__(self, max_recent_requests: int = 1000) -> None:
        self.max_recent_requests = max_recent_requests
        self._window: deque[tuple[int, int, int]] = deque()
        self._requests = self._queries = self._hits = 0

    def observe(self, stats: BaseCacheStats) -> None:
        if stats.reset:
            self._window.clear()
            self._requests = self._queries = self._hits = 0
        if stats.requests == 0:
            return
        self._window.append((stats.requests, stats.queries, stats.hits))
        self._add(self._window[-1], 1)
        while len(self._window) > 1 and self._requests > self.max_recent_requests:
            self._add(self._window.popleft(), -1)

    def _add(self, entry: tuple[int, int, int], sign: int) -> None:
        self._requests += sign * entry[0]
        self._queries += sign * entry[1]
        self._hits += sign * entry[2]

    @property
    def empty(self) -> bool:
        return self._requests == 0

    @property
    def hit_rate(self) -> float:
        """Hits over queries, 0 when nothing was asked."""
        return self._hits / self._queries if self._queries else 0.0


@dataclass
class SchedulerStats:
    """The scheduler's state after a step. `kv_cache_usage` is a fraction, 0 to 1."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    step_counter: int = 0
    current_wave: int = 0
    kv_cache_usage: float = 0.0
    prefix_cache_stats: PrefixCacheStats = field(default_factory=PrefixCacheStats)
    connector_prefix_cache_stats: ConnectorPrefixCacheStats | None = None
    kv_connector_stats: dict | None = None
    num_corrupted_reqs: int = 0


@dataclass
class RequestStateStats:
    """Times of one request: wall-clock arrival, else the core's monotonic clock."""

    num_generation_tokens: int = 0
    arrival_time: float = 0.0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0


@dataclass
class FinishedRequestStats:
    """Totals of a finished request, times in seconds."""

    finish_reason: str
    e2e_latency: float = 0.0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    max_tokens_param: int | None = None
    n_param: int = 1
    queued_time: float = 0.0
    prefill_time: float = 0.0
    inference_time: float = 0.0
    decode_time: float = 0.0
    mean_time_per_output_token: float = 0.0
    num_cached_tokens: int = 0


class IterationStats:
    """What one step brought: tokens, latencies and finished requests."""

    def __init__(self) -> None:
        self.iteration_timestamp = time.time()
        self.num_generation_tokens = 0
        self.num_prompt_tokens = 0
        self.num_cached_prompt_tokens = 0
        self.num_external_prompt_tokens = 0
        self.num_preempted_reqs = 0
        self.finished_requests: list[FinishedRequestStats] = []
        self.max_num_generation_tokens_iter: list[int] = []
        self.n_params_iter: list[int] = []
        self.time_to_first_tokens_iter: list[float] = []
        self.inter_token_latencies_iter: list[float] = []
