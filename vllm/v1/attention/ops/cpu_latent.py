"""The C++ kernels over latents: one state per token, read by every query head.

Knows which formats have a kernel and what their arguments look like. The library and
its checks are `cpu_kernels`'.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch

from vllm.v1.attention.ops.cpu_cells import cells_of
from vllm.v1.attention.ops.cpu_kernels import (
    AttentionArgs,
    StoreArgs,
    address_of,
    available,
    check_batch,
    check_heads,
    dense_format,
    loaded,
    pages_of,
    raise_for,
    rows_of,
    store_dense,
    vector_at,
)
from vllm.v1.attention.ops.cpu_step import LayerArgs
from vllm.v1.kv_formats import KVFormat
from vllm.v1.kv_formats.hadamard import block_size, rht, rht_signs

# Elements that the kernels take at once, of the latent and of its rotary part, and the
# most there may be.
_STEP, _MOST = 32, 1024


@dataclass(frozen=True, kw_only=True)
class LatentArgs(LayerArgs):
    """With `signs` [block], queries and sums are rotated before and after."""

    signs: torch.Tensor | None


@dataclass(frozen=True, kw_only=True)
class _Latent:
    """A number of csrc/cpu/api.h; `rotated`: the cells hold rotated latents."""

    number: int
    rotated: bool = False
    dense: torch.dtype | None = None


_LATENTS = {
    "float32:cells": _Latent(number=32, dense=torch.float32),
    "float16:cells": _Latent(number=33, dense=torch.float16),
    "bfloat16:cells": _Latent(number=34, dense=torch.bfloat16),
    "fp8_e4m3:cells": _Latent(number=35),
    "fp8_e5m2:cells": _Latent(number=36),
    "int8_per_token_head:cells": _Latent(number=37),
    "fp8_per_token_head:cells": _Latent(number=38),
    "int4_per_token_head:cells": _Latent(number=39, rotated=True),
    "fp8_ds_mla:cells": _Latent(number=40),
    "nvfp4_ds_mla:cells": _Latent(number=41),
}


def serves(fmt: KVFormat, head_size: int, lora: int) -> bool:
    """Whether there is a kernel for latents of `head_size` elements, `lora` of which
    are values too. A rotation must keep these apart from the rest."""
    latent = _LATENTS.get(fmt.format_id)
    fits = head_size <= _MOST and head_size % _STEP == 0 and lora % _STEP == 0
    if latent is None or not fits or not available():
        return False
    return not latent.rotated or lora % block_size(head_size) == 0


def store_latents(
    pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    latents: torch.Tensor,
    fmt: KVFormat,
    k_scale: float = 1.0,
) -> None:
    """Writes one state per slot, byte for byte what `fmt.store` writes.

    pages: uint8 [B, 1, N, C]; slot_mapping: int64 [T'], slots outside the cache are
    skipped; latents: [T, 1, head_size] in a float type, last axis contiguous, T >= T'.
    ValueError for shapes and types that do not fit.
    """
    latent = _LATENTS[fmt.format_id]
    if latent.dense is not None:
        store_dense(pages, slot_mapping, latents, latents[..., :0], latent.dense)
        return
    tokens, head_size = slot_mapping.shape[0], latents.shape[-1]
    if latents.shape[0] < tokens or latents.shape[1] != 1:
        raise ValueError(
            f"latents have shape {tuple(latents.shape)}: expected at least {tokens} "
            "tokens of one head"
        )
    cell_bytes = fmt.layout(head_size, 0, latents.dtype).nbytes
    signs = _signs(head_size) if latent.rotated else None
    key = rows_of("latents", latents)
    args = StoreArgs(
        pages_of(pages, cell_bytes, f"{fmt.format_id} latents of {head_size}"),
        key,
        rows_of("latents", latents[..., :0]),
        vector_at("slot_mapping", slot_mapping, torch.int64),
        None if signs is None else signs.data_ptr(),
        tokens,
        latent.number,
        k_scale,
        1.0,
    )
    raise_for(loaded().store(args))


def latent_attention(
    out: torch.Tensor,
    query: torch.Tensor,
    pages: torch.Tensor,
    fmt: KVFormat,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
    k_scale: float = 1.0,
    sliding_window: int = -1,
    soft_cap: float = 0.0,
    causal: bool = True,
) -> None:
    """Attends R requests to their latents: prefill, decode and any mix of them.

    query: [T, Hq, lora + rope] and out: [T, Hq, lora], in one float type; a state's
    first `lora` elements are its value. pages: uint8 [B, 1, N, C] holding `fmt`, whose
    stored numbers times `k_scale` are the latent. The rest is as in `paged_attention`,
    as are the errors.
    """
    head_size = query.shape[-1]
    check_heads(out, query, pages, head_size, out.shape[-1])
    check_batch(query_start_loc, seq_lens, block_table)
    if not serves(fmt, head_size, out.shape[-1]):
        raise ValueError(
            f"no kernel for {fmt.format_id} latents of {head_size} elements with "
            f"{out.shape[-1]} values: use the torch reference"
        )
    latent = _LATENTS[fmt.format_id]
    target = out
    if latent.rotated:
        query, target = _rotated(query), torch.empty_like(out)
    cell_bytes = fmt.layout(head_size, 0, query.dtype).nbytes
    args = AttentionArgs(
        rows_of("out", target),
        rows_of("query", query),
        pages_of(pages, cell_bytes, f"{fmt.format_id} latents of {head_size}"),
        vector_at("query_start_loc", query_start_loc, torch.int32),
        vector_at("seq_lens", seq_lens, torch.int32),
        address_of("block_table", block_table, torch.int32),
        None,
        block_table.stride(0),
        block_table.shape[1],
        seq_lens.shape[0],
        query.shape[0],
        query.shape[1],
        latent.number,
        causal,
        sliding_window,
        scale,
        soft_cap,
        k_scale,
        1.0,
    )
    raise_for(loaded().attention(args))
    if latent.rotated:
        out.copy_(_unrotated(target, head_size))


def latent_args(
    pages: torch.Tensor,
    fmt: KVFormat,
    head_size: int,
    scale: float,
    k_scale: float,
    sliding_window: int,
    soft_cap: float,
    *,
    stores: bool,
) -> LatentArgs:
    """What the two functions above call kernels with, to be kept; `serves` says whether
    there are any. Rows and batch are filled in step by step."""
    latent = _LATENTS[fmt.format_id]
    signs = _signs(head_size) if latent.rotated else None
    dtype = latent.dense or torch.float32  # of no weight for what is not dense
    cell_bytes = fmt.layout(head_size, 0, dtype).nbytes
    layer = pages_of(pages, cell_bytes, f"{fmt.format_id} latents of {head_size}")
    attention = AttentionArgs(
        pages=layer,
        cell_format=latent.number,
        causal=1,
        sliding_window=sliding_window,
        scale=scale,
        soft_cap=soft_cap,
        k_scale=k_scale,
        v_scale=1.0,
    )
    number = latent.number
    if latent.dense is not None:
        number = cells_of(dense_format(latent.dense), head_size, 0).number
    store = StoreArgs(
        pages=layer,
        signs=None if signs is None else signs.data_ptr(),
        cell_format=number,
        k_scale=k_scale,
        v_scale=1.0,
    )
    return LatentArgs(
        store=store if stores else None,
        attention=attention,
        kept=(pages, signs),
        signs=None if signs is None else signs[: block_size(head_size)],
    )


@lru_cache(maxsize=16)
def _signs(head_size: int) -> torch.Tensor:
    return rht_signs(head_size).contiguous()


@lru_cache(maxsize=16)
def _rotation(head_size: int) -> torch.Tensor:
    """[b, b]: what `rht` does to a block, as a matrix that keeps lengths."""
    block = block_size(head_size)
    return rht(torch.eye(block)) / block**0.5


def _rotated(query: torch.Tensor) -> torch.Tensor:
    """Queries whose products with rotated latents are those with the latents."""
    size = query.shape[-1]
    matrix = _rotation(size) / block_size(size) ** 0.5
    blocks = query.float().unflatten(-1, (-1, len(matrix)))
    return (blocks @ matrix).flatten(-2).to(query.dtype)


def _unrotated(values: torch.Tensor, head_size: int) -> torch.Tensor:
    """Sums of rotated latents' first blocks, rotated back."""
    matrix = _rotation(head_size).T / block_size(head_size) ** 0.5
    blocks = values.float().unflatten(-1, (-1, len(matrix)))
    return (blocks @ matrix).flatten(-2)
