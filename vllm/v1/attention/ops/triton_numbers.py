"""Numbers of the KV formats in Triton: fp8, e2m1, rounding, packing, rotation.

Device functions only, over blocks of registers. fp8 is encoded and decoded by its bits,
because sm_80 has no e4m3 type: the same code runs on every architecture, and gives the
bytes of the formats' torch references. Knows no page and no layout. A caller that wants
those bytes launches with `enable_fp_fusion=False`: no product is fused with a sum.
"""

import triton
import triton.language as tl

# Masks of float32 bit patterns, as signed words.
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_INFINITY = tl.constexpr(0x7F800000)
_NAN_CODE = tl.constexpr(0x7F)
_FLOAT16_MAX = tl.constexpr(65504.0)
_BFLOAT16_MAX = tl.constexpr(3.3895313892515355e38)


@triton.jit
def finite(x, LIMIT: tl.constexpr):
    """float32 of x with NaN as 0 and everything clamped to +-LIMIT."""
    x = x.to(tl.float32)
    x = tl.where(x != x, 0.0, x)
    return tl.minimum(tl.maximum(x, -LIMIT), LIMIT)


@triton.jit
def saturate(x, TYPE: tl.constexpr):
    """x in float32, float16 or bfloat16, clamped to its finite range. NaN stays NaN."""
    if x.dtype == TYPE:
        out = x
    elif tl.float16 == TYPE:
        wide = x.to(tl.float32)
        wide = tl.where(wide > _FLOAT16_MAX, _FLOAT16_MAX, wide)
        out = tl.where(wide < -_FLOAT16_MAX, -_FLOAT16_MAX, wide).to(TYPE)
    elif x.dtype == tl.float32 and tl.bfloat16 == TYPE:
        wide = tl.where(x > _BFLOAT16_MAX, _BFLOAT16_MAX, x)
        out = tl.where(wide < -_BFLOAT16_MAX, -_BFLOAT16_MAX, wide).to(TYPE)
    else:
        out = x.to(tl.float32).to(TYPE)
    return out


@triton.jit
def round_half_away(x):
    """float32 rounded to whole numbers, halves away from zero."""
    size = tl.floor(tl.abs(x) + 0.5)
    return tl.where(x < 0, -size, size)


@triton.jit
def _fp8_code(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, MAX_CODE: tl.constexpr):
    """Codes (uint8) of float32: nearest even, saturating; NaN stays NaN.

    A normal code is the float32 pattern, rounded at bit SHIFT, with another exponent
    bias. Below the normal range, adding a power of two whose last place is the step
    between subnormal codes leaves the code in the low bits of the sum.
    """
    SHIFT: tl.constexpr = 23 - MANTISSA
    REBIAS: tl.constexpr = 127 - BIAS
    LIMIT: tl.constexpr = (MAX_CODE << SHIFT) + (REBIAS << 23)
    ALIGNER: tl.constexpr = (151 - BIAS - MANTISSA) << 23
    bits = x.to(tl.int32, bitcast=True)
    size = bits & _MAGNITUDE
    held = tl.minimum(size, LIMIT)
    rounded = held + ((1 << (SHIFT - 1)) - 1) + ((held >> SHIFT) & 1)
    normal = (rounded >> SHIFT) - (REBIAS << MANTISSA)
    aligner = tl.full(x.shape, ALIGNER, tl.int32).to(tl.float32, bitcast=True)
    aligned = held.to(tl.float32, bitcast=True) + aligner
    subnormal = aligned.to(tl.int32, bitcast=True) - ALIGNER
    code = tl.where(held < ((REBIAS + 1) << 23), subnormal, normal)
    code = tl.where(size > _INFINITY, _NAN_CODE, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def e4m3_encode(x):
    """e4m3 codes (uint8) of float32: nearest even, saturating at +-448."""
    return _fp8_code(x, 3, 7, 0x7E)


@triton.jit
def e5m2_encode(x):
    """e5m2 codes (uint8) of float32: nearest even, saturating at +-57344."""
    return _fp8_code(x, 2, 15, 0x7B)


@triton.jit
def e4m3_decode(code):
    """float32 of e4m3 codes (uint8), exact. A float16 pattern with another bias."""
    word = code.to(tl.uint16)
    half = ((word & 0x7F) << 7) | ((word & 0x80) << 8)
    value = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((word & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def e5m2_decode(code):
    """float32 of e5m2 codes (uint8), exact: the upper half of a float16."""
    return (code.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def e2m1_encode(x):
    """e2m1 codes (uint8, 0..15) of finite float32: nearest even, saturating at +-6."""
    size = tl.abs(x)
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32)
    code += (size > 1.25).to(tl.int32) + (size >= 1.75).to(tl.int32)
    code += (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32)
    code += (size > 5.0).to(tl.int32)
    sign = (x.to(tl.int32, bitcast=True) >> 28) & 8
    return (code | sign).to(tl.uint8)


@triton.jit
def e2m1_decode(code):
    """float32 of e2m1 codes (0..15). A float16 pattern with another bias."""
    word = code.to(tl.uint16)
    half = ((word & 7) << 9) | ((word & 8) << 12)
    return half.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def pack_nibbles(codes, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Bytes [ROWS, WIDTH / 2] of 4-bit codes (uint8) [ROWS, WIDTH], even ones low."""
    low, high = tl.split(tl.reshape(codes, [ROWS, WIDTH // 2, 2]))
    return low | (high << 4)


@triton.jit
def words_of_3_bits(codes, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """24-bit words (int32) [ROWS, WIDTH / 8] of 3-bit codes (uint8) [ROWS, WIDTH].

    Code j of a word lies at bits 3j; byte k of its three at bits 8k.
    """
    groups = tl.reshape(codes.to(tl.int32), [ROWS, WIDTH // 8, 8])
    shifts = 3 * tl.arange(0, 8)
    return tl.sum(groups << shifts[None, None, :], 2)


@triton.jit
def _fold(x, ROWS: tl.constexpr, HALF: tl.constexpr):
    low, high = tl.split(tl.trans(tl.reshape(x, [ROWS, 2, HALF]), 0, 2, 1))
    return low + high


@triton.jit
def sum_of_16(x, ROWS: tl.constexpr):
    """Sums [ROWS] of float32 [ROWS, 16] by halving: the order of `casts.tree_sum`."""
    x = _fold(_fold(x, ROWS, 8), ROWS, 4)
    return tl.reshape(_fold(_fold(x, ROWS, 2), ROWS, 1), [ROWS])


@triton.jit
def _butterfly(x, ROWS: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr):
    pairs = tl.reshape(x, [ROWS, WIDTH // (2 * STEP), 2, STEP])
    low, high = tl.split(tl.trans(pairs, 0, 1, 3, 2))
    mixed = tl.trans(tl.join(low + high, low - high), 0, 1, 3, 2)
    return tl.reshape(mixed, [ROWS, WIDTH])


@triton.jit
def hadamard(x, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Unnormalised Walsh-Hadamard transform of float32 [ROWS, WIDTH] in blocks.

    The same additions in the same order as `kv_formats.hadamard.hadamard`: BLOCK is the
    largest power of two that divides the head size; columns past the head are apart.
    """
    if BLOCK > 1:
        x = _butterfly(x, ROWS, WIDTH, 1)
    if BLOCK > 2:
        x = _butterfly(x, ROWS, WIDTH, 2)
    if BLOCK > 4:
        x = _butterfly(x, ROWS, WIDTH, 4)
    if BLOCK > 8:
        x = _butterfly(x, ROWS, WIDTH, 8)
    if BLOCK > 16:
        x = _butterfly(x, ROWS, WIDTH, 16)
    if BLOCK > 32:
        x = _butterfly(x, ROWS, WIDTH, 32)
    if BLOCK > 64:
        x = _butterfly(x, ROWS, WIDTH, 64)
    if BLOCK > 128:
        x = _butterfly(x, ROWS, WIDTH, 128)
    if BLOCK > 256:
        x = _butterfly(x, ROWS, WIDTH, 256)
    if BLOCK > 512:
        x = _butterfly(x, ROWS, WIDTH, 512)
    return x
