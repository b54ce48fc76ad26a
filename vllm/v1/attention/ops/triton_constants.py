"""What a Triton kernel knows while it is compiled: a format's table, a page's strides.

A kernel takes a `Constants` object as one constexpr and names the numbers it needs
(`C.K_SCALE_OFFSET`); they come from `StateLayout.constants()`. Needs no triton.
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd
from typing import Any

import torch

from vllm.v1.kv_formats import Extent, KVFormat
from vllm.v1.kv_formats.turboquant import TurboQuant

# The widest load of a GPU, in bytes: alignment beyond it changes nothing.
_WIDEST_LOAD = 16


class Constants:
    """Named values that are equal, hashed and printed by value, as constexprs must be.

    An unknown name is an AttributeError when the kernel is compiled. Triton asks for
    text and hash at every launch, so both are made once.
    """

    __slots__ = ("_text", "_values")

    def __init__(self, **values: int | str | bool | Constants) -> None:
        named = (f"{name}={value!r}" for name, value in sorted(values.items()))
        self._values = values
        self._text = f"Constants({', '.join(named)})"

    def __getattr__(self, name: str) -> Any:
        if name in Constants.__slots__:  # a copy under construction
            raise AttributeError(name)
        if name not in self._values:
            raise AttributeError(f"{name} is not among {', '.join(self._values)}")
        return self._values[name]

    def __repr__(self) -> str:
        return self._text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constants) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)


@lru_cache(maxsize=256)
def cell_constants(
    fmt: KVFormat, head_size: int, head_size_v: int, model_dtype: torch.dtype
) -> Constants:
    """The table of a resolved format at these head sizes, by the names of its fields.

    Besides the numbers of `StateLayout.constants`: NAME_DTYPE, the element type of each
    field, FAMILY, which tells how fields make up a vector, and the head sizes D and DV.
    Raises ValueError for formats whose states are no contiguous cells.
    """
    layout = fmt.layout(head_size, head_size_v, model_dtype)
    if layout.extent is not Extent.STATE:
        raise ValueError(
            f"KV cache format {fmt.format_id} spreads a state over its page, but the "
            "Triton kernels read whole cells: use another --kv-cache-dtype or backend"
        )
    types = {f"{field.name.upper()}_DTYPE": field.dtype for field in layout.fields}
    return Constants(
        FAMILY=family(fmt),
        NORM_CORRECTION=isinstance(fmt, TurboQuant) and fmt.norm_correction,
        SCALE_COLUMNS=getattr(fmt, "scale_columns", 1),
        KEY_BITS=fmt.key_bits if isinstance(fmt, TurboQuant) else 0,
        D=head_size,
        DV=head_size_v,
        **types,
        **layout.constants(),
    )


def family(fmt: KVFormat) -> str:
    """How the fields of a cell make up K and V: see `triton_loaders`."""
    if fmt.mode.is_per_token_head:
        return "per_token_head"
    if fmt.mode.is_turboquant:
        return "turboquant"
    return "record" if fmt.latent else "plain"


def page_constants(pages: torch.Tensor) -> Constants:
    """Strides in bytes of uint8 pages [B, H, N, C], and how far addresses are aligned.

    Raises ValueError where the bytes of a state are not contiguous.
    """
    block, head, state, byte = pages.stride()
    if pages.dtype != torch.uint8 or byte != 1:
        raise ValueError(
            f"pages are {pages.dtype} with strides {pages.stride()}: expected the byte "
            "view of pages whose states are contiguous"
        )
    return strides_as_constants(
        pages.shape[2], block, head, state, pages.data_ptr() % _WIDEST_LOAD
    )


@lru_cache(maxsize=256)
def strides_as_constants(
    page: int, block: int, head: int, state: int, misalignment: int = 0
) -> Constants:
    """Constants of pages of `page` states with these byte strides."""
    return Constants(
        PAGE=page,
        BLOCK_STRIDE=block,
        HEAD_STRIDE=head,
        STATE_STRIDE=state,
        ALIGN=gcd(block, head, state, misalignment, _WIDEST_LOAD),
    )
