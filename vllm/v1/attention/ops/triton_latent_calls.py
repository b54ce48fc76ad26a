"""Attention over pages of latents, launched on a batch or on a selection of states.

Knows which constants a format and a batch give the kernels. Refuses to know a format's
bytes and a model's projections: queries and outputs are in the latent space.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from vllm.utils.math_utils import cdiv
from vllm.v1.attention.ops.rotation import Rotation, rotation_of
from vllm.v1.attention.ops.triton_batch import (
    LOG2_E,
    PLAIN_MASKS,
    Masks,
    Requests,
    Tile,
    partials_for,
    splits_for,
)
from vllm.v1.attention.ops.triton_call import Call
from vllm.v1.attention.ops.triton_constants import cell_constants, page_constants
from vllm.v1.attention.ops.triton_latent import (
    latent_attention_kernel,
    sparse_latent_kernel,
)
from vllm.v1.attention.ops.triton_paged import (
    DOT_TYPES,
    check_rows,
    dot_dtype,
    merge_calls,
    padded,
)
from vllm.v1.kv_formats import Extent, KVFormat
from vllm.v1.kv_formats.hadamard import block_size


def serves(fmt: KVFormat, head_size: int, lora: int) -> bool:
    """Whether the kernels read latents of `head_size` elements, the first `lora` of
    which are values too. A rotation must keep these apart from the rest."""
    if not fmt.latent_capable or fmt.extent() is not Extent.STATE:
        return False
    if fmt.latent:
        rows = {row.name: row.count for row in fmt.rows(torch.bfloat16)}
        return rows.get("nope") == lora and "nope_scale" in rows
    return rotation_of(fmt, head_size) is None or lora % block_size(head_size) == 0


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The launches of one attention, and what turns their values back where latents are
    stored rotated: their blocks are rotated one by one, so values are turned alone."""

    calls: list[Call]
    out: torch.Tensor
    target: torch.Tensor
    rotation: Rotation | None
    block: int

    def run(self) -> None:
        """Fills `out`."""
        for call in self.calls:
            call.launch()
        if self.rotation is not None:
            values = self.rotation.back(self.target, self.block)
            self.out.copy_(values * self.rotation.factor)


def latent_attention(
    out: torch.Tensor,
    query: torch.Tensor,
    pages: torch.Tensor,
    fmt: KVFormat,
    requests: Requests,
    scale: float,
    masks: Masks = PLAIN_MASKS,
    k_scale: float = 1.0,
    num_splits: int | None = None,
) -> Launch:
    """What fills `out` [T, Hq, lora] for `query` [T, Hq, lora + rope]: prefill, decode,
    any mix. pages: uint8 [B, 1, N, C] with contiguous states of `fmt`, whose stored
    numbers times `k_scale` are the latents. ValueError for what does not fit."""
    _check(out, query, pages, fmt)
    check_rows(block_table=requests.block_table)
    query, target, scale, rotation = _turned(out, query, fmt, scale)
    tile = _tile(fmt, query, padded(out.shape[2]))
    rows = query.shape[0] * query.shape[1]
    tiles = rows // tile.rows + len(requests)
    if num_splits is None:
        num_splits = splits_for(tiles, requests.max_seq_len, query.device)
    partials = partials_for(target, num_splits)
    call = Call(
        kernel=latent_attention_kernel,
        grid=(tiles, num_splits),
        arguments={
            **_arguments(target, query, pages, fmt, scale, k_scale),
            **partials.arguments(),
            **requests.arguments(),
            **masks.arguments(),
        },
        constants={
            **_constants(target, query, pages, fmt, tile, num_splits),
            **masks.constants(),
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        fuses=True,
    )
    return Launch(
        calls=[call, *merge_calls(target, partials)],
        out=out,
        target=target,
        rotation=rotation,
        block=block_size(query.shape[2]),
    )


def sparse_attention(
    out: torch.Tensor,
    query: torch.Tensor,
    pages: torch.Tensor,
    fmt: KVFormat,
    requests: Requests,
    selected: torch.Tensor,
    scale: float,
    k_scale: float = 1.0,
    num_splits: int | None = None,
) -> Launch:
    """What fills `out` [T, Hq, lora] from the states selected for each token.

    selected: int32 [T, K], positions in the token's request, -1 for none; it is the
    only mask. The rest is as in `latent_attention`. ValueError for what does not fit.
    """
    _check(out, query, pages, fmt)
    check_rows(block_table=requests.block_table, selected=selected)
    query, target, scale, rotation = _turned(out, query, fmt, scale)
    tile = _tile(fmt, query, padded(out.shape[2]))
    tiles = query.shape[0] * cdiv(query.shape[1], tile.rows)
    if num_splits is None:
        num_splits = splits_for(tiles, selected.shape[1], query.device)
    partials = partials_for(target, num_splits)
    call = Call(
        kernel=sparse_latent_kernel,
        grid=(tiles, num_splits),
        arguments={
            **_arguments(target, query, pages, fmt, scale, k_scale),
            **partials.arguments(),
            **requests.arguments(),
            "soft_cap": 0.0,
            "selected_ptr": selected,
            "selected_stride": selected.stride(0),
            "num_selected": selected.shape[1],
        },
        constants={
            **_constants(target, query, pages, fmt, tile, num_splits),
            "CAPPED": False,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        fuses=True,
    )
    return Launch(
        calls=[call, *merge_calls(target, partials)],
        out=out,
        target=target,
        rotation=rotation,
        block=block_size(query.shape[2]),
    )


def _tile(fmt: KVFormat, query: torch.Tensor, lora: int) -> Tile:
    """Sums of 16 rows of a latent fill half the registers of 4 warps: where codes are
    decoded beside them there are 8, and fewer keys where decoding takes several steps.
    """
    wide = dot_dtype(fmt, query.dtype) is torch.float32
    several = fmt.latent or rotation_of(fmt, query.shape[2]) is not None
    return Tile(
        rows=16,
        keys=16 if wide or several or lora > 512 else 32,
        num_warps=8 if fmt.mode.is_quantized else 4,
        num_stages=1,
    )


def _arguments(
    out: torch.Tensor,
    query: torch.Tensor,
    pages: torch.Tensor,
    fmt: KVFormat,
    scale: float,
    k_scale: float,
) -> dict[str, Any]:
    factor = k_scale if fmt.per_tensor_scales else 1.0
    return {
        "out_ptr": out,
        "query_ptr": query,
        "pages_ptr": pages,
        "score_scale": float(scale * factor * LOG2_E),
        "value_scale": float(factor),
        "query_token_stride": query.stride(0),
        "query_head_stride": query.stride(1),
        "out_token_stride": out.stride(0),
        "out_head_stride": out.stride(1),
    }


def _constants(
    out: torch.Tensor,
    query: torch.Tensor,
    pages: torch.Tensor,
    fmt: KVFormat,
    tile: Tile,
    num_splits: int,
) -> dict[str, Any]:
    size, lora = query.shape[2], out.shape[2]
    return {
        "C": cell_constants(fmt, size, 0, query.dtype),
        "P": page_constants(pages),
        "HEADS": query.shape[1],
        "LORA": lora,
        "PAD": padded(lora),
        "PAD_ROPE": padded(size - lora),
        "DOT": DOT_TYPES[dot_dtype(fmt, query.dtype)],
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.keys,
        "SPLITS": num_splits,
    }


Turned = tuple[torch.Tensor, torch.Tensor, float, Rotation | None]


def _turned(
    out: torch.Tensor, query: torch.Tensor, fmt: KVFormat, scale: float
) -> Turned:
    """Query, output, scale and rotation in the space of the stored latents."""
    rotation = rotation_of(fmt, query.shape[2])
    if rotation is None:
        return query, out, scale, None
    target = torch.empty_like(out, dtype=torch.float32)
    return rotation.forward(query), target, scale * rotation.factor, rotation


def _check(
    out: torch.Tensor, query: torch.Tensor, pages: torch.Tensor, fmt: KVFormat
) -> None:
    size, lora = query.shape[2], out.shape[2]
    if not serves(fmt, size, lora):
        raise ValueError(
            f"no Triton kernel for {fmt.format_id} latents of {size} elements with "
            f"{lora} values: use the torch reference"
        )
    nbytes = fmt.layout(size, 0, query.dtype).nbytes
    if pages.dtype != torch.uint8 or pages.shape[1:4:2] != (1, nbytes):
        raise ValueError(
            f"pages are {pages.dtype} {tuple(pages.shape)}: expected the byte view "
            f"[B, 1, N, {nbytes}] of {fmt.format_id} latents"
        )
    if out.shape[:2] != query.shape[:2]:
        raise ValueError(
            f"query {tuple(query.shape)} and out {tuple(out.shape)} differ: expected "
            "as many tokens and heads in both"
        )
    check_rows(query=query, out=out)
