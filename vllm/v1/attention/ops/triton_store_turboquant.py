"""Stores TurboQuant states: rotated codebook indices with a norm, uniform value codes.

See `kv_formats.turboquant` for the mathematics: each line here is one there, but for
the order in which the squares of a key are summed.
"""

import triton
import triton.language as tl

from vllm.v1.attention.ops.triton_numbers import (
    e4m3_encode,
    finite,
    hadamard,
    pack_nibbles,
    saturate,
    words_of_3_bits,
)
from vllm.v1.attention.ops.triton_places import (
    cells_at,
    load_vectors,
    rows_of,
    store_bytes,
    store_half,
)
from vllm.v1.kv_formats.turboquant import (
    FLOAT16_MAX,
    KEY_LIMIT,
    MIN_STEP,
    NORM_EPSILON,
)

_KEY_LIMIT = tl.constexpr(KEY_LIMIT)
_EPSILON = tl.constexpr(NORM_EPSILON)
_FLOAT16_MAX = tl.constexpr(FLOAT16_MAX)
_MIN_STEP = tl.constexpr(MIN_STEP)


@triton.jit
def _store_codes(
    at,
    codes,
    written,
    DTYPE: tl.constexpr,
    BYTES: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Packs 3- or 4-bit codes (uint8) [ROWS, WIDTH], low bits first."""
    if DTYPE == "u4":
        store_bytes(at, pack_nibbles(codes, ROWS, WIDTH), written, BYTES, WIDTH // 2, 1)
    else:
        tl.static_assert(DTYPE == "u3")
        words = words_of_3_bits(codes, ROWS, WIDTH)
        for i in tl.static_range(3):
            byte = (words >> (8 * i)).to(tl.uint8)
            # Byte i of word w is byte 3w + i of the field.
            store_bytes(at + i, byte, written, (BYTES + 2 - i) // 3, WIDTH // 8, 3)


@triton.jit
def _key_codes(
    x,
    bounds_ptr,
    root,
    DTYPE: tl.constexpr,
    COUNT: tl.constexpr,
    ROTATION: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Indices (uint8) of the nearest centroids of the rotated directions, and norms.

    An index counts the bounds that are not above a coordinate. `root` is the factor
    that makes the rotation orthonormal.
    """
    x = finite(x, _KEY_LIMIT)
    norm = tl.sqrt_rn(tl.sum(x * x, 1))
    y = hadamard(tl.div_rn(x, (norm + _EPSILON)[:, None]), ROWS, WIDTH, ROTATION)
    y = y * root
    BOUNDS: tl.constexpr = 15 if DTYPE == "u4" else 7
    codes = tl.zeros((ROWS, WIDTH), tl.int32)
    for i in tl.static_range(BOUNDS):
        codes += (y >= tl.load(bounds_ptr + i)).to(tl.int32)
    codes = tl.where((tl.arange(0, WIDTH) < COUNT)[None, :], codes, 0)
    return codes.to(tl.uint8), norm


@triton.jit
def _value_codes(x, DTYPE: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    """Uniform codes (uint8) between the smallest and largest value; step, smallest."""
    top: tl.constexpr = 15.0 if DTYPE == "u4" else 7.0
    x = finite(x, _FLOAT16_MAX)
    inside = (tl.arange(0, WIDTH) < COUNT)[None, :]
    low = tl.min(tl.where(inside, x, float("inf")), 1)
    high = tl.max(tl.where(inside, x, -float("inf")), 1)
    step = tl.maximum(tl.div_rn(high - low, top), _MIN_STEP)
    codes = tl.floor(tl.div_rn(x - low[:, None], step[:, None]) + 0.5)
    codes = tl.minimum(tl.maximum(codes, 0.0), top)
    return tl.where(inside, codes, 0.0).to(tl.uint8), step, low


@triton.jit
def store_turboquant_kernel(
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
):
    """Grid (row tiles, 2): keys, then values. `k_table_ptr` holds the bounds between
    centroids, `k_scale` the factor of the rotation."""
    rows = rows_of(slots_ptr, num_tokens, P, ROWS)
    written = rows[4]
    if tl.program_id(1) == 0:
        x = load_vectors(
            key_ptr, key_token_stride, key_head_stride, rows, 0, C.K_CODES_COUNT, WIDTH
        )
        cells = cells_at(pages_ptr, rows, P.K_CODES)
        at = cells + C.K_CODES_OFFSET
        if C.K_CODES_DTYPE == "e4m3":
            codes = e4m3_encode(finite(x, _KEY_LIMIT))
            store_bytes(at, codes, written, C.K_CODES_BYTES, WIDTH, 1)
        else:
            codes, norm = _key_codes(
                x,
                k_table_ptr,
                k_scale,
                C.K_CODES_DTYPE,
                C.K_CODES_COUNT,
                ROTATION,
                ROWS,
                WIDTH,
            )
            _store_codes(
                at, codes, written, C.K_CODES_DTYPE, C.K_CODES_BYTES, ROWS, WIDTH
            )
            norm = saturate(norm, tl.float16)
            store_half(cells, norm, written, C.K_NORM_OFFSET, P.ALIGN)
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
        cells = cells_at(pages_ptr, rows, P.V_CODES)
        codes, step, low = _value_codes(x, C.V_CODES_DTYPE, C.V_CODES_COUNT, WIDTH_V)
        _store_codes(
            cells + C.V_CODES_OFFSET,
            codes,
            written,
            C.V_CODES_DTYPE,
            C.V_CODES_BYTES,
            ROWS,
            WIDTH_V,
        )
        step, low = saturate(step, tl.float16), saturate(low, tl.float16)
        store_half(cells, step, written, C.V_SCALE_OFFSET, P.ALIGN)
        store_half(cells, low, written, C.V_ZERO_OFFSET, P.ALIGN)
