"""Monitors find every name they read, with the numbers of the engine behind it."""

from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from vllm.config import CacheConfig
from vllm.v1.metrics import loggers
from vllm.v1.metrics.prometheus import PrometheusStatLogger, length_buckets
from vllm.v1.metrics.stats import (
    ConnectorPrefixCacheStats,
    FinishedRequestStats,
    IterationStats,
    PrefixCacheStats,
    SchedulerStats,
)

LABELS = {"model_name": "tiny", "engine": "0"}
# Names (without prefix) that monitoring tools of vLLM read.
SCALARS = [
    "prompt_tokens_total",
    "num_requests_running",
    "num_requests_waiting",
    "generation_tokens_total",
    "kv_cache_usage_perc",
    "gpu_cache_usage_perc",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "external_prefix_cache_queries_total",
    "external_prefix_cache_hits_total",
    "num_preemptions_total",
    "prompt_tokens_cached_total",
]
HISTOGRAMS = [
    "time_to_first_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_time_per_output_token_seconds",
    "time_per_output_token_seconds",
    "inter_token_latency_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "request_params_max_tokens",
    "request_params_n",
    "request_max_num_generation_tokens",
    "iteration_tokens_total",
]


def config() -> Any:
    cache = CacheConfig(cache_dtype="auto")
    cache.num_gpu_blocks, cache.kv_cache_size_tokens = 100, 1600
    cache.kv_cache_max_concurrency = 6.25
    model = SimpleNamespace(served_names=["tiny"], max_model_len=256)
    return SimpleNamespace(
        cache_config=cache, model_config=model, kv_transfer_config=None
    )


def step() -> tuple[SchedulerStats, IterationStats]:
    scheduler = SchedulerStats(
        num_running_reqs=2,
        num_waiting_reqs=3,
        kv_cache_usage=0.25,
        prefix_cache_stats=PrefixCacheStats(requests=1, queries=10, hits=4),
        connector_prefix_cache_stats=ConnectorPrefixCacheStats(
            requests=1, queries=6, hits=2
        ),
    )
    iteration = IterationStats()
    iteration.num_prompt_tokens, iteration.num_generation_tokens = 10, 2
    iteration.num_cached_prompt_tokens = 6
    iteration.num_external_prompt_tokens = 2
    iteration.num_preempted_reqs = 1
    iteration.time_to_first_tokens_iter = [0.5]
    iteration.inter_token_latencies_iter = [0.02]
    iteration.n_params_iter, iteration.max_num_generation_tokens_iter = [1], [2]
    iteration.finished_requests = [
        FinishedRequestStats(
            finish_reason="stop",
            num_prompt_tokens=10,
            num_generation_tokens=2,
            max_tokens_param=16,
        )
    ]
    return scheduler, iteration


@pytest.fixture
def registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    stat_logger = PrometheusStatLogger(config(), 0, registry)
    stat_logger.log_engine_initialized()
    stat_logger.record(*step())
    return registry


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"vllm:{name}", {**LABELS, **labels})


@pytest.mark.parametrize("name", SCALARS)
def test_every_number_is_there(registry: CollectorRegistry, name: str) -> None:
    assert value(registry, name) is not None


@pytest.mark.parametrize("name", HISTOGRAMS)
def test_every_histogram_counts_its_events(
    registry: CollectorRegistry, name: str
) -> None:
    assert value(registry, f"{name}_count") == 1
    assert value(registry, f"{name}_bucket", le="+Inf") == 1


def test_numbers_are_those_of_the_step(registry: CollectorRegistry) -> None:
    assert value(registry, "num_requests_running") == 2
    assert value(registry, "kv_cache_usage_perc") == 0.25
    assert value(registry, "gpu_cache_usage_perc") == 0.25
    assert value(registry, "prefix_cache_hits_total") == 4
    assert value(registry, "external_prefix_cache_hits_total") == 2
    assert value(registry, "request_success_total", finished_reason="stop") == 1
    assert value(registry, "request_success_total", finished_reason="length") == 0
    sources = {
        source: value(registry, "prompt_tokens_by_source_total", source=source)
        for source in ("local_compute", "local_cache_hit", "external_kv_transfer")
    }
    assert list(sources.values()) == [4, 4, 2]
    assert value(registry, "engine_sleep_state", sleep_state="awake") == 1


def test_the_cache_tells_its_size(registry: CollectorRegistry) -> None:
    family = [m for m in registry.collect() if m.name == "vllm:cache_config_info"]
    (sample,) = family[0].samples
    expected = {
        "block_size": "16",
        "cache_dtype": "auto",
        "num_gpu_blocks": "100",
        "kv_cache_size_tokens": "1600",
        "kv_cache_max_concurrency": "6.25",
        "gpu_memory_utilization": "0.92",
        "enable_prefix_caching": "True",
        "engine": "0",
    }
    assert sample.value == 1 and expected.items() <= sample.labels.items()


def test_a_second_engine_of_a_process_replaces_the_first() -> None:
    registry = CollectorRegistry()
    for _ in range(2):
        stat_logger = PrometheusStatLogger(config(), 0, registry)
        stat_logger.log_engine_initialized()
    stat_logger.record(*step())
    assert value(registry, "generation_tokens_total") == 2


def test_length_buckets() -> None:
    assert length_buckets(256) == (1, 2, 5, 10, 20, 50, 100, 200)
    assert length_buckets(1) == (1,)


def test_the_log_line_tells_rates_and_goes_quiet_when_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines: list[tuple[str, str]] = []
    fake = SimpleNamespace(
        info=lambda form, *args: lines.append(("info", form % args)),
        debug=lambda form, *args: lines.append(("debug", form % args)),
    )
    monkeypatch.setattr(loggers, "logger", fake)
    stat_logger = loggers.LoggingStatLogger(config())
    stat_logger.record(*step())
    stat_logger.log()
    for part in (
        "running 2 reqs",
        "waiting 3 reqs",
        "KV cache usage 25.0%",
        "prefix cache hit rate 40.0%",
        "preemptions 1",
    ):
        assert part in lines[-1][1]
    stat_logger.record(SchedulerStats(), None)
    stat_logger.log()
    stat_logger.log()
    assert [level for level, _ in lines] == ["info", "info", "debug"]
