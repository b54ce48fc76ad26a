"""Where statistics go: a line in the log now and then, and whatever else is plugged in.

A logger gets the numbers of every step; it decides what to keep.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging
from vllm.logger import init_logger
from vllm.plugins import STAT_LOGGER_PLUGINS_GROUP, load_plugins_by_group
from vllm.v1.metrics.stats import (
    BaseCacheStats,
    CachingMetrics,
    IterationStats,
    SchedulerStats,
)

logger = init_logger(__name__)

StatLoggerFactory = Callable[[VllmConfig, int], "StatLoggerBase"]


class StatLoggerBase(ABC):
    """What every stat logger does; plugins of `vllm.stat_logger_plugins` derive from
    it."""

    @abstractmethod
    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None: ...

    @abstractmethod
    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: BaseCacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        """Takes the numbers of one step."""

    @abstractmethod
    def log_engine_initialized(self) -> None:
        """Called once the engine is ready: sizes in the configuration are final."""

    def log(self) -> None:  # noqa: B027 - optional
        """Called every VLLM_LOG_STATS_INTERVAL seconds."""

    def record_sleep_state(self, is_awake: int, level: int) -> None:  # noqa: B027
        """Called when the engine falls asleep or wakes up."""


class LoggingStatLogger(StatLoggerBase):
    """One line per interval: throughput, queue, KV-cache usage, prefix hits."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        self.engine_index = engine_index
        self.vllm_config = vllm_config
        self.last_scheduler_stats = SchedulerStats()
        self.prefix_caching_metrics = CachingMetrics()
        self.connector_prefix_caching_metrics = CachingMetrics()
        self.kv_connector_logging = KVConnectorLogging(vllm_config.kv_transfer_config)
        self._was_idle = True
        self._start_interval(time.monotonic())

    def _start_interval(self, now: float) -> None:
        self._interval_start = now
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self.num_preemptions = 0

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: BaseCacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        if iteration_stats is not None:
            # Cached prompt tokens are not work done.
            computed = (
                iteration_stats.num_prompt_tokens
                - iteration_stats.num_cached_prompt_tokens
            )
            self.num_prompt_tokens += computed
            self.num_generation_tokens += iteration_stats.num_generation_tokens
            self.num_preemptions += iteration_stats.num_preempted_reqs
        if scheduler_stats is not None:
            self.prefix_caching_metrics.observe(scheduler_stats.prefix_cache_stats)
            if (connector := scheduler_stats.connector_prefix_cache_stats) is not None:
                self.connector_prefix_caching_metrics.observe(connector)
            if scheduler_stats.kv_connector_stats:
                self.kv_connector_logging.observe(scheduler_stats.kv_connector_stats)
            self.last_scheduler_stats = scheduler_stats

    def log(self) -> None:
        """Prints the interval; an engine that stays idle prints only to DEBUG."""
        now = time.monotonic()
        span = max(now - self._interval_start, 1e-9)
        prompt, generation = self.num_prompt_tokens, self.num_generation_tokens
        is_idle = not (
            prompt or generation or self.last_scheduler_stats.num_running_reqs
        )
        say = logger.debug if is_idle and self._was_idle else logger.info
        self._was_idle = is_idle
        stats = self.last_scheduler_stats
        parts = [
            f"Engine {self.engine_index:03}: prompt throughput "
            f"{prompt / span:.1f} tokens/s",
            f"generation throughput {generation / span:.1f} tokens/s",
            f"running {stats.num_running_reqs} reqs",
            f"waiting {stats.num_waiting_reqs} reqs",
            f"KV cache usage {100 * stats.kv_cache_usage:.1f}%",
            f"prefix cache hit rate {100 * self.prefix_caching_metrics.hit_rate:.1f}%",
        ]
        if self.num_preemptions:
            parts.append(f"preemptions {self.num_preemptions}")
        if not self.connector_prefix_caching_metrics.empty:
            rate = 100 * self.connector_prefix_caching_metrics.hit_rate
            parts.append(f"external prefix cache hit rate {rate:.1f}%")
        say("%s", ", ".join(parts))
        self.kv_connector_logging.log()
        self._start_interval(now)

    def log_engine_initialized(self) -> None:
        cache = self.vllm_config.cache_config
        logger.debug(
            "Engine %03d: %s blocks in the KV cache",
            self.engine_index,
            cache.num_gpu_blocks,
        )


def load_stat_logger_plugins() -> list[type[StatLoggerBase]]:
    """Classes that installed packages offer. TypeError for one that is no logger."""
    found = []
    for name, cls in load_plugins_by_group(STAT_LOGGER_PLUGINS_GROUP).items():
        if not isinstance(cls, type) or not issubclass(cls, StatLoggerBase):
            raise TypeError(
                f"stat logger plugin {name!r} is {cls!r}: expected a subclass of "
                "vllm.v1.metrics.loggers.StatLoggerBase"
            )
        found.append(cls)
    return found


class StatLoggerManager:
    """All loggers of one engine, called as one."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        factories: Sequence[Any],
        engine_index: int = 0,
    ) -> None:
        self.engine_index = engine_index
        self.loggers: list[StatLoggerBase] = [
            factory(vllm_config, engine_index) for factory in factories
        ]

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
    ) -> None:
        for stat_logger in self.loggers:
            stat_logger.record(
                scheduler_stats, iteration_stats, engine_idx=self.engine_index
            )

    def log(self) -> None:
        for stat_logger in self.loggers:
            stat_logger.log()

    def log_engine_initialized(self) -> None:
        for stat_logger in self.loggers:
            stat_logger.log_engine_initialized()
