"""Where the fields of a state lie in a page: device functions for kernels that store.

`C` holds a format's table by its names, `P` the strides of one layer's pages, field by
field (see `triton_store`). A program handles ROWS rows, one per (token, KV head).
"""

import triton
import triton.language as tl


@triton.jit
def rows_of(slots_ptr, num_tokens, P: tl.constexpr, ROWS: tl.constexpr):
    """(token, head, block, state, written) of this program's rows, [ROWS] each.

    Rows past the last token and slots of -1 are not written.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = row // P.HEADS
    head = row - token * P.HEADS
    inside = token < num_tokens
    slot = tl.load(slots_ptr + token, mask=inside, other=-1)
    written = inside & (slot >= 0)
    slot = tl.where(written, slot, 0).to(tl.int32)
    block = slot // P.PAGE
    state = slot - block * P.PAGE
    # A cache with heads or states outermost reaches beyond 31 bits.
    token, head = token.to(tl.int64), head.to(tl.int64)
    return token, head, block.to(tl.int64), state.to(tl.int64), written


@triton.jit
def load_vectors(
    x_ptr,
    token_stride,
    head_stride,
    rows,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Elements FIRST to FIRST + COUNT of the rows' vectors: [ROWS, WIDTH], then 0."""
    token, head, _block, _state, written = rows
    i = tl.arange(0, WIDTH)
    at = x_ptr + (token * token_stride + head * head_stride + FIRST)[:, None]
    inside = written[:, None] & (i < COUNT)[None, :]
    return tl.load(at + i[None, :], mask=inside, other=0.0)


@triton.jit
def cells_at(pages_ptr, rows, F: tl.constexpr):
    """Byte pointers [ROWS] to the rows' records in the plane of a field `F` of `P`."""
    _token, head, block, state, _written = rows
    return pages_ptr + (block * F.BLOCK + head * F.HEAD + state * F.STATE + F.START)


@triton.jit
def interleaved_cells_at(pages_ptr, rows, F: tl.constexpr, INTERLEAVE: tl.constexpr):
    """The same in a plane in which the bytes of INTERLEAVE states alternate."""
    _token, head, block, state, _written = rows
    group, lane = state // INTERLEAVE, state % INTERLEAVE
    place = block * F.BLOCK + head * F.HEAD + group * F.STATE + lane * F.LANE
    return pages_ptr + (place + F.START)


@triton.jit
def store_bytes(
    at, bytes, written, COUNT: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr
):
    """COUNT of the bytes [ROWS, WIDTH] to pointers `at` [ROWS], STEP apart."""
    i = tl.arange(0, WIDTH)
    inside = written[:, None] & (i < COUNT)[None, :]
    tl.store(at[:, None] + (i * STEP)[None, :], bytes, mask=inside)


@triton.jit
def store_elements(at, values, written, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    """COUNT of the values [ROWS, WIDTH] to byte pointers that are aligned for them."""
    i = tl.arange(0, WIDTH)
    inside = written[:, None] & (i < COUNT)[None, :]
    typed = at.to(tl.pointer_type(values.dtype))
    tl.store(typed[:, None] + i[None, :], values, mask=inside)


@triton.jit
def store_word(at, value, written, OFFSET: tl.constexpr, ALIGN: tl.constexpr):
    """One float32 per row at OFFSET of cells that are aligned to ALIGN bytes."""
    bits = value.to(tl.int32, bitcast=True)
    if ALIGN % 4 == 0 and OFFSET % 4 == 0:
        tl.store((at + OFFSET).to(tl.pointer_type(tl.int32)), bits, mask=written)
    else:
        i = tl.arange(0, 4)
        bytes = (bits[:, None] >> (8 * i)[None, :]).to(tl.uint8)
        store_bytes(at + OFFSET, bytes, written, 4, 4, 1)


@triton.jit
def store_half(at, value, written, OFFSET: tl.constexpr, ALIGN: tl.constexpr):
    """One float16 per row at OFFSET of cells that are aligned to ALIGN bytes."""
    bits = value.to(tl.int16, bitcast=True)
    if ALIGN % 2 == 0 and OFFSET % 2 == 0:
        tl.store((at + OFFSET).to(tl.pointer_type(tl.int16)), bits, mask=written)
    else:
        i = tl.arange(0, 2)
        bytes = (bits[:, None] >> (8 * i)[None, :]).to(tl.uint8)
        store_bytes(at + OFFSET, bytes, written, 2, 2, 1)
