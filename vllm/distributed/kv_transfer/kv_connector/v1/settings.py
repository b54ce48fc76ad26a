"""What `kv_connector_extra_config` may hold: one table for the connectors of this
package. Connectors from elsewhere keep any key, also those derived from one of these.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm.config import KVTransferConfig
from vllm.logger import init_logger

logger = init_logger(__name__)

# Modules of the connectors in the table are below this one.
_PACKAGE = __name__.rpartition(".")[0]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a value is expected to be, in words and as a test."""

    expected: str
    holds: Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_byte(value: Any) -> bool:
    return isinstance(value, int) and _is_number(value) and 0 <= value <= 255


def _are_configs(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(v, dict) for v in value)


_FOLDER = Setting(
    expected="the path of a folder", holds=lambda value: isinstance(value, str)
)
_SECONDS = Setting(
    expected="seconds above 0",
    holds=lambda value: _is_number(value) and 0 < value < math.inf,
)
_BYTE = Setting(expected="a byte, 0 to 255", holds=_is_byte)
_NAME = Setting(expected="a name", holds=lambda value: isinstance(value, str))
_CONFIGS = Setting(
    expected='a list of objects such as {"kv_connector": ...}', holds=_are_configs
)
_SWITCH = Setting(
    expected="true or false",
    holds=lambda value: str(value).lower() in ("true", "false"),
)
# Amounts of memory and of blocks: the connector says what is wrong with them.
_AMOUNT = Setting(expected="an amount", holds=lambda value: True)

_NIXL = {
    "lease_s": _SECONDS,
    "unclaimed_s": _SECONDS,
    "read_timeout_s": _SECONDS,
    "answer_timeout_s": _SECONDS,
}
#: Of every connector: the planner reads it.
_COMMON = {"enable_cross_layers_blocks": _SWITCH}
#: Connector class -> key -> value.
SETTINGS: Mapping[str, Mapping[str, Setting]] = {
    "DecodeBenchConnector": {"fill_byte": _BYTE},
    "ExampleConnector": {"shared_storage_path": _FOLDER},
    "MultiConnector": {"connectors": _CONFIGS},
    "NixlConnector": _NIXL,
    "NixlPullConnector": _NIXL,
    "OffloadingConnector": {
        "cpu_bytes_to_use": _AMOUNT,
        "num_cpu_blocks": _AMOUNT,
        "eviction_policy": _NAME,
        "disk_path": _FOLDER,
        "disk_bytes_to_use": _AMOUNT,
    },
}


def check_settings(connector_cls: type, transfer: KVTransferConfig) -> None:
    """Warns of a key that a connector of ours does not read; ValueError for a value
    that it cannot use. null stands for a key that is not given."""
    name = connector_cls.__name__
    if name not in SETTINGS or not connector_cls.__module__.startswith(_PACKAGE):
        return
    known = {**SETTINGS[name], **_COMMON}
    for key, value in transfer.kv_connector_extra_config.items():
        if key not in known:
            # Configurations of other engines have keys that mean nothing here.
            logger.warning_once(
                "%s: kv_connector_extra_config has the unknown key %r, which is "
                "ignored: it reads %s",
                name,
                key,
                ", ".join(known),
            )
            continue
        if value is not None and not known[key].holds(value):
            raise ValueError(
                f"{name}: kv_connector_extra_config has {key} {value!r}: expected "
                f"{known[key].expected}"
            )
