"""int8, fp8 and int4 codes with one fp32 scale per token, head and side.

A state is K codes, K scale, V codes, V scale. A latent (MLA) state has no V codes; the
published size charges its V scale all the same, so the word is there and holds 0.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from vllm.v1.kv_formats.base import UNIT_SCALES, KVFormat, KVScales, Tolerance
from vllm.v1.kv_formats.casts import (
    E4M3_MAX,
    finite,
    round_half_away,
    saturate,
    widen,
)
from vllm.v1.kv_formats.hadamard import inverse_rht, rht
from vllm.v1.kv_formats.layout import Field
from vllm.v1.kv_formats.mode import KVQuantMode
from vllm.v1.kv_formats.packing import pack_bits, unpack_bits

MIN_SCALE = 1e-6

Codes = tuple[torch.Tensor, torch.Tensor]  # codes [..., bytes], scale f32 [..., 1]


@dataclass(frozen=True)
class PerTokenHead(KVFormat):
    """Shared shape of the family; a subclass quantises one side at a time."""

    code: str = "u8"

    @abstractmethod
    def quantize(self, x: torch.Tensor) -> Codes:
        """Codes and scale word of finite vectors [T, heads, size]."""

    @abstractmethod
    def dequantize(
        self, codes: torch.Tensor, scale: torch.Tensor, size: int
    ) -> torch.Tensor:
        """Float32 [T, heads, size] from codes and scale word."""

    def rows(self, model_dtype: torch.dtype) -> tuple[Field, ...]:
        return (
            Field("k", self.code, of="k", note="key codes"),
            Field("k_scale", "f32", 1, of="k", note="key scale"),
            Field("v", self.code, of="v", note="value codes"),
            Field("v_scale", "f32", 1, of="v", note="value scale"),
        )

    def encode(
        self,
        key: torch.Tensor,
        value: torch.Tensor | None,
        scales: KVScales = UNIT_SCALES,
    ) -> dict[str, torch.Tensor]:
        k, k_scale = self.quantize(key)
        if value is None or value.shape[-1] == 0:
            v, v_scale = k[..., :0], torch.zeros_like(k_scale)
        else:
            v, v_scale = self.quantize(value)
        return {"k": k, "k_scale": k_scale, "v": v, "v_scale": v_scale}

    def decode(
        self,
        fields: Mapping[str, torch.Tensor],
        head_size: int,
        head_size_v: int,
        out_dtype: torch.dtype,
        scales: KVScales = UNIT_SCALES,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        key = self.dequantize(fields["k"], fields["k_scale"], head_size)
        if head_size_v:
            value = self.dequantize(fields["v"], fields["v_scale"], head_size_v)
        else:
            value = key[..., :0]
        return saturate(key, out_dtype), saturate(value, out_dtype)


def _amax_scale(x: torch.Tensor, limit: float) -> torch.Tensor:
    return (x.abs().amax(-1, keepdim=True) / limit).clamp_(min=MIN_SCALE)


@dataclass(frozen=True)
class Int8PerTokenHead(PerTokenHead):
    """scale = amax / 127, code = round(x / scale), halves away from zero."""

    mode: KVQuantMode = KVQuantMode.INT8_PER_TOKEN_HEAD
    code: str = "i8"

    def storage_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        return torch.int8

    def quantize(self, x: torch.Tensor) -> Codes:
        x = finite(x)
        limits = torch.iinfo(torch.int8)
        scale = _amax_scale(x, limits.max)
        codes = round_half_away(x * (1.0 / scale)).clamp_(limits.min, limits.max)
        return codes.to(torch.int8), scale

    def dequantize(
        self, codes: torch.Tensor, scale: torch.Tensor, size: int
    ) -> torch.Tensor:
        return widen(codes) * scale


@dataclass(frozen=True)
class Fp8PerTokenHead(PerTokenHead):
    """scale = amax / 448, code = e4m3(x / scale)."""

    mode: KVQuantMode = KVQuantMode.FP8_PER_TOKEN_HEAD
    code: str = "e4m3"

    def quantize(self, x: torch.Tensor) -> Codes:
        x = finite(x)
        scale = _amax_scale(x, E4M3_MAX)
        return saturate(x * (1.0 / scale), torch.float8_e4m3fn), scale

    def dequantize(
        self, codes: torch.Tensor, scale: torch.Tensor, size: int
    ) -> torch.Tensor:
        return widen(codes) * scale


@dataclass(frozen=True)
class Int4PerTokenHead(PerTokenHead):
    """Rotated vectors in 4 bits with a zero point.

    The vector goes through the randomised Hadamard transform (block-diagonal where the
    head size is no power of two) and is rounded to the model's dtype. Then
    scale = (max - min) / 15 and code = round(y / scale + zero). The zero point lives in
    the 4 lowest bits of the fp32 scale word; the reader's scale has those bits cleared.

    min and max include 0, so that the zero point of a one-sided vector fits 0..15.
    """

    mode: KVQuantMode = KVQuantMode.INT4_PER_TOKEN_HEAD
    code: str = "u4"

    fits = "even head sizes (two codes share a byte)"

    # Rotation and range add magnitudes; below this no sum of a head overflows fp32.
    input_limit = 2.0**112
    max_code = 15

    def check_head_size(self, head_size: int, head_size_v: int) -> None:
        super().check_head_size(head_size, head_size_v)
        if head_size % 2 or head_size_v % 2:
            raise self._misfit(head_size, head_size_v)

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        """What is quantised: finite vectors, rotated and rounded to their dtype."""
        return saturate(rht(finite(x, self.input_limit)), x.dtype)

    def quantize(self, x: torch.Tensor) -> Codes:
        codes, word = self.quantize_rotated(self.rotated(x).float())
        return pack_bits(codes, 4), word

    def quantize_rotated(self, y: torch.Tensor) -> Codes:
        """Unpacked codes (uint8) and scale word of rotated float32 vectors."""
        low = y.amin(-1, keepdim=True).clamp_(max=0.0)
        high = y.amax(-1, keepdim=True).clamp_(min=0.0)
        scale = ((high - low) / self.max_code).clamp_(min=MIN_SCALE)
        zero = round_half_away(-low / scale).clamp_(0, self.max_code)
        codes = round_half_away(y * (1.0 / scale) + zero).clamp_(0, self.max_code)
        bits = scale.view(torch.int32) & ~self.max_code
        word = (bits | zero.to(torch.int32)).view(torch.float32)
        return codes.to(torch.uint8), word

    def dequantize(
        self, codes: torch.Tensor, scale: torch.Tensor, size: int
    ) -> torch.Tensor:
        bits = scale.view(torch.int32)
        zero = (bits & self.max_code).float()
        step = (bits & ~self.max_code).view(torch.float32)
        rotated = (unpack_bits(codes, 4, size).float() - zero) * step
        return inverse_rht(rotated)


FORMATS: tuple[KVFormat, ...] = (
    Int8PerTokenHead(
        "int8_per_token_head",
        tolerance=Tolerance(key=0.008, value=0.008),
        summary="int8 codes, a scale per token, head and side",
    ),
    Fp8PerTokenHead(
        "fp8_per_token_head",
        tolerance=Tolerance(key=0.03, value=0.03),
        summary="e4m3 codes, a scale per token, head and side",
    ),
    Int4PerTokenHead(
        "int4_per_token_head",
        tolerance=Tolerance(key=0.13, value=0.13),
        summary="rotated 4-bit codes, a scale and zero point per token, head and side",
    ),
)
