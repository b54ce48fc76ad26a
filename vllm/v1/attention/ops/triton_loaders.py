"""From the bytes of cells to tiles of numbers, one loader per family of formats.

Loaders take pointers to N cells and a mask; what is masked is never read and counts as
0. Every number comes from the format's table, by name (`C`). A tile of keys or values
comes with a factor per state, so that codes enter the dot product exactly.
"""

import triton
import triton.language as tl

from vllm.v1.attention.ops.triton_numbers import (
    e2m1_decode,
    e4m3_decode,
    e5m2_decode,
)

# --- words --------------------------------------------------------------------------


@triton.jit
def load_f32(cells, mask, OFFSET: tl.constexpr, ALIGN: tl.constexpr):
    """float32 words [N] at OFFSET of cells that are aligned to ALIGN bytes."""
    at = cells + OFFSET
    if ALIGN % 4 == 0 and OFFSET % 4 == 0:
        return tl.load(at.to(tl.pointer_type(tl.float32)), mask=mask, other=0.0)
    else:
        word = tl.load(at, mask=mask, other=0).to(tl.uint32)
        for i in tl.static_range(1, 4):
            byte = tl.load(at + i, mask=mask, other=0).to(tl.uint32)
            word |= byte << (8 * i)
        return word.to(tl.float32, bitcast=True)


@triton.jit
def load_f16(cells, mask, OFFSET: tl.constexpr, ALIGN: tl.constexpr):
    """float16 words [N] at OFFSET of cells, as float32."""
    at = cells + OFFSET
    if ALIGN % 2 == 0 and OFFSET % 2 == 0:
        pointer = at.to(tl.pointer_type(tl.float16))
        return tl.load(pointer, mask=mask, other=0.0).to(tl.float32)
    else:
        low = tl.load(at, mask=mask, other=0).to(tl.uint16)
        high = tl.load(at + 1, mask=mask, other=0).to(tl.uint16)
        return (low | (high << 8)).to(tl.float16, bitcast=True).to(tl.float32)


# --- codes --------------------------------------------------------------------------


@triton.jit
def load_bytes(at, mask, COUNT: tl.constexpr, PAD: tl.constexpr):
    """Bytes [N, PAD] at pointers `at` [N]; zeros from COUNT on."""
    i = tl.arange(0, PAD)
    if COUNT == PAD:
        return tl.load(at[:, None] + i[None, :], mask=mask[:, None], other=0)
    else:
        inside = mask[:, None] & (i < COUNT)[None, :]
        return tl.load(at[:, None] + i[None, :], mask=inside, other=0)


@triton.jit
def load_nibbles(at, mask, BYTES: tl.constexpr, PAD: tl.constexpr):
    """4-bit codes [N, PAD] as uint8, low nibbles first."""
    pairs = load_bytes(at, mask, BYTES, PAD // 2)
    return tl.reshape(tl.join(pairs & 15, pairs >> 4), (at.shape[0], PAD))


@triton.jit
def load_triplets(at, mask, BYTES: tl.constexpr, PAD: tl.constexpr):
    """3-bit codes [N, PAD] as int32: words of 3 bytes hold 8 codes, low bits first."""
    word = tl.arange(0, PAD // 8) * 3
    bits = tl.zeros((at.shape[0], PAD // 8), tl.int32)
    for i in tl.static_range(3):
        inside = mask[:, None] & (word + i < BYTES)[None, :]
        byte = tl.load(at[:, None] + (word + i)[None, :], mask=inside, other=0)
        bits |= byte.to(tl.int32) << (8 * i)
    codes = (bits[:, :, None] >> (tl.arange(0, 8) * 3)[None, None, :]) & 7
    return tl.reshape(codes, (at.shape[0], PAD))


@triton.jit
def load_codes(at, mask, DTYPE: tl.constexpr, BYTES: tl.constexpr, PAD: tl.constexpr):
    """Whole-number codes [N, PAD] of packed fields of BYTES bytes."""
    if DTYPE == "u4":
        return load_nibbles(at, mask, BYTES, PAD)
    else:
        tl.static_assert(DTYPE == "u3")
        return load_triplets(at, mask, BYTES, PAD)


@triton.jit
def load_floats(
    at,
    mask,
    DTYPE: tl.constexpr,
    COUNT: tl.constexpr,
    PAD: tl.constexpr,
    DOT: tl.constexpr,
):
    """COUNT numbers [N, PAD] in type DOT; a 16-bit float field is aligned to itself."""
    if DTYPE == "e4m3":
        return e4m3_decode(load_bytes(at, mask, COUNT, PAD)).to(DOT)
    elif DTYPE == "e5m2":
        return e5m2_decode(load_bytes(at, mask, COUNT, PAD)).to(DOT)
    elif DTYPE == "i8":
        codes = load_bytes(at, mask, COUNT, PAD).to(tl.int8, bitcast=True)
        return codes.to(tl.float32).to(DOT)
    elif DTYPE == "e2m1":
        return e2m1_decode(load_nibbles(at, mask, COUNT // 2, PAD)).to(DOT)
    elif DTYPE == "f32":
        return load_bytes(at.to(tl.pointer_type(tl.float32)), mask, COUNT, PAD).to(DOT)
    elif DTYPE == "f16":
        return load_bytes(at.to(tl.pointer_type(tl.float16)), mask, COUNT, PAD).to(DOT)
    else:
        tl.static_assert(DTYPE == "bf16")
        return load_bytes(at.to(tl.pointer_type(tl.bfloat16)), mask, COUNT, PAD).to(DOT)


# --- keys and values ----------------------------------------------------------------


@triton.jit
def without_zero_point(codes, word, COUNT: tl.constexpr, PAD: tl.constexpr):
    """float32 codes [N, PAD] less the zero points in the 4 lowest bits of the scale
    words [N], and the scales without those bits."""
    bits = word.to(tl.int32, bitcast=True)
    shifted = codes.to(tl.float32) - (bits & 15).to(tl.float32)[:, None]
    if COUNT != PAD:
        shifted = tl.where((tl.arange(0, PAD) < COUNT)[None, :], shifted, 0.0)
    return shifted, (bits & -16).to(tl.float32, bitcast=True)


@triton.jit
def centroids_of(codes, table_ptr, C: tl.constexpr, PAD: tl.constexpr):
    """Codebook entries [N, PAD] in float32, and what makes them unit vectors [N].

    A unit vector's coordinates never all lie in the cells next to 0, so the sum of
    squares is far from 0.
    """
    N: tl.constexpr = codes.shape[0]
    entries = tl.load(table_ptr + tl.arange(0, 1 << C.KEY_BITS))
    values = tl.gather(entries, tl.reshape(codes, (N * PAD,)).to(tl.int32), 0)
    values = tl.reshape(values, (N, PAD))
    if C.D != PAD:
        values = tl.where((tl.arange(0, PAD) < C.D)[None, :], values, 0.0)
    if C.NORM_CORRECTION:
        return values, 1.0 / tl.sqrt(tl.sum(values * values, axis=1))
    else:
        return values, tl.full((codes.shape[0],), 1.0, tl.float32)


@triton.jit
def load_key(
    cells,
    mask,
    table_ptr,
    C: tl.constexpr,
    ALIGN: tl.constexpr,
    PAD: tl.constexpr,
    DOT: tl.constexpr,
):
    """Keys of cells [N]: numbers [N, PAD] in type DOT, factors [N] in float32.

    key = numbers * factor, in the rotated space of formats that rotate. `table_ptr`
    holds the codebook of formats that have one.
    """
    if C.FAMILY == "plain":
        keys = load_floats(cells + C.K_OFFSET, mask, C.K_DTYPE, C.D, PAD, DOT)
        return keys, tl.full((cells.shape[0],), 1.0, tl.float32)
    elif C.FAMILY == "per_token_head":
        scale = load_f32(cells, mask, C.K_SCALE_OFFSET, ALIGN)
        if C.K_DTYPE == "u4":
            codes = load_nibbles(cells + C.K_OFFSET, mask, C.K_BYTES, PAD)
            keys, step = without_zero_point(codes, scale, C.D, PAD)
            return keys.to(DOT), step
        else:
            keys = load_floats(cells + C.K_OFFSET, mask, C.K_DTYPE, C.D, PAD, DOT)
            return keys, scale
    else:
        tl.static_assert(C.FAMILY == "turboquant")
        at = cells + C.K_CODES_OFFSET
        if C.K_CODES_DTYPE == "e4m3":
            keys = load_floats(at, mask, C.K_CODES_DTYPE, C.D, PAD, DOT)
            return keys, tl.full((cells.shape[0],), 1.0, tl.float32)
        else:
            codes = load_codes(at, mask, C.K_CODES_DTYPE, C.K_CODES_BYTES, PAD)
            keys, length = centroids_of(codes, table_ptr, C, PAD)
            norm = load_f16(cells, mask, C.K_NORM_OFFSET, ALIGN)
            return keys.to(DOT), norm * length


@triton.jit
def load_value(
    cells,
    mask,
    C: tl.constexpr,
    ALIGN: tl.constexpr,
    PAD: tl.constexpr,
    DOT: tl.constexpr,
):
    """Values of cells [N]: numbers [N, PAD] in type DOT, factors and shifts [N].

    value = numbers * factor + shift; masked states give 0 for all three.
    """
    nothing = tl.zeros((cells.shape[0],), tl.float32)
    if C.FAMILY == "plain":
        values = load_floats(cells + C.V_OFFSET, mask, C.V_DTYPE, C.DV, PAD, DOT)
        return values, nothing + 1.0, nothing
    elif C.FAMILY == "per_token_head":
        scale = load_f32(cells, mask, C.V_SCALE_OFFSET, ALIGN)
        if C.V_DTYPE == "u4":
            codes = load_nibbles(cells + C.V_OFFSET, mask, C.V_BYTES, PAD)
            values, step = without_zero_point(codes, scale, C.DV, PAD)
            return values.to(DOT), step, nothing
        else:
            at = cells + C.V_OFFSET
            values = load_floats(at, mask, C.V_DTYPE, C.DV, PAD, DOT)
            return values, scale, nothing
    else:
        tl.static_assert(C.FAMILY == "turboquant")
        at = cells + C.V_CODES_OFFSET
        codes = load_codes(at, mask, C.V_CODES_DTYPE, C.V_CODES_BYTES, PAD)
        step = load_f16(cells, mask, C.V_SCALE_OFFSET, ALIGN)
        lowest = load_f16(cells, mask, C.V_ZERO_OFFSET, ALIGN)
        return codes.to(tl.float32).to(DOT), step, lowest


# --- latents ------------------------------------------------------------------------


@triton.jit
def load_latent(
    cells,
    mask,
    C: tl.constexpr,
    ALIGN: tl.constexpr,
    LORA: tl.constexpr,
    PAD: tl.constexpr,
    DOT: tl.constexpr,
):
    """The first LORA elements of states [N]: numbers [N, PAD], factors [N]."""
    if C.FAMILY == "record":
        tl.static_assert(C.NOPE_COUNT == PAD and LORA == PAD)
        N: tl.constexpr = cells.shape[0]
        TILES: tl.constexpr = C.NOPE_SCALE_COUNT
        at = cells + C.NOPE_OFFSET
        # Bytes and 16-bit numbers change shape, never float32: fewer registers.
        if C.NOPE_DTYPE == "e2m1":
            codes = load_nibbles(at, mask, C.NOPE_BYTES, PAD)
            tiles = e2m1_decode(tl.reshape(codes, (N, TILES, PAD // TILES)))
        else:
            tl.static_assert(C.NOPE_DTYPE == "e4m3")
            codes = load_bytes(at, mask, PAD, PAD)
            tiles = e4m3_decode(tl.reshape(codes, (N, TILES, PAD // TILES)))
        tiles *= load_tile_scales(cells, mask, C, ALIGN, TILES)[:, :, None]
        latents = tl.reshape(tiles.to(DOT), (N, PAD))
        return latents, tl.full((N,), 1.0, tl.float32)
    else:
        return load_part(cells, mask, C, ALIGN, 0, LORA, PAD, DOT)


@triton.jit
def load_rope(
    cells,
    mask,
    C: tl.constexpr,
    ALIGN: tl.constexpr,
    LORA: tl.constexpr,
    PAD: tl.constexpr,
    DOT: tl.constexpr,
):
    """The elements from LORA on of states [N]: numbers [N, PAD]; they count as often as
    the latent's."""
    if C.FAMILY == "record":
        at = cells + C.ROPE_OFFSET
        return load_floats(at, mask, C.ROPE_DTYPE, C.ROPE_COUNT, PAD, DOT)
    else:
        return load_part(cells, mask, C, ALIGN, LORA, C.D - LORA, PAD, DOT)[0]


@triton.jit
def load_part(
    cells,
    mask,
    C: tl.constexpr,
    ALIGN: tl.constexpr,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    PAD: tl.constexpr,
    DOT: tl.constexpr,
):
    """Elements FIRST to FIRST + COUNT of keys [N]: numbers [N, PAD], factors [N]."""
    at = cells + (C.K_OFFSET + FIRST * C.K_BYTES // C.D)
    if C.FAMILY == "plain":
        part = load_floats(at, mask, C.K_DTYPE, COUNT, PAD, DOT)
        return part, tl.full((cells.shape[0],), 1.0, tl.float32)
    else:
        tl.static_assert(C.FAMILY == "per_token_head")
        scale = load_f32(cells, mask, C.K_SCALE_OFFSET, ALIGN)
        if C.K_DTYPE == "u4":
            codes = load_nibbles(at, mask, COUNT // 2, PAD)
            part, step = without_zero_point(codes, scale, COUNT, PAD)
            return part.to(DOT), step
        else:
            return load_floats(at, mask, C.K_DTYPE, COUNT, PAD, DOT), scale


@triton.jit
def load_tile_scales(
    cells, mask, C: tl.constexpr, ALIGN: tl.constexpr, TILES: tl.constexpr
):
    """Scales [N, TILES] of a record in float32, in the order of the elements. Scale s
    lies in column s % SCALE_COLUMNS of the stored table, row s // SCALE_COLUMNS."""
    s = tl.arange(0, TILES)
    ROWS: tl.constexpr = TILES // C.SCALE_COLUMNS
    place = s % C.SCALE_COLUMNS * ROWS + s // C.SCALE_COLUMNS
    at = cells + C.NOPE_SCALE_OFFSET
    if C.NOPE_SCALE_DTYPE == "f32":
        tl.static_assert(ALIGN % 4 == 0 and C.NOPE_SCALE_OFFSET % 4 == 0)
        words = at.to(tl.pointer_type(tl.float32))
        return tl.load(words[:, None] + place[None, :], mask=mask[:, None], other=0.0)
    else:
        tl.static_assert(C.NOPE_SCALE_DTYPE == "e4m3")
        codes = tl.load(at[:, None] + place[None, :], mask=mask[:, None], other=0)
        return e4m3_decode(codes)
