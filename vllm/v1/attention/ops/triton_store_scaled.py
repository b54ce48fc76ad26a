"""Stores int8, fp8 or rotated 4-bit codes with one float32 scale per token and head.

See `kv_formats.per_token_head` for the mathematics: each line here is one there.
"""

import triton
import triton.language as tl

from vllm.v1.attention.ops.triton_numbers import (
    e4m3_encode,
    finite,
    hadamard,
    pack_nibbles,
    round_half_away,
    saturate,
)
from vllm.v1.attention.ops.triton_places import (
    cells_at,
    load_vectors,
    rows_of,
    store_bytes,
    store_word,
)
from vllm.v1.kv_formats.casts import E4M3_MAX, INPUT_LIMIT
from vllm.v1.kv_formats.per_token_head import MIN_SCALE, Int4PerTokenHead

_INPUT_LIMIT = tl.constexpr(INPUT_LIMIT)
_ROTATED_LIMIT = tl.constexpr(Int4PerTokenHead.input_limit)
_E4M3_MAX = tl.constexpr(E4M3_MAX)
_MIN_SCALE = tl.constexpr(MIN_SCALE)


@triton.jit
def _rotated(
    x,
    signs_ptr,
    COUNT: tl.constexpr,
    ROTATION: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The randomised Hadamard transform in blocks of ROTATION, in the model's dtype."""
    i = tl.arange(0, WIDTH)
    signs = tl.load(signs_ptr + i, mask=i < COUNT, other=0.0)
    y = hadamard(finite(x, _ROTATED_LIMIT) * signs[None, :], ROWS, WIDTH, ROTATION)
    return saturate(y, x.dtype).to(tl.float32)


@triton.jit
def _codes_with_zero_point(y):
    """4-bit codes (uint8) and scale words of float32 rows; the low bits of a word are
    the zero point."""
    low = tl.minimum(tl.min(y, 1), 0.0)
    high = tl.maximum(tl.max(y, 1), 0.0)
    scale = tl.maximum(tl.div_rn(high - low, 15.0), _MIN_SCALE)
    zero = tl.minimum(round_half_away(tl.div_rn(-low, scale)), 15.0)
    scaled = y * tl.div_rn(1.0, scale)[:, None]
    codes = round_half_away(scaled + zero[:, None])
    codes = tl.minimum(tl.maximum(codes, 0.0), 15.0).to(tl.uint8)
    word = (scale.to(tl.int32, bitcast=True) & -16) | zero.to(tl.int32)
    return codes, word.to(tl.float32, bitcast=True)


@triton.jit
def _store_vectors(
    cells,
    x,
    signs_ptr,
    written,
    DTYPE: tl.constexpr,
    COUNT: tl.constexpr,
    BYTES: tl.constexpr,
    OFFSET: tl.constexpr,
    SCALE_OFFSET: tl.constexpr,
    ALIGN: tl.constexpr,
    ROTATION: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Codes and scales of vectors x [ROWS, WIDTH], in the model's dtype, to cells."""
    at = cells + OFFSET
    if DTYPE == "u4":
        y = _rotated(x, signs_ptr, COUNT, ROTATION, ROWS, WIDTH)
        codes, scale = _codes_with_zero_point(y)
        store_bytes(at, pack_nibbles(codes, ROWS, WIDTH), written, BYTES, WIDTH // 2, 1)
    elif DTYPE == "i8":
        x = finite(x, _INPUT_LIMIT)
        scale = tl.maximum(tl.div_rn(tl.max(tl.abs(x), 1), 127.0), _MIN_SCALE)
        scaled = round_half_away(x * tl.div_rn(1.0, scale)[:, None])
        codes = tl.minimum(tl.maximum(scaled, -128.0), 127.0).to(tl.int8)
        store_bytes(at, codes.to(tl.uint8, bitcast=True), written, BYTES, WIDTH, 1)
    else:
        tl.static_assert(DTYPE == "e4m3")
        x = finite(x, _INPUT_LIMIT)
        scale = tl.maximum(tl.div_rn(tl.max(tl.abs(x), 1), _E4M3_MAX), _MIN_SCALE)
        codes = e4m3_encode(x * tl.div_rn(1.0, scale)[:, None])
        store_bytes(at, codes, written, BYTES, WIDTH, 1)
    store_word(cells, scale, written, SCALE_OFFSET, ALIGN)


@triton.jit
def store_scaled_kernel(
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
    ROTATION: tl.constexpr,
    ROTATION_V: tl.constexpr,
):
    """Grid (row tiles, 2): keys, then values; (row tiles, 1) for latents, whose word
    for the scale of V holds 0. Tables are the signs of the rotation."""
    rows = rows_of(slots_ptr, num_tokens, P, ROWS)
    written = rows[4]
    if tl.program_id(1) == 0:
        x = load_vectors(
            key_ptr, key_token_stride, key_head_stride, rows, 0, C.K_COUNT, WIDTH
        )
        cells = cells_at(pages_ptr, rows, P.K)
        _store_vectors(
            cells,
            x,
            k_table_ptr,
            written,
            C.K_DTYPE,
            C.K_COUNT,
            C.K_BYTES,
            C.K_OFFSET,
            C.K_SCALE_OFFSET,
            P.ALIGN,
            ROTATION,
            ROWS,
            WIDTH,
        )
        if C.V_COUNT == 0:
            cells = cells_at(pages_ptr, rows, P.V_SCALE)
            nothing = tl.zeros((ROWS,), tl.float32)
            store_word(cells, nothing, written, C.V_SCALE_OFFSET, P.ALIGN)
    elif C.V_COUNT > 0:
        x = load_vectors(
            value_ptr,
            value_token_stride,
            value_head_stride,
            rows,
            0,
            C.V_COUNT,
            WIDTH_V,
        )
        cells = cells_at(pages_ptr, rows, P.V)
        _store_vectors(
            cells,
            x,
            v_table_ptr,
            written,
            C.V_DTYPE,
            C.V_COUNT,
            C.V_BYTES,
            C.V_OFFSET,
            C.V_SCALE_OFFSET,
            P.ALIGN,
            ROTATION_V,
            ROWS,
            WIDTH_V,
        )
