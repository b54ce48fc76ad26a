"""Settings about logs and metrics, and small configs of parts that are not built in."""

from dataclasses import field
from typing import Any

from vllm.config.utils import config


@config
class ObservabilityConfig:
    """Metrics are always collected; these switches refine them."""

    show_hidden_metrics_for_version: str | None = None
    otlp_traces_endpoint: str | None = None
    collect_detailed_traces: list[str] | None = None
    kv_cache_metrics: bool = False
    kv_cache_metrics_sample: float = 0.01


@config
class StructuredOutputsConfig:
    """Which library constrains the output to a grammar."""

    backend: str = "auto"
    disable_fallback: bool = False
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    reasoning_parser: str = ""


@config
class SpeculativeConfig:
    """Accepted by name; an engine that is asked to draft tokens refuses to start."""

    num_speculative_tokens: int | None = None
    model: str | None = None
    method: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)


@config
class ECTransferConfig:
    """Encoder-cache transfer: accepted by name, without a part here."""

    ec_connector: str | None = None
    engine_id: str | None = None
    ec_role: str | None = None
    ec_connector_extra_config: dict[str, Any] = field(default_factory=dict)
