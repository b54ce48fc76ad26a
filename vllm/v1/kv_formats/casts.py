"""Number conversions shared by the formats. Knows torch tensors, no layout.

Everything here treats each vector on its own and in a fixed order of operations, so
that the bytes of a state never depend on the batch it was encoded in.
"""

import torch

# Inputs are held below this, so that rounding up on the way back stays finite.
INPUT_LIMIT = 2.0**127
E4M3_MAX = torch.finfo(torch.float8_e4m3fn).max

# Magnitudes of the e2m1 codes 0..7; bit 3 is the sign.
E2M1_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX = E2M1_LEVELS[-1]

UE8M0_BIAS = 127


def select(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """table[index] for a 1-D table, in the index's shape."""
    return table.index_select(0, index.flatten().int()).view(index.shape)


def widen(x: torch.Tensor) -> torch.Tensor:
    """Float32 of a stored type. e4m3 goes through a table: torch's cast is scalar."""
    if x.dtype != torch.float8_e4m3fn:
        return x.float()
    codes = torch.arange(256, device=x.device).to(torch.uint8)
    return select(codes.view(x.dtype).float(), x.view(torch.uint8))


def saturate(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Casts to `dtype`, clamping to its finite range first. NaN stays NaN."""
    if x.dtype == dtype:
        return x
    limit = torch.finfo(dtype).max
    if torch.finfo(x.dtype).max > limit:
        # In float32: bfloat16 cannot express the largest float16.
        x = x.float().clamp(-limit, limit)
    return x.to(dtype)


def finite(x: torch.Tensor, limit: float = INPUT_LIMIT) -> torch.Tensor:
    """A float32 copy with NaN as 0 and everything clamped to +-limit."""
    return x.float().clamp(-limit, limit).nan_to_num_(nan=0.0)


def tree_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum over the last axis, kept as size 1, by halving: a fixed order of adds."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        folded = x[..., :half] + x[..., half : 2 * half]
        if x.shape[-1] % 2:
            folded[..., :1] += x[..., -1:]
        x = folded
    return x


def round_half_away(x: torch.Tensor) -> torch.Tensor:
    """Rounds float32 to whole numbers, halves away from zero."""
    return x.abs().add_(0.5).floor_().copysign_(x)


def e2m1_encode(x: torch.Tensor) -> torch.Tensor:
    """Nearest e2m1 codes (uint8, 0..15) of finite float32; ties to even, saturating."""
    size = x.abs().clamp_(max=E2M1_MAX)
    # Levels step by 1/2 up to 2, by 1 up to 4, by 2 up to 6. Each line below is right
    # on its own stretch and too high on the others; torch rounds halves to even.
    fine = (size * 2).round_()
    middle = size.round().add_(2)
    coarse = (size * 0.5).round_().add_(4)
    codes = torch.minimum(torch.minimum(fine, middle), coarse).to(torch.uint8)
    return codes | (torch.signbit(x).to(torch.uint8) << 3)


def e2m1_table(device: torch.device) -> torch.Tensor:
    """Float32 [16]: the value of each e2m1 code."""
    positive = torch.tensor(E2M1_LEVELS, device=device)
    return torch.cat((positive, -positive))


def ue8m0_ceil(x: torch.Tensor) -> torch.Tensor:
    """Exponent bytes (uint8) of the smallest powers of two >= x, for positive x."""
    mantissa, exponent = torch.frexp(x)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    return (exponent + UE8M0_BIAS).clamp(0, 255).to(torch.uint8)


def ue8m0_value(byte: torch.Tensor) -> torch.Tensor:
    """Float32 2**(byte - 127); byte 255 is NaN."""
    return byte.view(torch.float8_e8m0fnu).float()
