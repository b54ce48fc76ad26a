"""Names and modes of KV-cache formats. Knows strings, refuses to import torch.

This is the only place, with the registry, that looks into a cache-dtype string.
"""

from collections.abc import Iterable
from enum import IntEnum


class KVQuantMode(IntEnum):
    """How the states of an attention layer are quantised. One member per rule."""

    NONE = 0
    FP8_PER_TENSOR = 1
    INT8_PER_TOKEN_HEAD = 2
    FP8_PER_TOKEN_HEAD = 3
    INT4_PER_TOKEN_HEAD = 4
    NVFP4 = 5
    TURBOQUANT_K8V4 = 6
    TURBOQUANT_4BIT_NC = 7
    TURBOQUANT_K3V4_NC = 8
    TURBOQUANT_3BIT_NC = 9
    NVFP4_DS_MLA = 10

    @property
    def is_quantized(self) -> bool:
        """True for every mode but NONE: the one definition of "is quantised"."""
        return self is not KVQuantMode.NONE

    @property
    def is_per_token_head(self) -> bool:
        """True where every (token, head) vector carries its own scale."""
        return self in _PER_TOKEN_HEAD

    @property
    def is_nvfp4(self) -> bool:
        """True for NVFP4 pages of K and V. The MLA record NVFP4_DS_MLA is not one."""
        return self is KVQuantMode.NVFP4

    @property
    def is_turboquant(self) -> bool:
        """True for the four TurboQuant presets."""
        return self in _TURBOQUANT


_PER_TOKEN_HEAD = frozenset(
    {
        KVQuantMode.INT8_PER_TOKEN_HEAD,
        KVQuantMode.FP8_PER_TOKEN_HEAD,
        KVQuantMode.INT4_PER_TOKEN_HEAD,
    }
)
_TURBOQUANT = frozenset(
    {
        KVQuantMode.TURBOQUANT_K8V4,
        KVQuantMode.TURBOQUANT_4BIT_NC,
        KVQuantMode.TURBOQUANT_K3V4_NC,
        KVQuantMode.TURBOQUANT_3BIT_NC,
    }
)

# Every string that --kv-cache-dtype accepts. `register_kv_format` adds to it.
CACHE_DTYPES: dict[str, KVQuantMode] = {
    "auto": KVQuantMode.NONE,
    "float32": KVQuantMode.NONE,
    "float16": KVQuantMode.NONE,
    "bfloat16": KVQuantMode.NONE,
    "fp8": KVQuantMode.FP8_PER_TENSOR,
    "fp8_e4m3": KVQuantMode.FP8_PER_TENSOR,
    "fp8_e5m2": KVQuantMode.FP8_PER_TENSOR,
    "fp8_inc": KVQuantMode.FP8_PER_TENSOR,
    "fp8_ds_mla": KVQuantMode.FP8_PER_TENSOR,
    "int8_per_token_head": KVQuantMode.INT8_PER_TOKEN_HEAD,
    "fp8_per_token_head": KVQuantMode.FP8_PER_TOKEN_HEAD,
    "int4_per_token_head": KVQuantMode.INT4_PER_TOKEN_HEAD,
    "nvfp4": KVQuantMode.NVFP4,
    "nvfp4_4over6": KVQuantMode.NVFP4,
    "nvfp4_ds_mla": KVQuantMode.NVFP4_DS_MLA,
    "turboquant_k8v4": KVQuantMode.TURBOQUANT_K8V4,
    "turboquant_4bit_nc": KVQuantMode.TURBOQUANT_4BIT_NC,
    "turboquant_k3v4_nc": KVQuantMode.TURBOQUANT_K3V4_NC,
    "turboquant_3bit_nc": KVQuantMode.TURBOQUANT_3BIT_NC,
}


def mode_by_name(name: str) -> KVQuantMode:
    """The mode of an accepted cache-dtype string.

    Raises ValueError listing the accepted names when `name` is not one of them.
    """
    try:
        return CACHE_DTYPES[name]
    except KeyError:
        raise ValueError(unknown_name_message(name, CACHE_DTYPES)) from None


def unknown_name_message(name: str, accepted: Iterable[str]) -> str:
    """The one wording for a cache-dtype string nobody knows."""
    return (
        f"unknown KV cache dtype {name!r}: expected one of {', '.join(accepted)} "
        "(--kv-cache-dtype)"
    )
