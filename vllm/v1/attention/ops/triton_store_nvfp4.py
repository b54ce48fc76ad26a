"""Stores NVFP4: e2m1 codes in groups of 16 with an e4m3 scale per group.

Both arrangements of the V scales, whichever strides the page's planes have. See
`kv_formats.nvfp4` for the mathematics: each line here is one there.
"""

import triton
import triton.language as tl

from vllm.v1.attention.ops.triton_numbers import (
    e2m1_decode,
    e2m1_encode,
    e4m3_decode,
    e4m3_encode,
    finite,
    pack_nibbles,
    sum_of_16,
)
from vllm.v1.attention.ops.triton_places import (
    cells_at,
    interleaved_cells_at,
    load_vectors,
    rows_of,
    store_bytes,
)
from vllm.v1.kv_formats.nvfp4 import GROUP, INPUT_LIMIT

_GROUP = tl.constexpr(GROUP)
_INPUT_LIMIT = tl.constexpr(INPUT_LIMIT)


@triton.jit
def _quantized(groups, global_scale, DENOMINATOR: tl.constexpr):
    """Codes (uint8) [R, G, 16], scale codes (uint8) [R, G] and their steps."""
    INVERSE: tl.constexpr = 1.0 / DENOMINATOR
    amax = tl.max(tl.abs(groups), 2)
    scale = e4m3_encode(tl.div_rn(amax * INVERSE, global_scale))
    step = e4m3_decode(scale) * global_scale
    inverse = tl.where(step > 0, tl.div_rn(1.0, step), 0.0)
    return e2m1_encode(groups * inverse[:, :, None]), scale, step


@triton.jit
def _error(groups, codes, step, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """Squared error [R, G] of the decoded groups."""
    difference = e2m1_decode(codes) * step[:, :, None] - groups
    flat = tl.reshape(difference * difference, [ROWS * GROUPS, _GROUP])
    return tl.reshape(sum_of_16(flat, ROWS * GROUPS), [ROWS, GROUPS])


@triton.jit
def _best(
    x, global_scale, TRY_FOUR: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    """Packed codes [R, WIDTH / 2] and scales [R, WIDTH / 16] of vectors [R, WIDTH].

    TRY_FOUR: the scale for 4 as the largest code is kept where its error is smaller.
    """
    GROUPS: tl.constexpr = WIDTH // _GROUP
    groups = tl.reshape(finite(x, _INPUT_LIMIT), [ROWS, GROUPS, _GROUP])
    codes, scale, step = _quantized(groups, global_scale, 6.0)
    if TRY_FOUR:
        other, other_scale, other_step = _quantized(groups, global_scale, 4.0)
        error = _error(groups, codes, step, ROWS, GROUPS)
        better = _error(groups, other, other_step, ROWS, GROUPS) < error
        codes = tl.where(better[:, :, None], other, codes)
        scale = tl.where(better, other_scale, scale)
    return pack_nibbles(tl.reshape(codes, [ROWS, WIDTH]), ROWS, WIDTH), scale


@triton.jit
def store_nvfp4_kernel(
    key_ptr,
    value_ptr,
    slots_ptr,
    pages_ptr,
    k_table_ptr,
    v_table_ptr,
    k_scale,
    v_scale,
    num_tokens,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    C: tl.constexpr,
    P: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_V: tl.constexpr,
    TRY_FOUR: tl.constexpr,
):
    """Grid (row tiles, 2): keys, then values. K and V have a head slot each."""
    rows = rows_of(slots_ptr, num_tokens, P, ROWS)
    written = rows[4]
    if tl.program_id(1) == 0:
        x = load_vectors(
            key_ptr, key_token_stride, key_head_stride, rows, 0, C.K_CODES_COUNT, WIDTH
        )
        bytes, scales = _best(x, k_scale, TRY_FOUR, ROWS, WIDTH)
        cells = cells_at(pages_ptr, rows, P.K_CODES)
        store_bytes(cells, bytes, written, C.K_CODES_BYTES, WIDTH // 2, 1)
        cells = cells_at(pages_ptr, rows, P.K_SCALES)
        store_bytes(cells, scales, written, C.K_SCALES_BYTES, WIDTH // _GROUP, 1)
    else:
        x = load_vectors(
            value_ptr,
            value_token_stride,
            value_head_stride,
            rows,
            0,
            C.V_CODES_COUNT,
            WIDTH_V,
        )
        bytes, scales = _best(x, v_scale, TRY_FOUR, ROWS, WIDTH_V)
        cells = cells_at(pages_ptr, rows, P.V_CODES)
        store_bytes(cells, bytes, written, C.V_CODES_BYTES, WIDTH_V // 2, 1)
        step: tl.constexpr = C.V_SCALES_INTERLEAVE
        cells = interleaved_cells_at(pages_ptr, rows, P.V_SCALES, step)
        GROUPS: tl.constexpr = WIDTH_V // _GROUP
        store_bytes(cells, scales, written, C.V_SCALES_BYTES, GROUPS, P.V_SCALES.BYTE)
