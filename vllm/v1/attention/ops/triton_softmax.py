"""Pieces that every Triton attention kernel shares: tiles of queries, where cells lie,
the running softmax, and the sum of what splits of a context saw.

Knows block tables, lengths and strides in bytes. Refuses to know formats.

Scores are exponents of two: logits times log2 e.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def request_of_tile(
    starts_ptr, tile, num_reqs, BLOCK: tl.constexpr, PER_QUERY: tl.constexpr = 1
):
    """The request that a tile of BLOCK items belongs to, and the tile's first item in
    it (past its end for a tile with nothing to do). A query has PER_QUERY items.

    Request r owns the tiles from starts[r] * PER_QUERY // BLOCK + r on, so the number
    of tiles, T * PER_QUERY // BLOCK + R, needs no lengths on the host.
    """
    low = tile * 0
    high = low + num_reqs - 1
    while low < high:
        middle = (low + high + 1) // 2
        first = tl.load(starts_ptr + middle) * PER_QUERY // BLOCK + middle
        if first <= tile:
            low = middle
        else:
            high = middle - 1
    first = tl.load(starts_ptr + low) * PER_QUERY // BLOCK + low
    return low, (tile - first) * BLOCK


@triton.jit
def request_of_token(starts_ptr, token, num_reqs):
    """The last request that starts at or before a token of the batch."""
    low = token * 0
    high = low + num_reqs - 1
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(starts_ptr + middle) <= token:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def cells_in(pages_ptr, block, state, head, P: tl.constexpr):
    """Byte pointers to the cells of states [N] in blocks (one, or [N])."""
    page = block.to(tl.int64) * P.BLOCK_STRIDE + head.to(tl.int64) * P.HEAD_STRIDE
    ALIGN: tl.constexpr = P.ALIGN
    return tl.multiple_of(pages_ptr + page + state.to(tl.int64) * P.STATE_STRIDE, ALIGN)


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
        block = tl.load(table_ptr + first // P.PAGE)
    else:
        block = tl.load(table_ptr + positions // P.PAGE, mask=mask, other=0)
    return cells_in(pages_ptr, block, positions % P.PAGE, head, P)


@triton.jit
def reach_of(
    first,
    last,
    context,
    causal_ptr,
    request,
    split,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """The keys that queries at positions `first` to `last` see: from `begin` on, in
    tiles from `origin` to `stop`, those of one split; and whether they see no later
    ones.

    CAUSAL: "all", "none", or "some", told per request by bool `causal_ptr`. WINDOW: 0
    is unlimited.
    """
    causal = first * 0 == 0
    end = context
    if CAUSAL == "all":
        end = last + 1
    elif CAUSAL == "some":
        causal = tl.load(causal_ptr + request) != 0
        end = tl.where(causal, last + 1, end)
    begin = first * 0
    if WINDOW > 0:
        begin = tl.maximum(first - WINDOW + 1, 0)
        end = tl.minimum(end, last + WINDOW)
    origin = begin // BLOCK_N * BLOCK_N
    stop = end
    if SPLITS > 1:
        tiles = tl.cdiv(tl.cdiv(end - origin, BLOCK_N), SPLITS)
        origin += split * tiles * BLOCK_N
        stop = tl.minimum(end, origin + tiles * BLOCK_N)
    return begin, origin, stop, causal


@triton.jit
def seen_by(
    position, used, keys_at, stored, causal, WINDOW: tl.constexpr, CAUSAL: tl.constexpr
):
    """Which stored keys at positions [N] the queries at positions [M] see: [M, N]."""
    seen = stored[None, :] & used[:, None]
    distance = position[:, None] - keys_at[None, :]
    if CAUSAL == "all":
        seen = seen & (distance >= 0)
    elif CAUSAL == "some":
        seen = seen & ((distance >= 0) | (causal == 0))
    if WINDOW > 0:
        seen = seen & (distance < WINDOW) & (distance > -WINDOW)
    return seen


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
def add_weighted(
    sums, weights, values, factor, SCALED: tl.constexpr, DOT: tl.constexpr
):
    """`sums` [M, D] plus weights [M, N] times values [N, D] in type DOT, which count
    `factor` [N] times if SCALED.

    The factors go into the weights, so that codes enter the product exactly; float16
    weights are kept near 1 for it.
    """
    if not SCALED:
        return tl.dot(weights.to(DOT), values, sums, input_precision="ieee")
    elif tl.float16 == DOT:
        highest = tl.maximum(tl.max(factor, axis=0), 1e-30)
        scaled = (weights * (factor / highest)[None, :]).to(DOT)
        return sums + tl.dot(scaled, values, input_precision="ieee") * highest
    else:
        scaled = (weights * factor[None, :]).to(DOT)
        return tl.dot(scaled, values, sums, input_precision="ieee")


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
