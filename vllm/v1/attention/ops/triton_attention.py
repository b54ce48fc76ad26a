"""Attention over packed pages in Triton: prefill, decode, and any mix of them.

One kernel for all formats that hold a K and a V per head; `triton_loaders` reads the
cells. Knows batches, grids and tiles. Refuses to know a format's bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm.v1.attention.ops.triton_loaders import load_key, load_value
from vllm.v1.attention.ops.triton_softmax import (
    add_weighted,
    cells_at,
    reach_of,
    request_of_tile,
    seen_by,
    softmax_step,
    tanh,
)

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def paged_attention_kernel(
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
    codebook_ptr,
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
    GROUP: tl.constexpr,
    PAD: tl.constexpr,
    PAD_V: tl.constexpr,
    DOT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    ONE_QUERY: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    CAUSAL: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Grid (tiles of BLOCK_Q queries, KV heads, SPLITS); a tile's rows are BLOCK_Q
    queries times the GROUP heads that share a KV head. With ONE_QUERY, BLOCK_Q is 1 and
    no request has more. `score_scale` and `soft_cap` include log2 e.

    CAUSAL and WINDOW are those of `reach_of`. With SPLITS > 1 partial sums go to
    `sums_ptr` and `stats_ptr`, as `merge_splits_kernel` takes them.
    """
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    if ONE_QUERY:
        request, first_query = tile, 0
    else:
        request, first_query = request_of_tile(starts_ptr, tile, num_reqs, BLOCK_Q)
    start = tl.load(starts_ptr + request)
    num_queries = tl.load(starts_ptr + request + 1) - start
    if first_query >= num_queries:
        return
    context = tl.load(lens_ptr + request)
    row = tl.arange(0, BLOCK_M)
    query = first_query + row // GROUP
    head = kv_head * GROUP + row % GROUP
    used = (row < BLOCK_Q * GROUP) & (query < num_queries)
    token = (start + query).to(tl.int64)
    d = tl.arange(0, PAD)
    q = tl.load(
        query_ptr
        + (token * query_token_stride + head * query_head_stride)[:, None]
        + d[None, :],
        mask=used[:, None] & (d < C.D)[None, :],
        other=0.0,
    ).to(DOT)
    position = context - num_queries + query
    first = context - num_queries + first_query
    last = context - num_queries + tl.minimum(first_query + BLOCK_Q, num_queries) - 1
    split = tl.program_id(2)
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
    if SINKS and (SPLITS == 1 or split == 0):
        top = tl.load(sinks_ptr + head, mask=used, other=0.0).to(tl.float32) * LOG2_E
        total += 1.0
    sums = tl.zeros((BLOCK_M, PAD_V), tl.float32)
    for tile_start in range(origin, stop, BLOCK_N):
        keys_at = tile_start + tl.arange(0, BLOCK_N)
        stored = (keys_at >= begin) & (keys_at < stop)
        row_of_table = table_ptr + request.to(tl.int64) * table_stride
        cells = cells_at(
            pages_ptr, row_of_table, tile_start, stored, kv_head, P, BLOCK_N
        )
        keys, factor = load_key(cells, stored, codebook_ptr, C, P.ALIGN, PAD, DOT)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * score_scale
        if C.FAMILY != "plain":
            scores *= factor[None, :]
        if CAPPED:
            scores = tanh(scores / soft_cap) * soft_cap
        seen = seen_by(position, used, keys_at, stored, causal, WINDOW, CAUSAL)
        scores = tl.where(seen, scores, float("-inf"))
        weights, kept, top, total = softmax_step(scores, top, total)
        values, factor, shift = load_value(cells, stored, C, P.ALIGN, PAD_V, DOT)
        sums *= kept[:, None]
        sums = add_weighted(sums, weights, values, factor, C.FAMILY != "plain", DOT)
        if C.FAMILY == "turboquant":
            sums += tl.sum(weights * shift[None, :], axis=1)[:, None]

    sums *= value_scale
    dv = tl.arange(0, PAD_V)
    inside = used[:, None] & (dv < C.DV)[None, :]
    if SPLITS == 1:
        result = sums / tl.where(total > 0.0, total, 1.0)[:, None]
        at = out_ptr + (token * out_token_stride + head * out_head_stride)[:, None]
        tl.store(at + dv[None, :], result.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        heads = tl.num_programs(1) * GROUP
        part = (token * heads + head) * SPLITS + split
        tl.store(stats_ptr + part * 2, top, mask=used)
        tl.store(stats_ptr + part * 2 + 1, total, mask=used)
        at = sums_ptr + part[:, None] * C.DV + dv[None, :]
        tl.store(at, sums, mask=inside & (total > 0.0)[:, None])
