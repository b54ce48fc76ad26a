"""What connectors count, and how it reaches the log and Prometheus.

Knows counters by name. Knows nothing of how bytes move.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.config import KVTransferConfig, VllmConfig
from vllm.logger import init_logger
from vllm.utils.import_utils import resolve

logger = init_logger(__name__)

_FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory"


@dataclass
class KVConnectorStats:
    """Numbers of a connector since the last step. `data` is what travels between
    processes: plain values by name."""

    data: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return dict(self.data)

    def reset(self) -> None:
        """Starts anew. Subclasses set their zeros."""
        raise NotImplementedError(f"{type(self).__name__} has no reset")

    def aggregate(self, other: "KVConnectorStats") -> "KVConnectorStats":
        """Takes in the numbers of another worker or step; returns itself."""
        raise NotImplementedError(f"{type(self).__name__} has no aggregate")

    def reduce(self) -> dict[str, int | float]:
        """The figures of an interval, for a line in the log."""
        raise NotImplementedError(f"{type(self).__name__} has no reduce")

    def is_empty(self) -> bool:
        raise NotImplementedError(f"{type(self).__name__} has no is_empty")


@dataclass
class TransferStats(KVConnectorStats):
    """Counters that add up: blocks, bytes and seconds of loads and saves, and blocks
    that were damaged. Unknown names may be counted too."""

    def reset(self) -> None:
        self.data = {}

    def count(self, **amounts: int | float) -> None:
        for name, amount in amounts.items():
            if amount:
                self.data[name] = self.data.get(name, 0) + amount

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        self.count(**other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        return {
            name: round(value, 6) if isinstance(value, float) else value
            for name, value in sorted(self.data.items())
        }

    def is_empty(self) -> bool:
        return not self.data

    def take(self) -> "TransferStats | None":
        """The counts since the last call, None when there are none."""
        if not self.data:
            return None
        taken, self.data = TransferStats(self.data), {}
        return taken


#: Counters of TransferStats, with what Prometheus says of them.
TRANSFER_COUNTERS = {
    "saved_blocks": "KV blocks that a connector saved.",
    "saved_bytes": "Bytes of KV blocks that a connector saved.",
    "loaded_blocks": "KV blocks that a connector loaded.",
    "loaded_bytes": "Bytes of KV blocks that a connector loaded.",
    "spilled_blocks": "KV blocks that went from host memory to disk.",
    "fetched_blocks": "KV blocks that came from disk to host memory.",
    "damaged_blocks": "Stored KV blocks that were damaged, and computed again.",
    "failed_blocks": "KV blocks whose load or save failed.",
    "evicted_blocks": "KV blocks that a connector dropped to make room.",
    "expired_requests": "Requests whose KV blocks nobody fetched in time.",
}


class KVConnectorPromMetrics:
    """Metrics of one connector. `metric_types` maps Counter, Gauge and Histogram of
    prometheus_client to what makes them; `per_engine_labelvalues` maps an engine to the
    values of `labelnames`."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: Mapping[type, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        self._vllm_config = vllm_config
        # By name: prometheus_client is not needed to count.
        self._kinds = {kind.__name__: make for kind, make in metric_types.items()}
        self._labelnames = labelnames
        self.per_engine_labelvalues = per_engine_labelvalues

    def make_counter(self, name: str, text: str) -> dict[int, Any]:
        """A counter `vllm:kv_connector_<name>`, by engine."""
        metric = self._kinds["Counter"](
            name=f"vllm:kv_connector_{name}",
            documentation=text,
            labelnames=self._labelnames,
        )
        return {
            engine: metric.labels(*values)
            for engine, values in self.per_engine_labelvalues.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Takes the `data` of a step's KVConnectorStats."""
        raise NotImplementedError(f"{type(self).__name__} exports nothing")


class TransferPromMetrics(KVConnectorPromMetrics):
    """Exports TransferStats."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: Mapping[type, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: self.make_counter(name, text)
            for name, text in TRANSFER_COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, counters in self._counters.items():
            counters[engine_idx].inc(transfer_stats_data.get(name, 0))


class KVConnectorLogging:
    """Adds up a connector's numbers between two lines of the log."""

    def __init__(self, kv_transfer_config: KVTransferConfig | None) -> None:
        self.connector_cls: Any = None
        if kv_transfer_config is not None and kv_transfer_config.kv_connector:
            factory = resolve(_FACTORY)
            self.connector_cls = factory.get_connector_class(kv_transfer_config)
        self._stats: KVConnectorStats | None = None

    def observe(self, transfer_stats_data: dict[str, Any]) -> None:
        """Takes the `data` of a step; ignored when the connector has no statistics."""
        if self.connector_cls is None:
            return
        stats = self.connector_cls.build_kv_connector_stats(transfer_stats_data)
        if stats is not None:
            known = self._stats
            self._stats = stats if known is None else known.aggregate(stats)

    def log(self, log_fn: Any = logger.info) -> None:
        """Prints the interval, if anything happened."""
        stats, self._stats = self._stats, None
        if stats is None or stats.is_empty():
            return
        figures = ", ".join(f"{name} {value}" for name, value in stats.reduce().items())
        log_fn("KV transfer: %s", figures)


def build_connector_prom_metrics(
    vllm_config: VllmConfig,
    metric_types: Mapping[type, Any],
    labelnames: list[str],
    per_engine_labelvalues: dict[int, list[object]],
) -> KVConnectorPromMetrics | None:
    """The metrics of the configured connector; None without one, or when it has
    none."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None or not transfer.kv_connector:
        return None
    found = resolve(_FACTORY).get_connector_class(transfer)
    metrics: KVConnectorPromMetrics | None = found.build_prom_metrics(
        vllm_config, metric_types, labelnames, per_engine_labelvalues
    )
    return metrics
