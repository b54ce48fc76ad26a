"""Attention over packed pages of keys and values, launched on a batch.

Knows which constants a format and a batch give the kernel. Refuses to know a format's
bytes and the kernel's mathematics.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import torch
import triton.language as tl

from vllm.utils.math_utils import next_power_of_2
from vllm.v1.attention.ops.rotation import rotation_of
from vllm.v1.attention.ops.triton_attention import paged_attention_kernel
from vllm.v1.attention.ops.triton_batch import (
    LOG2_E,
    PLAIN_MASKS,
    Masks,
    Partials,
    Requests,
    Tile,
    partials_for,
    splits_for,
    tile_for,
)
from vllm.v1.attention.ops.triton_call import Call
from vllm.v1.attention.ops.triton_constants import cell_constants, page_constants
from vllm.v1.attention.ops.triton_softmax import merge_splits_kernel
from vllm.v1.kv_formats import Extent, KVFormat, KVScales
from vllm.v1.kv_formats.base import UNIT_SCALES
from vllm.v1.kv_formats.codebook import get_centroids
from vllm.v1.kv_formats.turboquant import TurboQuant

DOT_TYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


def serves(fmt: KVFormat) -> bool:
    """Whether the kernel reads the format: a K and a V per head in whole cells."""
    return not fmt.latent and fmt.extent() is Extent.STATE


def paged_attention(
    out: torch.Tensor,
    query: torch.Tensor,
    pages: torch.Tensor,
    fmt: KVFormat,
    requests: Requests,
    scale: float,
    masks: Masks = PLAIN_MASKS,
    scales: KVScales = UNIT_SCALES,
    num_splits: int | None = None,
) -> None:
    """Fills `out` [T, Hq, Dv] for `query` [T, Hq, D]: prefill, decode, any mix.

    pages: uint8 [B, H, N, C] of any strides with contiguous cells of `fmt`, a resolved
    format. Tokens past the last request get anything. `num_splits` overrides into how
    many parts contexts are cut. ValueError for shapes and formats that do not fit.
    """
    rotation, rotation_v = rotation_of(fmt, query.shape[2]), None
    target = out
    if rotation is not None:
        query, scale = rotation.forward(query), scale * rotation.factor
        if rotation.rotates_values:
            rotation_v = rotation_of(fmt, out.shape[2])
            target = torch.empty_like(out, dtype=torch.float32)
    calls = attention_calls(
        target, query, pages, fmt, requests, scale, masks, scales, num_splits
    )
    for call in calls:
        call.launch()
    if rotation_v is not None:
        out.copy_(rotation_v.back(target) * rotation_v.factor)


def attention_calls(
    out: torch.Tensor,
    query: torch.Tensor,
    pages: torch.Tensor,
    fmt: KVFormat,
    requests: Requests,
    scale: float,
    masks: Masks = PLAIN_MASKS,
    scales: KVScales = UNIT_SCALES,
    num_splits: int | None = None,
) -> list[Call]:
    """The launches of `paged_attention`, in the space of the stored vectors."""
    size, size_v, kv_heads = query.shape[2], out.shape[2], pages.shape[1]
    _check(out, query, pages, fmt, requests)
    shared = query.shape[1] // kv_heads
    tile, dot = _tile(fmt, query.dtype, size, size_v, shared, requests.one_query)
    queries = 1 if requests.one_query else tile.rows // shared
    tiles = requests.tiles(query.shape[0], queries)
    if num_splits is None:
        num_splits = splits_for(tiles * kv_heads, requests.max_seq_len, query.device)
    partials = partials_for(out, num_splits)
    key_scale, value_scale = (scales.k, scales.v) if fmt.per_tensor_scales else (1, 1)
    call = Call(
        kernel=paged_attention_kernel,
        grid=(tiles, kv_heads, num_splits),
        arguments={
            "out_ptr": out,
            "query_ptr": query,
            "pages_ptr": pages,
            "codebook_ptr": _codebook(fmt, size, query.device),
            "score_scale": float(scale * key_scale * LOG2_E),
            "value_scale": float(value_scale),
            "query_token_stride": query.stride(0),
            "query_head_stride": query.stride(1),
            "out_token_stride": out.stride(0),
            "out_head_stride": out.stride(1),
            **partials.arguments(),
            **requests.arguments(),
            **masks.arguments(),
        },
        constants={
            "C": cell_constants(fmt, size, size_v, query.dtype),
            "P": page_constants(pages),
            "GROUP": shared,
            "PAD": padded(size),
            "PAD_V": padded(size_v),
            "DOT": DOT_TYPES[dot],
            "BLOCK_M": tile.rows,
            "BLOCK_N": tile.keys,
            "BLOCK_Q": queries,
            "ONE_QUERY": requests.one_query,
            "SPLITS": num_splits,
            **masks.constants(),
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        fuses=True,
    )
    return [call, *merge_calls(out, partials)]


def merge_calls(out: torch.Tensor, partials: Partials) -> Iterator[Call]:
    """The launch that fills `out` [T, Hq, Dv] from partial sums, if there are any."""
    if partials.sums is None:
        return
    tokens, heads, splits, size = partials.sums.shape
    yield Call(
        kernel=merge_splits_kernel,
        grid=(tokens, heads),
        arguments={
            "out_ptr": out,
            "out_token_stride": out.stride(0),
            "out_head_stride": out.stride(1),
            **partials.arguments(),
        },
        constants={
            "HEADS": heads,
            "SPLITS": splits,
            "SPLITS_PAD": next_power_of_2(splits),
            "DV": size,
            "DV_PAD": next_power_of_2(size),
        },
        fuses=True,
    )


def padded(size: int) -> int:
    """Elements of a tile's row: a power of two that a dot product takes."""
    return max(16, next_power_of_2(size))


def dot_dtype(fmt: KVFormat, query: torch.dtype) -> torch.dtype:
    """The type of the products: the queries'; with a dense cache of another type the
    wider one, and bfloat16 for the two that have 16 bits."""
    stored = fmt.storage_dtype(query)
    if stored is query or stored not in DOT_TYPES:
        return query
    narrow = max(stored.itemsize, query.itemsize) == torch.bfloat16.itemsize
    return torch.bfloat16 if narrow else torch.float32


def _tile(
    fmt: KVFormat,
    query: torch.dtype,
    size: int,
    size_v: int,
    shared: int,
    one_query: bool,
) -> tuple[Tile, torch.dtype]:
    dot = dot_dtype(fmt, query)
    looks_up = isinstance(fmt, TurboQuant) and not fmt.key_fp8
    widest = max(padded(size), padded(size_v))
    return tile_for(shared, widest, one_query, dot, looks_up), dot


@lru_cache(maxsize=64)
def _codebook(fmt: KVFormat, size: int, device: torch.device) -> torch.Tensor | None:
    if isinstance(fmt, TurboQuant) and not fmt.key_fp8:
        return get_centroids(size, fmt.key_bits).to(device)
    return None


def _check(
    out: torch.Tensor,
    query: torch.Tensor,
    pages: torch.Tensor,
    fmt: KVFormat,
    requests: Requests,
) -> None:
    heads, kv_heads = query.shape[1], pages.shape[1]
    nbytes = fmt.layout(query.shape[2], out.shape[2], query.dtype).nbytes
    if pages.dtype != torch.uint8 or pages.shape[3] != nbytes:
        raise ValueError(
            f"pages are {pages.dtype} {tuple(pages.shape)}: expected the byte view "
            f"[B, H, N, {nbytes}] of {fmt.format_id} cells"
        )
    if heads % kv_heads or out.shape[:2] != query.shape[:2]:
        raise ValueError(
            f"query {tuple(query.shape)} and out {tuple(out.shape)} do not fit "
            f"{kv_heads} KV heads: expected as many tokens and heads in both, and a "
            "multiple of the KV heads"
        )
    check_rows(query=query, out=out, block_table=requests.block_table)


def check_rows(**tensors: torch.Tensor) -> None:
    """Raises ValueError for a tensor whose rows are not contiguous."""
    for name, tensor in tensors.items():
        if tensor.stride(-1) != 1:
            raise ValueError(
                f"the last axis of {name} has stride {tensor.stride(-1)}: expected 1, "
                "make it contiguous"
            )
