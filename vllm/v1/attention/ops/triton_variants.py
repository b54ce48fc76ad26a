"""Every Triton kernel that is launched, as the compiler needs to know it.

Knows names of modules. Each of them has `variants()`: one `KernelVariant` for every
combination of constants that a launch may choose. Needs no triton to be imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from vllm.utils.import_utils import resolve

#: "module:function"; the function returns the module's variants.
SOURCES: tuple[str, ...] = (
    "vllm.v1.attention.ops.triton_blocks:variants",
    "vllm.v1.attention.ops.triton_store:variants",
    "vllm.v1.attention.ops.triton_paged_variants:variants",
    "vllm.v1.attention.ops.triton_latent_variants:variants",
)


# Warps of a block on AMD: one for each SIMD unit, which then has all of its registers.
_MOST_WIDE_WARPS = 4


def warps_on(lanes: int, num_warps: int) -> int:
    """Warps of a block that takes `num_warps` of 32 lanes, on a GPU whose warps have
    `lanes`: 32 (NVIDIA) or 64 (AMD)."""
    return num_warps if lanes == 32 else min(num_warps, _MOST_WIDE_WARPS)


@dataclass(frozen=True, kw_only=True)
class KernelVariant:
    """`signature` maps each argument to its Triton type ("*u8", "i64", "fp32");
    constants are in `constexprs` instead, by name; `num_warps` as in `warps_on`."""

    name: str
    fn: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 2
    enable_fp_fusion: bool = True


def all_variants() -> Iterator[KernelVariant]:
    """The variants of every module. Raises ImportError where triton is missing."""
    for source in SOURCES:
        variants: Callable[[], Iterable[KernelVariant]] = resolve(source)
        yield from variants()
