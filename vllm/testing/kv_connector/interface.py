"""What can be asked of a connector class without an engine."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.testing.kv_connector.cases import engine_config
from vllm.testing.kv_connector.report import Report
from vllm.testing.kv_connector.scenario import Subject


def check_interface(subject: Subject, folder: Path) -> Report:
    """The class, its constructor, and what is asked of the class itself."""
    report = Report()
    transfer = KVTransferConfig(**subject.config(folder))
    found: Any = KVConnectorFactory.get_connector_class(transfer)
    if not (inspect.isclass(found) and issubclass(found, KVConnectorBase_V1)):
        report.add("bad class", f"{found!r} does not derive from KVConnectorBase_V1")
        return report
    missing = sorted(found.__abstractmethods__)
    if missing:
        report.add("bad class", f"{found.__name__} leaves out {', '.join(missing)}")
    parameters = list(inspect.signature(found.__init__).parameters)[1:]
    if parameters[:3] != ["vllm_config", "role", "kv_cache_config"]:
        report.add(
            "bad class",
            f"the constructor of {found.__name__} takes {parameters}: it is called "
            "with (vllm_config, role, kv_cache_config)",
        )
    _check_signatures(found, report)
    _check_class_answers(found, engine_config(folder, vars_of(transfer)), report)
    return report


def vars_of(transfer: KVTransferConfig) -> dict[str, Any]:
    return {name: value for name, value in vars(transfer).items() if value is not None}


def _check_signatures(found: type, report: Report) -> None:
    """Overridden methods take what they are called with."""
    for name, method in inspect.getmembers(KVConnectorBase_V1, inspect.isfunction):
        own = getattr(found, name)
        if name.startswith("_") or own is method:
            continue
        wanted = inspect.signature(method).parameters.values()
        positional = [None for p in wanted if p.kind is p.POSITIONAL_OR_KEYWORD]
        count = len(positional) - 1
        try:
            inspect.signature(own).bind(*positional)
        except TypeError as error:
            report.add(
                "bad method",
                f"{name} cannot be called with {count} arguments: {error}",
            )


def _check_class_answers(found: Any, config: VllmConfig, report: Report) -> None:
    layout = found.get_required_kvcache_layout(config)
    if layout not in (None, "NHD", "HND"):
        report.add(
            "bad answer",
            f"get_required_kvcache_layout says {layout!r}: expected NHD, HND or None",
        )
    extra = config.kv_transfer_config.kv_connector_extra_config  # type: ignore[union-attr]
    if not isinstance(found.requires_piecewise_for_cudagraph(extra), bool):
        report.add("bad answer", "requires_piecewise_for_cudagraph gives no bool")
    stats = found.build_kv_connector_stats({})
    if stats is not None and not stats.is_empty():
        report.add("lost statistics", "statistics of nothing are not empty")
    registry = CollectorRegistry()

    def made(kind: type) -> Callable[..., Any]:
        def make(*args: Any, **kwargs: Any) -> Any:
            return kind(*args, **kwargs, registry=registry)

        make.__name__ = kind.__name__
        return make

    metrics = found.build_prom_metrics(
        config,
        {kind: made(kind) for kind in (Counter, Gauge, Histogram)},
        ["model_name", "engine"],
        {0: ["model", "0"]},
    )
    if metrics is not None:
        metrics.observe({} if stats is None else stats.to_dict(), 0)
