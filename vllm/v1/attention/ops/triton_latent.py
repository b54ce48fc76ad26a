"""Attention over latents in Triton: one state per token, read by every query head.

A state is a key, and its first part a value too. Two kernels: over all of a context,
and over the states that were selected for each query. Refuses to know a format's bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm.v1.attention.ops.triton_loaders import load_latent, load_rope
from vllm.v1.attention.ops.triton_softmax import (
    add_weighted,
    cells_at,
    cells_in,
    reach_of,
    request_of_tile,
    request_of_token,
    seen_by,
    softmax_step,
    tanh,
)


@triton.jit
def load_query(
    query_ptr, at, used, FIRST: tl.constexpr, COUNT: tl.constexpr, PAD: tl.constexpr
):
    """Elements FIRST to FIRST + COUNT of the vectors at offsets `at` [M]: [M, PAD]."""
    i = tl.arange(0, PAD)
    inside = used[:, None] & (i < COUNT)[None, :]
    return tl.load(query_ptr + at[:, None] + (FIRST + i)[None, :], mask=inside, other=0)


@triton.jit
def attend_latents(
    q,
    q_rope,
    cells,
    stored,
    seen,
    top,
    total,
    sums,
    score_scale,
    soft_cap,
    C: tl.constexpr,
    ALIGN: tl.constexpr,
    LORA: tl.constexpr,
    CAPPED: tl.constexpr,
    DOT: tl.constexpr,
):
    """One tile of states into the running softmax: `top`, `total` [M], `sums` [M, D].

    `q` [M, D] and `q_rope` [M, E] are the two parts of the queries; `stored` [N] says
    which cells are read and `seen` [M, N] which of them a row sees.
    """
    latents, factor = load_latent(cells, stored, C, ALIGN, LORA, q.shape[1], DOT)
    rope = load_rope(cells, stored, C, ALIGN, LORA, q_rope.shape[1], DOT)
    scores = tl.dot(q, tl.trans(latents), input_precision="ieee")
    scores = tl.dot(q_rope, tl.trans(rope), scores, input_precision="ieee")
    scores *= score_scale
    if C.FAMILY == "per_token_head":
        scores *= factor[None, :]
    if CAPPED:
        scores = tanh(scores / soft_cap) * soft_cap
    scores = tl.where(seen, scores, float("-inf"))
    weights, kept, top, total = softmax_step(scores, top, total)
    sums *= kept[:, None]
    SCALED: tl.constexpr = C.FAMILY == "per_token_head"
    return top, total, add_weighted(sums, weights, latents, factor, SCALED, DOT)


@triton.jit
def store_latents_of(
    out_ptr,
    sums_ptr,
    stats_ptr,
    out_token_stride,
    out_head_stride,
    token,
    head,
    used,
    top,
    total,
    sums,
    HEADS: tl.constexpr,
    LORA: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Weighted sums of rows (token, head) [M], or their part of it with SPLITS > 1."""
    d = tl.arange(0, sums.shape[1])
    inside = used[:, None] & (d < LORA)[None, :]
    if SPLITS == 1:
        result = sums / tl.where(total > 0.0, total, 1.0)[:, None]
        at = out_ptr + (token * out_token_stride + head * out_head_stride)[:, None]
        tl.store(at + d[None, :], result.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        part = (token * HEADS + head) * SPLITS + tl.program_id(1)
        tl.store(stats_ptr + part * 2, top, mask=used)
        tl.store(stats_ptr + part * 2 + 1, total, mask=used)
        at = sums_ptr + part[:, None] * LORA + d[None, :]
        tl.store(at, sums, mask=inside & (total > 0.0)[:, None])


@triton.jit
def latent_attention_kernel(
    out_ptr,
    sums_ptr,
    stats_ptr,
    query_ptr,
    pages_ptr,
    table_ptr,
    starts_ptr,
    lens_ptr,
    causal_ptr,
    sinks_ptr,
    num_reqs,
    score_scale,
    value_scale,
    soft_cap,
    query_token_stride,
    query_head_stride,
    out_token_stride,
    out_head_stride,
    table_stride,
    C: tl.constexpr,
    P: tl.constexpr,
    HEADS: tl.constexpr,
    LORA: tl.constexpr,
    PAD: tl.constexpr,
    PAD_ROPE: tl.constexpr,
    DOT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    CAUSAL: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Grid (tiles of BLOCK_M rows, SPLITS); a row is one head of one query. Arguments
    are those of `paged_attention_kernel`; there are no sinks."""
    tl.static_assert(not SINKS)
    tile = tl.program_id(0)
    request, first_row = request_of_tile(starts_ptr, tile, num_reqs, BLOCK_M, HEADS)
    start = tl.load(starts_ptr + request)
    num_queries = tl.load(starts_ptr + request + 1) - start
    if first_row >= num_queries * HEADS:
        return
    context = tl.load(lens_ptr + request)
    row = first_row + tl.arange(0, BLOCK_M)
    query, head = row // HEADS, row % HEADS
    used = query < num_queries
    token = (start + query).to(tl.int64)
    at = token * query_token_stride + head * query_head_stride
    q = load_query(query_ptr, at, used, 0, LORA, PAD).to(DOT)
    q_rope = load_query(query_ptr, at, used, LORA, C.D - LORA, PAD_ROPE).to(DOT)
    position = context - num_queries + query
    first = context - num_queries + first_row // HEADS
    last_row = tl.minimum(first_row + BLOCK_M, num_queries * HEADS) - 1
    last = context - num_queries + last_row // HEADS
    split = tl.program_id(1)
    begin, origin, stop, causal = reach_of(
        first,
        last,
        context,
        causal_ptr,
        request,
        split,
        BLOCK_N,
        WINDOW,
        CAUSAL,
        SPLITS,
    )
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    sums = tl.zeros((BLOCK_M, PAD), tl.float32)
    row_of_table = table_ptr + request.to(tl.int64) * table_stride
    for tile_start in range(origin, stop, BLOCK_N):
        keys_at = tile_start + tl.arange(0, BLOCK_N)
        stored = (keys_at >= begin) & (keys_at < stop)
        cells = cells_at(
            pages_ptr, row_of_table, tile_start, stored, request * 0, P, BLOCK_N
        )
        seen = seen_by(position, used, keys_at, stored, causal, WINDOW, CAUSAL)
        top, total, sums = attend_latents(
            q,
            q_rope,
            cells,
            stored,
            seen,
            top,
            total,
            sums,
            score_scale,
            soft_cap,
            C,
            P.ALIGN,
            LORA,
            CAPPED,
            DOT,
        )
    store_latents_of(
        out_ptr,
        sums_ptr,
        stats_ptr,
        out_token_stride,
        out_head_stride,
        token,
        head,
        used,
        top,
        total,
        sums * value_scale,
        HEADS,
        LORA,
        SPLITS,
    )


@triton.jit
def sparse_latent_kernel(
    out_ptr,
    sums_ptr,
    stats_ptr,
    query_ptr,
    pages_ptr,
    table_ptr,
    starts_ptr,
    lens_ptr,
    selected_ptr,
    num_reqs,
    num_selected,
    score_scale,
    value_scale,
    soft_cap,
    query_token_stride,
    query_head_stride,
    out_token_stride,
    out_head_stride,
    table_stride,
    selected_stride,
    C: tl.constexpr,
    P: tl.constexpr,
    HEADS: tl.constexpr,
    LORA: tl.constexpr,
    PAD: tl.constexpr,
    PAD_ROPE: tl.constexpr,
    DOT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAPPED: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Grid (T * head tiles, SPLITS). `selected_ptr` int32 [T, K] holds positions in the
    token's request; what lies outside of its context is no state."""
    head_tiles: tl.constexpr = (HEADS + BLOCK_M - 1) // BLOCK_M
    of_token = tl.program_id(0) // head_tiles
    request = request_of_token(starts_ptr, of_token, num_reqs)
    if of_token >= tl.load(starts_ptr + request + 1):
        return
    context = tl.load(lens_ptr + request)
    head = tl.program_id(0) % head_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    used = head < HEADS
    token = of_token.to(tl.int64) + head * 0
    at = token * query_token_stride + head * query_head_stride
    q = load_query(query_ptr, at, used, 0, LORA, PAD).to(DOT)
    q_rope = load_query(query_ptr, at, used, LORA, C.D - LORA, PAD_ROPE).to(DOT)
    tiles = tl.cdiv(tl.cdiv(num_selected, BLOCK_N), SPLITS)
    origin = tl.program_id(1) * tiles * BLOCK_N
    stop = tl.minimum(num_selected, origin + tiles * BLOCK_N)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    sums = tl.zeros((BLOCK_M, PAD), tl.float32)
    row_of_table = table_ptr + request.to(tl.int64) * table_stride
    row_selected = selected_ptr + of_token.to(tl.int64) * selected_stride
    for tile_start in range(origin, stop, BLOCK_N):
        i = tile_start + tl.arange(0, BLOCK_N)
        chosen = tl.load(row_selected + i, mask=i < stop, other=-1)
        stored = (chosen >= 0) & (chosen < context)
        chosen = tl.where(stored, chosen, 0)
        block = tl.load(row_of_table + chosen // P.PAGE, mask=stored, other=0)
        cells = cells_in(pages_ptr, block, chosen % P.PAGE, request * 0, P)
        top, total, sums = attend_latents(
            q,
            q_rope,
            cells,
            stored,
            stored[None, :] & used[:, None],
            top,
            total,
            sums,
            score_scale,
            soft_cap,
            C,
            P.ALIGN,
            LORA,
            CAPPED,
            DOT,
        )
    store_latents_of(
        out_ptr,
        sums_ptr,
        stats_ptr,
        out_token_stride,
        out_head_stride,
        token,
        head,
        used,
        top,
        total,
        sums * value_scale,
        HEADS,
        LORA,
        SPLITS,
    )
