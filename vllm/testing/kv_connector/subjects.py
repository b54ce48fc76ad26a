"""Connectors to check: the built-in ones, and the one of the command line."""

from pathlib import Path
from typing import Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.testing.kv_connector.scenario import Subject


def _of(name: str, **extra: Any) -> dict[str, Any]:
    return {
        "kv_connector": name,
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


_EXAMPLE = _of("ExampleConnector", shared_storage_path="{tmp}/pages")
_MEMORY = _of("OffloadingConnector", cpu_bytes_to_use="8MiB")
_DISK = _of("OffloadingConnector", cpu_bytes_to_use="8MiB", disk_path="{tmp}/disk")
_ARC = _of("OffloadingConnector", num_cpu_blocks=24, eviction_policy="arc")

_NIXL = ("nixl_cu12", "nixl_cu13")

#: Every built-in connector in every form, by a name for the test.
BUILT_IN: dict[str, Subject] = {
    "Example": Subject(transfer=_EXAMPLE),
    "Offloading": Subject(transfer=_MEMORY),
    "Offloading-disk": Subject(transfer=_DISK),
    "Offloading-arc": Subject(transfer=_ARC),
    "Multi": Subject(transfer=_of("MultiConnector", connectors=[_MEMORY, _EXAMPLE])),
    # What it loads is a constant: only its promises and its blocks can be checked.
    "DecodeBench": Subject(transfer=_of("DecodeBenchConnector"), expect="blocks"),
    # Its loads come from an engine that tells it where they are.
    "Nixl": Subject(transfer=_of("NixlConnector"), expect="peer", needs=_NIXL),
}


def subject_of(
    name: str, config: dict[str, Any] | None = None, expect: str = "bytes"
) -> Subject:
    """The connector that a user names: "module:Class", or a registered name."""
    module, colon, class_name = name.rpartition(":")
    transfer: dict[str, Any] = {"kv_connector": class_name, "kv_role": "kv_both"}
    if colon:
        transfer["kv_connector_module_path"] = module
    transfer |= config or {}
    subject = Subject(transfer=transfer, expect=expect)
    parsed = KVTransferConfig(**subject.config(Path("unused")))
    serves = KVConnectorFactory.supports_hma_config(parsed)
    return Subject(transfer=transfer, expect=expect, serves_groups=serves)
