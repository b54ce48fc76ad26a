"""Stores K and V element by element: dense formats and fp8 with a scale per layer."""

import triton
import triton.language as tl

from vllm.v1.attention.ops.triton_numbers import e4m3_encode, e5m2_encode, saturate
from vllm.v1.attention.ops.triton_places import (
    cells_at,
    load_vectors,
    rows_of,
    store_bytes,
    store_elements,
)


@triton.jit
def _store_vectors(
    cells,
    x,
    scale,
    written,
    DTYPE: tl.constexpr,
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    if DTYPE == "e4m3":
        codes = e4m3_encode(tl.div_rn(x.to(tl.float32), scale))
        store_bytes(cells, codes, written, COUNT, WIDTH, 1)
    elif DTYPE == "e5m2":
        codes = e5m2_encode(tl.div_rn(x.to(tl.float32), scale))
        store_bytes(cells, codes, written, COUNT, WIDTH, 1)
    elif DTYPE == "f16":
        store_elements(cells, saturate(x, tl.float16), written, COUNT, WIDTH)
    elif DTYPE == "bf16":
        store_elements(cells, saturate(x, tl.bfloat16), written, COUNT, WIDTH)
    else:
        tl.static_assert(DTYPE == "f32")
        store_elements(cells, x.to(tl.float32), written, COUNT, WIDTH)


@triton.jit
def store_plain_kernel(
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
):
    """Grid (row tiles, 2): keys, then values; (row tiles, 1) for latents."""
    rows = rows_of(slots_ptr, num_tokens, P, ROWS)
    written = rows[4]
    if tl.program_id(1) == 0:
        x = load_vectors(
            key_ptr, key_token_stride, key_head_stride, rows, 0, C.K_COUNT, WIDTH
        )
        cells = cells_at(pages_ptr, rows, P.K)
        at = cells + C.K_OFFSET
        _store_vectors(at, x, k_scale, written, C.K_DTYPE, C.K_COUNT, WIDTH)
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
        at = cells + C.V_OFFSET
        _store_vectors(at, x, v_scale, written, C.V_DTYPE, C.V_COUNT, WIDTH_V)
