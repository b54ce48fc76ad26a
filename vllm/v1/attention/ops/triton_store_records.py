"""Stores DeepSeek's latent records: fp8_ds_mla and nvfp4_ds_mla.

See `kv_formats.ds_mla` for the mathematics: each line here is one there.
"""

import triton
import triton.language as tl

from vllm.v1.attention.ops.triton_numbers import (
    e2m1_encode,
    e4m3_decode,
    e4m3_encode,
    finite,
    pack_nibbles,
    saturate,
)
from vllm.v1.attention.ops.triton_places import (
    cells_at,
    load_vectors,
    rows_of,
    store_bytes,
    store_elements,
)
from vllm.v1.kv_formats.casts import E2M1_MAX, E4M3_MAX, INPUT_LIMIT
from vllm.v1.kv_formats.ds_mla import MIN_NVFP4_SCALE, MIN_STEP

_INPUT_LIMIT = tl.constexpr(INPUT_LIMIT)
_E4M3_MAX = tl.constexpr(E4M3_MAX)
_E2M1_MAX = tl.constexpr(E2M1_MAX)
_MIN_STEP = tl.constexpr(MIN_STEP)
_MIN_NVFP4_SCALE = tl.constexpr(MIN_NVFP4_SCALE)


@triton.jit
def store_records_kernel(
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
    COLUMNS: tl.constexpr,
):
    """Grid (row tiles, 1). NOPE_COUNT and ROPE_COUNT are powers of two.

    Scales of e2m1 records are stored by column of a table of COLUMNS columns.
    """
    rows = rows_of(slots_ptr, num_tokens, P, ROWS)
    written = rows[4]
    cells = cells_at(pages_ptr, rows, P.NOPE)
    x = load_vectors(
        key_ptr, key_token_stride, key_head_stride, rows, 0, C.NOPE_COUNT, C.NOPE_COUNT
    )
    TILES: tl.constexpr = C.NOPE_SCALE_COUNT
    TILE: tl.constexpr = C.NOPE_COUNT // TILES
    tiles = tl.reshape(finite(x, _INPUT_LIMIT), [ROWS, TILES, TILE])
    amax = tl.max(tl.abs(tiles), 2)
    at, scales_at = cells + C.NOPE_OFFSET, cells + C.NOPE_SCALE_OFFSET
    if C.NOPE_DTYPE == "e4m3":
        step = tl.maximum(tl.div_rn(amax, _E4M3_MAX), _MIN_STEP)
        codes = e4m3_encode(tl.div_rn(tiles, step[:, :, None]))
        codes = tl.reshape(codes, [ROWS, C.NOPE_COUNT])
        store_bytes(at, codes, written, C.NOPE_BYTES, C.NOPE_BYTES, 1)
        store_elements(scales_at, step, written, TILES, TILES)
    else:
        tl.static_assert(C.NOPE_DTYPE == "e2m1")
        scale = tl.maximum(tl.div_rn(amax, _E2M1_MAX), _MIN_NVFP4_SCALE)
        scale = e4m3_encode(scale)
        inverse = tl.div_rn(1.0, e4m3_decode(scale))
        codes = e2m1_encode(tiles * inverse[:, :, None])
        codes = tl.reshape(codes, [ROWS, C.NOPE_COUNT])
        bytes = pack_nibbles(codes, ROWS, C.NOPE_COUNT)
        store_bytes(at, bytes, written, C.NOPE_BYTES, C.NOPE_BYTES, 1)
        table = tl.reshape(scale, [ROWS, TILES // COLUMNS, COLUMNS])
        by_column = tl.reshape(tl.trans(table, 0, 2, 1), [ROWS, TILES])
        store_bytes(scales_at, by_column, written, TILES, TILES, 1)
    rope = load_vectors(
        key_ptr,
        key_token_stride,
        key_head_stride,
        rows,
        C.NOPE_COUNT,
        C.ROPE_COUNT,
        C.ROPE_COUNT,
    )
    at = cells + C.ROPE_OFFSET
    if C.ROPE_DTYPE == "bf16":
        rope = saturate(rope, tl.bfloat16)
        store_elements(at, rope, written, C.ROPE_COUNT, C.ROPE_COUNT)
    else:
        tl.static_assert(C.ROPE_DTYPE == "e4m3")
        codes = e4m3_encode(rope.to(tl.float32))
        store_bytes(at, codes, written, C.ROPE_BYTES, C.ROPE_BYTES, 1)
