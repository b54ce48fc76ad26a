"""Writes states into pages with Triton kernels: every format that they know.

Chooses a kernel by the format's family and hands it the format's table (`C`), the
page's strides (`P`) and the tensors. The mathematics is in the kernels' modules.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import gcd, sqrt
from typing import Any

import torch
import triton

from vllm.utils.math_utils import cdiv
from vllm.v1.attention.ops.triton_call import Call
from vllm.v1.attention.ops.triton_constants import Constants
from vllm.v1.attention.ops.triton_store_nvfp4 import store_nvfp4_kernel
from vllm.v1.attention.ops.triton_store_plain import store_plain_kernel
from vllm.v1.attention.ops.triton_store_records import store_records_kernel
from vllm.v1.attention.ops.triton_store_scaled import store_scaled_kernel
from vllm.v1.attention.ops.triton_store_turboquant import store_turboquant_kernel
from vllm.v1.attention.ops.triton_variants import KernelVariant
from vllm.v1.kv_formats import KVFormat, KVScales, StateLayout, all_formats
from vllm.v1.kv_formats.base import UNIT_SCALES
from vllm.v1.kv_formats.codebook import get_midpoints
from vllm.v1.kv_formats.dense import Dense
from vllm.v1.kv_formats.ds_mla import Fp8DsMla, NvFp4DsMla
from vllm.v1.kv_formats.fp8 import Fp8PerTensor
from vllm.v1.kv_formats.hadamard import block_size, rht_signs
from vllm.v1.kv_formats.layout import DTYPES, Extent
from vllm.v1.kv_formats.nvfp4 import NvFp4
from vllm.v1.kv_formats.paging import as_bytes
from vllm.v1.kv_formats.per_token_head import (
    Fp8PerTokenHead,
    Int4PerTokenHead,
    Int8PerTokenHead,
)
from vllm.v1.kv_formats.turboquant import TurboQuant

# Elements of a program's tile: 16 registers for each of its 128 threads.
_TILE = 2048
# The narrowest tile that the kernels pack: groups of 16 elements.
_MIN_WIDTH = 16
# The widest store of a GPU, in bytes: alignment beyond it changes nothing.
_WIDEST_STORE = 16


def serves(fmt: KVFormat) -> bool:
    """Whether there is a kernel for the format; none writes states that take turns."""
    return type(fmt) in _KERNELS and fmt.extent() is not Extent.TILE


def store(
    pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor | None,
    fmt: KVFormat,
    scales: KVScales = UNIT_SCALES,
) -> None:
    """Writes one state per slot into pages [B, H, N, C], as `KVFormat.store` does.

    Any axis order and arrangement. `key` [T, heads, size] and `value` [T, heads,
    size_v] (None: a latent) are on the pages' device. Raises ValueError for a format
    without a kernel and for pages that do not hold the format.
    """
    store_call(pages, slot_mapping, key, value, fmt, scales).launch()


def store_call(
    pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor | None,
    fmt: KVFormat,
    scales: KVScales = UNIT_SCALES,
) -> Call:
    """The launch that `store` makes."""
    pages, key = as_bytes(pages), _packed(key)
    value = None if value is None else _packed(value)
    size, size_v = key.shape[-1], 0 if value is None else value.shape[-1]
    bound = _bind(fmt, size, size_v, key.dtype, key.device)
    _check(bound, pages, slot_mapping, key, value)
    tokens, heads = slot_mapping.shape[0], key.shape[1]
    misalignment = pages.data_ptr() % _WIDEST_STORE
    return Call(
        kernel=bound.kernel,
        grid=(cdiv(tokens * heads, bound.constants["ROWS"]), 2 if size_v else 1),
        arguments={
            "key_ptr": key,
            "value_ptr": value,
            "slots_ptr": slot_mapping,
            "pages_ptr": pages,
            "k_table_ptr": bound.k_table,
            "v_table_ptr": bound.v_table,
            "k_scale": float(bound.rotation_factor or scales.k),
            "v_scale": float(scales.v),
            "num_tokens": tokens,
            "key_token_stride": key.stride(0),
            "key_head_stride": key.stride(1),
            "value_token_stride": 0 if value is None else value.stride(0),
            "value_head_stride": 0 if value is None else value.stride(1),
        },
        constants={
            "P": _place(bound, pages.shape, pages.stride(), misalignment),
            **bound.constants,
        },
    )


def _packed(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


@dataclass(frozen=True, kw_only=True, eq=False)
class _Bound:
    """What a format gives its kernel at one pair of head sizes.

    Tables are float32 vectors or None: signs of rotations, or bounds between centroids.
    `rotation_factor` takes the place of the keys' scale in formats that rotate keys
    and have no such scale.
    """

    fmt: KVFormat
    layout: StateLayout
    kernel: Any
    constants: dict[str, Any]
    k_table: torch.Tensor | None
    v_table: torch.Tensor | None
    rotation_factor: float | None


@lru_cache(maxsize=256)
def _bind(
    fmt: KVFormat, size: int, size_v: int, dtype: torch.dtype, device: torch.device
) -> _Bound:
    fmt = fmt.resolve(dtype)
    if not serves(fmt):
        raise ValueError(
            f"KV cache format {fmt.format_id} has no Triton kernel that stores it: "
            "store it through the format itself"
        )
    layout = fmt.layout(size, size_v, dtype)
    k_table, v_table = _tables(fmt, size, size_v, device)
    turbo = isinstance(fmt, TurboQuant)
    return _Bound(
        fmt=fmt,
        layout=layout,
        kernel=_KERNELS[type(fmt)],
        constants=_constants(fmt, layout, size, size_v),
        k_table=k_table,
        v_table=v_table,
        rotation_factor=1.0 / sqrt(block_size(size)) if turbo else None,
    )


def _check(
    bound: _Bound,
    pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor | None,
) -> None:
    tokens, heads = slot_mapping.shape[0], key.shape[1]
    rows = [x for x in (key, value) if x is not None]
    fits = all(x.shape[0] >= tokens and x.shape[1] == heads for x in rows)
    if not fits or slot_mapping.stride() != (1,):
        raise ValueError(
            f"vectors {[tuple(x.shape) for x in rows]} for {tokens} slots of stride "
            f"{slot_mapping.stride()}: expected a row of each per slot, equal heads, "
            "and contiguous slots"
        )
    slots = heads * bound.layout.num_sides
    if pages.shape[1] != slots:
        raise ValueError(
            f"KV cache format {bound.fmt.name}: {heads} KV heads need {slots} head "
            f"slots, the pages {tuple(pages.shape)} have {pages.shape[1]}"
        )


# Exact types: a format of a plugin may share a mode and fields, but not the encoding.
_KERNELS: dict[type[KVFormat], Any] = {
    Dense: store_plain_kernel,
    Fp8PerTensor: store_plain_kernel,
    Int8PerTokenHead: store_scaled_kernel,
    Fp8PerTokenHead: store_scaled_kernel,
    Int4PerTokenHead: store_scaled_kernel,
    NvFp4: store_nvfp4_kernel,
    TurboQuant: store_turboquant_kernel,
    Fp8DsMla: store_records_kernel,
    NvFp4DsMla: store_records_kernel,
}


def _table_constants(layout: StateLayout) -> Constants:
    """The numbers of a table by its names, and NAME_DTYPE for every field."""
    types = {f"{f.name.upper()}_DTYPE": f.dtype for f in layout.fields}
    return Constants(**layout.constants(), **types)


def _constants(
    fmt: KVFormat, layout: StateLayout, size: int, size_v: int
) -> dict[str, Any]:
    """What a kernel knows besides the page: the table, tile sizes, and its family's."""
    width = max(_MIN_WIDTH, triton.next_power_of_2(size))
    width_v = max(_MIN_WIDTH, triton.next_power_of_2(size_v)) if size_v else _MIN_WIDTH
    constants: dict[str, Any] = {
        "C": _table_constants(layout),
        "ROWS": max(1, _TILE // max(width, width_v)),
        "WIDTH": width,
        "WIDTH_V": width_v,
    }
    if fmt.mode.is_per_token_head or isinstance(fmt, TurboQuant):
        constants["ROTATION"] = block_size(size)
    if fmt.mode.is_per_token_head:
        constants["ROTATION_V"] = block_size(size_v) if size_v else 1
    if isinstance(fmt, NvFp4):
        constants["TRY_FOUR"] = fmt.four_over_six
    if fmt.latent:
        constants["COLUMNS"] = fmt.scale_columns if isinstance(fmt, NvFp4DsMla) else 1
    return constants


def _tables(
    fmt: KVFormat, size: int, size_v: int, device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if isinstance(fmt, Int4PerTokenHead):
        signs_v = rht_signs(size_v).to(device) if size_v else None
        return rht_signs(size).to(device), signs_v
    if isinstance(fmt, TurboQuant) and not fmt.key_fp8:
        return get_midpoints(size, fmt.key_bits).to(device), None
    return None, None


@lru_cache(maxsize=256)
def _place(
    bound: _Bound,
    shape: torch.Size,
    strides: tuple[int, ...],
    misalignment: int,
) -> Constants:
    """Where pages [B, H, N, C] of these byte strides hold each field of a table.

    For each field by its name, the bytes of its plane's record: START from the pages'
    first byte, then BLOCK, HEAD and STATE per index, LANE and BYTE where states are
    interleaved. Besides, PAGE states, HEADS KV heads, and ALIGN of every record. Raises
    ValueError for torn pages, and where a vector of numbers would not be aligned to
    them.
    """
    layout = bound.layout
    pages = torch.empty_strided(shape, strides, dtype=torch.uint8, device="meta")
    values, steps = {}, [misalignment, _WIDEST_STORE]
    for field in layout.fields:
        plane = layout.plane_view(pages, field.side, field.plane)
        start, (block, head, state, lane, byte) = plane.storage_offset(), plane.stride()
        values[field.name.upper()] = Constants(
            START=start, BLOCK=block, HEAD=head, STATE=state, LANE=lane, BYTE=byte
        )
        steps += [start, block, head, state]
    align = gcd(*steps)
    for field in layout.fields:
        size = DTYPES[field.dtype].bits // 8
        vector = size > 1 and (field.count or 0) > 1
        if vector and gcd(align, layout.record_offset(field.name)) % size:
            raise ValueError(
                f"field {field.name!r} of pages {tuple(shape)} with strides {strides} "
                f"is not aligned to its {size} bytes: align pages and strides"
            )
    heads = shape[1] // layout.num_sides
    return Constants(PAGE=shape[2], HEADS=heads, ALIGN=align, **values)


HEAD_SIZES = (64, 80, 96, 128, 256)
LATENT_SIZE = 576


def variants() -> Iterator[KernelVariant]:
    """One per format, arrangement and head size, for bfloat16 models."""
    for fmt in all_formats():
        named = fmt.resolve(torch.bfloat16) is fmt and not fmt.alias_of
        if not (named and serves(fmt)):
            continue
        sizes = [(size, size) for size in HEAD_SIZES] + [(LATENT_SIZE, 0)]
        arranged = (fmt.arranged(name) for name in fmt.arrangements)
        for served in filter(serves, arranged):
            for pair in sizes:
                yield from _variant(served, *pair)


def _variant(fmt: KVFormat, size: int, size_v: int) -> Iterator[KernelVariant]:
    try:
        fmt.check_head_size(size, size_v)
    except ValueError:
        return
    heads = 2 if size_v else 1
    packing = fmt.packing(heads, size, size_v)
    shape = (2, packing.head_slots, 16, packing.state_bytes)
    key = torch.zeros(1, heads, size, dtype=torch.bfloat16)
    value = key[..., :size_v] if size_v else None
    slots = torch.zeros(1, dtype=torch.int64)
    call = store_call(torch.zeros(shape, dtype=torch.uint8), slots, key, value, fmt)
    sizes = f"{size}" if size_v else f"{size}+0"
    yield call.variant(f"store {fmt.format_id} {sizes}")
