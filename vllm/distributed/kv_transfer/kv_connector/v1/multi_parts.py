"""What a connector made of others needs beside its calls: its children's settings,
orders, news and numbers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)


def child_configs(transfer: KVTransferConfig | None) -> list[KVTransferConfig]:
    """The children's configurations. ValueError when there are none."""
    extra = {} if transfer is None else transfer.kv_connector_extra_config
    listed = extra.get("connectors")
    if not listed or transfer is None:
        raise ValueError(
            "MultiConnector needs children: set kv_connector_extra_config="
            '{"connectors": [{"kv_connector": ..., "kv_role": ...}, ...]}'
        )
    shared = {
        "engine_id": transfer.engine_id,
        "kv_role": transfer.kv_role,
        "kv_load_failure_policy": transfer.kv_load_failure_policy,
    }
    return [KVTransferConfig(**(shared | child)) for child in listed]


@dataclass
class MultiConnectorMetadata(KVConnectorMetadata):
    """The orders of each child; `num_sends` counts, for requests that several children
    still send, how many do."""

    children: list[KVConnectorMetadata]
    num_sends: dict[str, int] = field(default_factory=dict)


@dataclass
class MultiConnectorNews(KVConnectorWorkerMetadata):
    """The news of each child, None where there are none."""

    children: list[KVConnectorWorkerMetadata | None]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "MultiConnectorNews":
        if not isinstance(other, MultiConnectorNews):
            raise TypeError(f"news of another connector: {type(other).__name__}")
        return MultiConnectorNews(
            [
                mine.aggregate(theirs) if mine and theirs else mine or theirs
                for mine, theirs in zip(self.children, other.children, strict=True)
            ]
        )


@dataclass
class MultiConnectorHandshake(KVConnectorHandshakeMetadata):
    """What each child of a worker tells its peers, None where it is silent."""

    children: list[KVConnectorHandshakeMetadata | None]


@dataclass
class MultiConnectorStats(KVConnectorStats):
    """`data` maps a child, such as "0:ExampleConnector", to its numbers. They add up as
    numbers do."""

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, numbers in other.data.items():
            mine = self.data.setdefault(name, {})
            for key, value in numbers.items():
                mine[key] = mine[key] + value if key in mine else value
        return self

    def reduce(self) -> dict[str, int | float]:
        return {
            f"{name}.{key}": value
            for name, numbers in self.data.items()
            for key, value in numbers.items()
        }

    def is_empty(self) -> bool:
        return not any(self.data.values())


class MultiConnectorPromMetrics(KVConnectorPromMetrics):
    """The metrics of each child, told apart by a label `connector`."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: Mapping[type, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._children: dict[str, KVConnectorPromMetrics] = {}
        made: dict[str, Any] = {}
        shared = {kind: _once(make, made) for kind, make in metric_types.items()}
        transfer = vllm_config.kv_transfer_config
        for index, config in enumerate(child_configs(transfer)):
            name = child_name(index, config)
            labels = {e: [*v, name] for e, v in per_engine_labelvalues.items()}
            found = KVConnectorFactory.get_connector_class(config).build_prom_metrics(
                vllm_config, shared, [*labelnames, "connector"], labels
            )
            if found is not None:
                self._children[name] = found

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, numbers in transfer_stats_data.items():
            if name in self._children:
                self._children[name].observe(numbers, engine_idx)


def _once(make: Any, made: dict[str, Any]) -> Any:
    """Children of one kind share their metrics: a name can be registered once only."""

    def get(name: str, *args: Any, **kwargs: Any) -> Any:
        if name not in made:
            made[name] = make(name, *args, **kwargs)
        return made[name]

    get.__name__ = getattr(make, "__name__", "metric")
    return get


def child_name(index: int, config: KVTransferConfig) -> str:
    return f"{index}:{config.kv_connector}"
