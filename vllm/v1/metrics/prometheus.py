"""Exports statistics to Prometheus, under the names that monitors of vLLM read."""

from functools import partial
from typing import Any

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from prometheus_client.registry import CollectorRegistry

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    build_connector_prom_metrics,
)
from vllm.v1.engine import FINISH_REASON_STRINGS
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import (
    BaseCacheStats,
    FinishedRequestStats,
    IterationStats,
    SchedulerStats,
)

PREFIX = "vllm:"
_LABELS = ("model_name", "engine")
_METRIC_TYPES = (Counter, Gauge, Histogram)

_GAUGES = {
    "num_requests_running": "Requests in the running batch.",
    "num_requests_waiting": "Requests that wait to be scheduled.",
    "kv_cache_usage_perc": "KV-cache blocks in use; 1 means 100 percent.",
    "gpu_cache_usage_perc": "The same as kv_cache_usage_perc, under its older name.",
}
_COUNTERS = {
    "prompt_tokens": "Prompt tokens processed, cached ones included.",
    "prompt_tokens_cached": "Prompt tokens that a cache provided.",
    "generation_tokens": "Tokens generated.",
    "num_preemptions": "Requests put back to the queue for lack of KV-cache blocks.",
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "external_prefix_cache_queries": "Prompt tokens looked up through the connector.",
    "external_prefix_cache_hits": "Prompt tokens found through the connector.",
}
_SECONDS_TO_FIRST = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0),
    *(7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_SECONDS_PER_TOKEN = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0),
    *(7.5, 10.0, 20.0, 40.0, 80.0),
)
_SECONDS_PER_REQUEST = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0),
    *(60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_STEP_TOKENS = tuple(1 << power for power in (0, *range(3, 15)))
_CHOICES = (1, 2, 5, 10, 20)

# name: (help, buckets); None: powers of ten up to the model's length.
_HISTOGRAMS: dict[str, tuple[str, tuple[float, ...] | None]] = {
    "time_to_first_token_seconds": ("Arrival to first token.", _SECONDS_TO_FIRST),
    "inter_token_latency_seconds": ("Time between two tokens.", _SECONDS_PER_TOKEN),
    "time_per_output_token_seconds": (
        "The same as inter_token_latency_seconds, under its older name.",
        _SECONDS_PER_TOKEN,
    ),
    "request_time_per_output_token_seconds": (
        "Mean time per output token of a request.",
        _SECONDS_PER_TOKEN,
    ),
    "e2e_request_latency_seconds": ("Arrival to last token.", _SECONDS_PER_REQUEST),
    "request_queue_time_seconds": ("Time in the queue.", _SECONDS_PER_REQUEST),
    "request_inference_time_seconds": (
        "First scheduling to last token.",
        _SECONDS_PER_REQUEST,
    ),
    "request_prefill_time_seconds": (
        "First scheduling to first token.",
        _SECONDS_PER_REQUEST,
    ),
    "request_decode_time_seconds": ("First to last token.", _SECONDS_PER_REQUEST),
    "request_prompt_tokens": ("Prompt tokens of a request.", None),
    "request_generation_tokens": ("Generated tokens of a request.", None),
    "request_max_num_generation_tokens": (
        "Generated tokens of the longest continuation of a request.",
        None,
    ),
    "request_params_max_tokens": ("max_tokens of a request.", None),
    "request_params_n": ("Continuations asked for by a request.", _CHOICES),
    "iteration_tokens_total": ("Tokens of one step.", _STEP_TOKENS),
}
_PROMPT_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")


def length_buckets(max_value: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, ... up to `max_value`."""
    buckets: list[float] = []
    scale = 1
    while True:
        for mantissa in (1, 2, 5):
            if mantissa * scale > max_value:
                return tuple(buckets) or (1.0,)
            buckets.append(mantissa * scale)
        scale *= 10


def unregister_vllm_metrics(registry: CollectorRegistry = REGISTRY) -> None:
    """Takes the metrics of an earlier engine of this process out of the registry."""
    for collector in list(registry._collector_to_names):
        if getattr(collector, "_name", "").startswith(PREFIX):
            registry.unregister(collector)


class PrometheusStatLogger(StatLoggerBase):
    """Metrics of one engine, labelled with the served model name and engine number.

    A new logger replaces the metrics of the one before it in the same registry.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        engine_index: int = 0,
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        unregister_vllm_metrics(registry)
        self.vllm_config = vllm_config
        self.engine_index = engine_index
        self._registry = registry
        model_config = vllm_config.model_config
        self._values = (model_config.served_names[0], str(engine_index))
        lengths = length_buckets(max(model_config.max_model_len, 1))
        self._gauges = {name: self._one(Gauge, name, h) for name, h in _GAUGES.items()}
        self._counters = {
            name: self._one(Counter, name, h) for name, h in _COUNTERS.items()
        }
        self._histograms = {
            name: self._one(Histogram, name, h, buckets=buckets or lengths)
            for name, (h, buckets) in _HISTOGRAMS.items()
        }
        self._success = self._many(
            Counter, "request_success", "finished_reason", FINISH_REASON_STRINGS
        )
        self._hit_sources = Counter(
            f"{PREFIX}external_prefix_cache_hits_by_source",
            "Prompt tokens found through the connector, by where it had them.",
            (*_LABELS, "source"),
            registry=registry,
        )
        self._sources = self._many(
            Counter, "prompt_tokens_by_source", "source", _PROMPT_SOURCES
        )
        self._sleep = self._many(
            Gauge, "engine_sleep_state", "sleep_state", _SLEEP_STATES
        )
        self._sleep["awake"].set(1)
        self._connector = build_connector_prom_metrics(
            vllm_config,
            {kind: partial(kind, registry=registry) for kind in _METRIC_TYPES},
            list(_LABELS),
            {engine_index: list(self._values)},
        )

    def _one(self, kind: Any, name: str, text: str, **options: Any) -> Any:
        metric = kind(PREFIX + name, text, _LABELS, registry=self._registry, **options)
        return metric.labels(*self._values)

    def _many(
        self, kind: Any, name: str, label: str, values: tuple[str, ...]
    ) -> dict[str, Any]:
        text = f"{name.replace('_', ' ').capitalize()}, by {label}."
        metric = kind(PREFIX + name, text, (*_LABELS, label), registry=self._registry)
        return {value: metric.labels(*self._values, value) for value in values}

    def log_engine_initialized(self) -> None:
        """Publishes the cache's configuration, whose sizes are known by now."""
        labels = self.vllm_config.cache_config.metrics_info()
        labels["engine"] = str(self.engine_index)
        info = Gauge(
            PREFIX + "cache_config_info",
            "The configuration of the KV cache, as labels.",
            tuple(labels),
            registry=self._registry,
        )
        info.labels(**labels).set(1)

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: BaseCacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        if scheduler_stats is not None:
            self._record_scheduler(scheduler_stats)
        if iteration_stats is not None:
            self._record_iteration(iteration_stats)
            for finished in iteration_stats.finished_requests:
                self._record_finished(finished)

    def _record_scheduler(self, stats: SchedulerStats) -> None:
        gauges, counters = self._gauges, self._counters
        gauges["num_requests_running"].set(stats.num_running_reqs)
        gauges["num_requests_waiting"].set(stats.num_waiting_reqs)
        gauges["kv_cache_usage_perc"].set(stats.kv_cache_usage)
        gauges["gpu_cache_usage_perc"].set(stats.kv_cache_usage)
        counters["prefix_cache_queries"].inc(stats.prefix_cache_stats.queries)
        counters["prefix_cache_hits"].inc(stats.prefix_cache_stats.hits)
        if (external := stats.connector_prefix_cache_stats) is not None:
            counters["external_prefix_cache_queries"].inc(external.queries)
            counters["external_prefix_cache_hits"].inc(external.hits)
            for source, count in external.hits_by_source.items():
                self._hit_sources.labels(*self._values, source).inc(count)
        if self._connector is not None and stats.kv_connector_stats:
            self._connector.observe(stats.kv_connector_stats, self.engine_index)

    def _record_iteration(self, stats: IterationStats) -> None:
        counters, histograms = self._counters, self._histograms
        external = stats.num_external_prompt_tokens
        cached = stats.num_cached_prompt_tokens
        counters["num_preemptions"].inc(stats.num_preempted_reqs)
        counters["prompt_tokens"].inc(stats.num_prompt_tokens)
        counters["prompt_tokens_cached"].inc(cached)
        counters["generation_tokens"].inc(stats.num_generation_tokens)
        self._sources["local_compute"].inc(max(stats.num_prompt_tokens - cached, 0))
        self._sources["local_cache_hit"].inc(max(cached - external, 0))
        self._sources["external_kv_transfer"].inc(external)
        num_tokens = stats.num_prompt_tokens + stats.num_generation_tokens
        if num_tokens:
            histograms["iteration_tokens_total"].observe(num_tokens)
        for name, values in (
            ("time_to_first_token_seconds", stats.time_to_first_tokens_iter),
            ("inter_token_latency_seconds", stats.inter_token_latencies_iter),
            ("time_per_output_token_seconds", stats.inter_token_latencies_iter),
            ("request_params_n", stats.n_params_iter),
            ("request_max_num_generation_tokens", stats.max_num_generation_tokens_iter),
        ):
            for value in values:
                histograms[name].observe(value)

    def _record_finished(self, finished: FinishedRequestStats) -> None:
        self._success[finished.finish_reason].inc()
        histograms = self._histograms
        for name, value in (
            ("e2e_request_latency_seconds", finished.e2e_latency),
            ("request_queue_time_seconds", finished.queued_time),
            ("request_prefill_time_seconds", finished.prefill_time),
            ("request_inference_time_seconds", finished.inference_time),
            ("request_decode_time_seconds", finished.decode_time),
            ("request_prompt_tokens", finished.num_prompt_tokens),
            ("request_generation_tokens", finished.num_generation_tokens),
        ):
            histograms[name].observe(value)
        if finished.num_generation_tokens > 1:
            histograms["request_time_per_output_token_seconds"].observe(
                finished.mean_time_per_output_token
            )
        if finished.max_tokens_param is not None:
            histograms["request_params_max_tokens"].observe(finished.max_tokens_param)

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        state = "awake" if is_awake else _SLEEP_STATES[1 if level == 1 else 2]
        for name, gauge in self._sleep.items():
            gauge.set(1 if name == state else 0)
