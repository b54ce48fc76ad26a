"""KV-cache formats: what one cached state looks like, one file per format.

Names resolve on first use, so that the torch-free `mode` can be imported without torch.
"""

from typing import TYPE_CHECKING, Any

from vllm.utils.import_utils import resolve
from vllm.v1.kv_formats.mode import CACHE_DTYPES, KVQuantMode, mode_by_name

if TYPE_CHECKING:
    from vllm.v1.kv_formats.base import KVFormat, KVScales, Packing, Tolerance
    from vllm.v1.kv_formats.layout import Extent, Field, StateLayout
    from vllm.v1.kv_formats.registry import (
        all_formats,
        by_id,
        by_mode,
        by_name,
        model_formats,
        rearrange,
        register_kv_format,
    )

_NAMES = {
    "Extent": "vllm.v1.kv_formats.layout:Extent",
    "Field": "vllm.v1.kv_formats.layout:Field",
    "KVFormat": "vllm.v1.kv_formats.base:KVFormat",
    "KVScales": "vllm.v1.kv_formats.base:KVScales",
    "Packing": "vllm.v1.kv_formats.base:Packing",
    "StateLayout": "vllm.v1.kv_formats.layout:StateLayout",
    "Tolerance": "vllm.v1.kv_formats.base:Tolerance",
    "all_formats": "vllm.v1.kv_formats.registry:all_formats",
    "by_id": "vllm.v1.kv_formats.registry:by_id",
    "by_mode": "vllm.v1.kv_formats.registry:by_mode",
    "by_name": "vllm.v1.kv_formats.registry:by_name",
    "model_formats": "vllm.v1.kv_formats.registry:model_formats",
    "rearrange": "vllm.v1.kv_formats.registry:rearrange",
    "register_kv_format": "vllm.v1.kv_formats.registry:register_kv_format",
}

__all__ = [
    "CACHE_DTYPES",
    "Extent",
    "Field",
    "KVFormat",
    "KVQuantMode",
    "KVScales",
    "Packing",
    "StateLayout",
    "Tolerance",
    "all_formats",
    "by_id",
    "by_mode",
    "by_name",
    "mode_by_name",
    "model_formats",
    "rearrange",
    "register_kv_format",
]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = resolve(_NAMES[name])
    globals()[name] = value
    return value
