"""Sub-byte codes to bytes and back: little-endian bit streams, element 0 in bit 0."""

import torch
from torch.nn.functional import pad

from vllm.v1.kv_formats.casts import select


def pack_bits(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Packs uint8 codes [..., n] of 3 or 4 bits: uint8 [..., ceil(n * bits / 8)].

    Unused bits of the last byte are zero.
    """
    num_bytes = (codes.shape[-1] * bits + 7) // 8
    if bits == 4:
        codes = pad(codes, (0, codes.shape[-1] % 2))
        return codes[..., 0::2] | (codes[..., 1::2] << 4)
    group = _codes_per_word(bits)
    codes = pad(codes, (0, -codes.shape[-1] % group))
    words = codes.unflatten(-1, (-1, group)).to(torch.int32)
    shifts = torch.arange(group, device=codes.device, dtype=torch.int32) * bits
    word = (words << shifts).sum(-1, dtype=torch.int32)
    return _low_bytes(word, bits)[..., :num_bytes]


def unpack_bits(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """The first `count` codes, as uint8, of bytes [..., ceil(count * bits / 8)]."""
    if bits == 4:
        both = torch.stack((packed & 15, packed >> 4), dim=-1)
        return both.flatten(-2)[..., :count]
    group = _codes_per_word(bits)
    packed = pad(packed, (0, -packed.shape[-1] % bits))
    parts = packed.unflatten(-1, (-1, bits)).to(torch.int32)
    byte_shifts = torch.arange(bits, device=packed.device, dtype=torch.int32) * 8
    word = (parts << byte_shifts).sum(-1, dtype=torch.int32).unsqueeze(-1)
    shifts = torch.arange(group, device=packed.device, dtype=torch.int32) * bits
    codes = (word >> shifts) & ((1 << bits) - 1)
    return codes.to(torch.uint8).flatten(-2)[..., :count]


def look_up(
    packed: torch.Tensor, bits: int, count: int, table: torch.Tensor
) -> torch.Tensor:
    """table[code] of each packed code: float32 [..., count].

    `table` has 2**bits float32 entries. Four-bit codes are looked up two at a time.
    """
    if bits == 4:
        size = table.numel()
        pairs = torch.stack((table.repeat(size), table.repeat_interleave(size)), dim=-1)
        # Two float32 move as one int64: one look-up per byte.
        pair = select(pairs.view(torch.int64).flatten(), packed)
        return pair.view(table.dtype)[..., :count]
    return select(table, unpack_bits(packed, bits, count))


def _codes_per_word(bits: int) -> int:
    """A word of `bits` bytes holds 8 codes; 8 * 3 bits fit an int32."""
    if bits != 3:
        raise ValueError(f"cannot pack {bits}-bit codes: expected 3 or 4 bits")
    return 8


def _low_bytes(word: torch.Tensor, num_bytes: int) -> torch.Tensor:
    shifts = torch.arange(num_bytes, device=word.device, dtype=torch.int32) * 8
    parts = (word.unsqueeze(-1) >> shifts) & 255
    return parts.to(torch.uint8).flatten(-2)
