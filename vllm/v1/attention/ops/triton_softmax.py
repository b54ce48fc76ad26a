"""Pieces that every Triton attention kernel shares: tiles of queries, where cells lie,
the running softmax, and the sum of what splits of a context saw.

Knows block tables, lengths and strides in bytes. Refuses to know formats.

Scores are exponents of two: logits times log2 e.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def request_of_tile(starts_ptr, tile, num_reqs, BLOCK_Q: tl.constexpr):
    """The request that a tile of BLOCK_Q queries belongs to, and the tile's first query
    in it (past its end for a tile with nothing to do).

    Request r owns the tiles from starts[r] // BLOCK_Q + r on, so the number of tiles,
    T // BLOCK_Q + R, needs no lengths on the host.
    """
    low = tile * 0
    high = low + num_reqs - 1
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(starts_ptr + middle) // BLOCK_Q + middle <= tile:
            low = middle
        else:
            high = middle - 1
    return low, (tile - tl.load(starts_ptr + low) // BLOCK_Q - low) * BLOCK_Q


@triton.jit
def cells_at(
    pages_ptr,
    table_ptr,
    first,
    mask,
    head,
    P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Byte pointers [BLOCK_N] to the cells of the positions from `first` on, a multiple
    of BLOCK_N; `table_ptr` is the request's row of the block table."""
    positions = first + tl.arange(0, BLOCK_N)
    if P.PAGE % BLOCK_N == 0:
        block = tl.load(table_ptr + first // P.PAGE).to(tl.int64)
    else:
        block = tl.load(table_ptr + positions // P.PAGE, mask=mask, other=0)
    page = block.to(tl.int64) * P.BLOCK_STRIDE + head.to(tl.int64) * P.HEAD_STRIDE
    cells = pages_ptr + page + (positions % P.PAGE).to(tl.int64) * P.STATE_STRIDE
    ALIGN: tl.constexpr = P.ALIGN
    return tl.multiple_of(cells, ALIGN)


@triton.jit
def tanh(x):
    """Exact to float32 rounding of 1; saturates without overflow to NaN."""
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def softmax_step(scores, top, total):
    """One tile of `scores` [M, N], -inf where nothing is seen, into the running `top`
    and `total` [M]: weights [M, N] and what earlier sums are multiplied by [M]."""
    higher = tl.maximum(top, tl.max(scores, axis=1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores - base[:, None])
    kept = tl.exp2(top - base)
    return weights, kept, higher, total * kept + tl.sum(weights, axis=1)


@triton.jit
def merge_splits_kernel(
    out_ptr,
    sums_ptr,
    stats_ptr,
    out_token_stride,
    out_head_stride,
    HEADS: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
    DV: tl.constexpr,
    DV_PAD: tl.constexpr,
):
    """Joins the partial sums of one query head: grid (T, HEADS).

    sums float32 [T, HEADS, SPLITS, DV]; stats float32 [T, HEADS, SPLITS, 2]: highest
    score and sum of weights. Sums of splits that saw nothing are not read.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.arange(0, SPLITS_PAD)
    part = (token * HEADS + head) * SPLITS + split
    held = split < SPLITS
    top = tl.load(stats_ptr + part * 2, mask=held, other=float("-inf"))
    weight = tl.load(stats_ptr + part * 2 + 1, mask=held, other=0.0)
    highest = tl.max(top, axis=0)
    share = tl.exp2(top - tl.where(highest == float("-inf"), 0.0, highest))
    total = tl.sum(weight * share, axis=0)
    d = tl.arange(0, DV_PAD)
    seen = (weight > 0.0)[:, None] & (d < DV)[None, :]
    sums = tl.load(sums_ptr + part[:, None] * DV + d[None, :], mask=seen, other=0.0)
    result = tl.sum(sums * share[:, None], axis=0) / tl.where(total > 0.0, total, 1.0)
    at = out_ptr + token * out_token_stride + head * out_head_stride
    tl.store(at + d, result.to(out_ptr.dtype.element_ty), mask=d < DV)
