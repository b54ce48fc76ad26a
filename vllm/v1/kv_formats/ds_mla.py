"""Records of DeepSeek's latent attention: one head slot, no V, fixed sizes.

Two are chosen by the user (fp8_ds_mla, nvfp4_ds_mla), two by a model (the DeepSeek-V4
page and the indexer's keys). Their numbers of elements are the models' own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm.v1.kv_formats.base import (
    DEFAULT_ARRANGEMENT,
    UNIT_SCALES,
    KVFormat,
    KVScales,
    Tolerance,
)
from vllm.v1.kv_formats.casts import (
    E2M1_MAX,
    E4M3_MAX,
    e2m1_encode,
    finite,
    saturate,
    ue8m0_ceil,
    ue8m0_value,
    widen,
)
from vllm.v1.kv_formats.layout import Extent, Field
from vllm.v1.kv_formats.mode import KVQuantMode
from vllm.v1.kv_formats.nvfp4 import GROUP, dequantize
from vllm.v1.kv_formats.packing import pack_bits

LATENT = 512
ROPE = 64
TILE = 128
V4_NOPE = 448
V4_BLOCK = 64
INDEXER = 128
_MIN_AMAX = 1e-4
MIN_NVFP4_SCALE = 2.0**-9  # the smallest e4m3 above 0
MIN_STEP = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class LatentRecord(KVFormat):
    """Shared shape: a table without head-size terms, K only."""

    arrangements: ClassVar[tuple[str, ...]] = (DEFAULT_ARRANGEMENT,)
    latent: ClassVar[bool] = True
    nonfinite: ClassVar[str] = (
        "NaN is stored as 0, infinities saturate; NaN in the rotary part is kept"
    )
    opaque: ClassVar[bool] = True
    head_size: ClassVar[int] = LATENT + ROPE

    def check_head_size(self, head_size: int, head_size_v: int) -> None:
        if (head_size, head_size_v) != (self.head_size, 0):
            raise self._misfit(head_size, head_size_v)

    @property
    def record_bytes(self) -> int:
        """Bytes of one state."""
        return self.layout(self.head_size, 0).nbytes

    def extent(self) -> Extent:
        planes = {row.plane for row in self.rows(torch.bfloat16)}
        return Extent.HEAD if len(planes) > 1 else Extent.STATE


def _tile_codes(x: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """e4m3 codes [..., n] of tiles [..., tiles, size] divided by steps [..., tiles]."""
    return saturate(x / step.unsqueeze(-1), torch.float8_e4m3fn).flatten(-2)


def _tile_values(codes: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """Float32 [..., n] from e4m3 codes [..., n] and steps [..., tiles]."""
    tiles = widen(codes).unflatten(-1, (step.shape[-1], -1))
    return (tiles * step.unsqueeze(-1)).flatten(-2)


@dataclass(frozen=True)
class Fp8DsMla(LatentRecord):
    """512 latent elements as e4m3 in tiles of 128 with fp32 scales; exact rope.

    The rope part stays in 16 bits because its error would be coherent across heads.
    """

    mode: KVQuantMode = KVQuantMode.FP8_PER_TENSOR
    fits = f"an MLA latent of {LATENT} + {ROPE} elements, head_size_v 0"

    def rows(self, model_dtype: torch.dtype) -> tuple[Field, ...]:
        return (
            Field("nope", "e4m3", LATENT, note=f"latent, in tiles of {TILE}"),
            Field("nope_scale", "f32", LATENT // TILE, note="one per tile"),
            Field("rope", "bf16", ROPE, note="rotary part, not quantised"),
        )

    def encode(
        self,
        key: torch.Tensor,
        value: torch.Tensor | None,
        scales: KVScales = UNIT_SCALES,
    ) -> dict[str, torch.Tensor]:
        tiles = finite(key[..., :LATENT]).unflatten(-1, (-1, TILE))
        step = tiles.abs().amax(-1) / E4M3_MAX
        step.clamp_(min=MIN_STEP)
        return {
            "nope": _tile_codes(tiles, step),
            "nope_scale": step,
            "rope": saturate(key[..., LATENT:], torch.bfloat16),
        }

    def decode(
        self,
        fields: Mapping[str, torch.Tensor],
        head_size: int,
        head_size_v: int,
        out_dtype: torch.dtype,
        scales: KVScales = UNIT_SCALES,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        nope = _tile_values(fields["nope"], fields["nope_scale"])
        return _joined(nope, fields["rope"], out_dtype)


@dataclass(frozen=True)
class NvFp4DsMla(LatentRecord):
    """512 latent elements as e2m1 in groups of 16; rope as plain e4m3.

    The 32 scales are stored permuted: block s at position 8 * (s % 4) + s // 4.
    """

    mode: KVQuantMode = KVQuantMode.NVFP4_DS_MLA
    opaque: ClassVar[bool] = False  # the mode is its own
    fits = f"an MLA latent of {LATENT} + {ROPE} elements, head_size_v 0"
    scale_columns: ClassVar[int] = 4

    def rows(self, model_dtype: torch.dtype) -> tuple[Field, ...]:
        scales = LATENT // GROUP
        return (
            Field("nope", "e2m1", LATENT, note=f"latent, in groups of {GROUP}"),
            Field("rope", "e4m3", ROPE, note="rotary part, unscaled"),
            Field("nope_scale", "e4m3", scales, note="one per group, permuted"),
        )

    def encode(
        self,
        key: torch.Tensor,
        value: torch.Tensor | None,
        scales: KVScales = UNIT_SCALES,
    ) -> dict[str, torch.Tensor]:
        groups = finite(key[..., :LATENT]).unflatten(-1, (-1, GROUP))
        amax = groups.abs().amax(-1)
        step = saturate(
            (amax / E2M1_MAX).clamp_(min=MIN_NVFP4_SCALE), torch.float8_e4m3fn
        )
        codes = e2m1_encode(groups * (1.0 / step.float()).unsqueeze(-1))
        return {
            "nope": pack_bits(codes.flatten(-2), 4),
            "rope": saturate(key[..., LATENT:], torch.float8_e4m3fn),
            "nope_scale": self.permute_scales(step),
        }

    def permute_scales(self, blocks: torch.Tensor) -> torch.Tensor:
        """Scales [..., 32] in block order to stored order."""
        return _transposed(blocks, self.scale_columns)

    def unpermute_scales(self, stored: torch.Tensor) -> torch.Tensor:
        """Scales [..., 32] in stored order to block order."""
        return _transposed(stored, stored.shape[-1] // self.scale_columns)

    def decode(
        self,
        fields: Mapping[str, torch.Tensor],
        head_size: int,
        head_size_v: int,
        out_dtype: torch.dtype,
        scales: KVScales = UNIT_SCALES,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        step = self.unpermute_scales(fields["nope_scale"])
        nope = dequantize(fields["nope"], step)
        return _joined(nope, fields["rope"], out_dtype)


@dataclass(frozen=True)
class DeepSeekV4(LatentRecord):
    """448 latent elements as e4m3 with powers of two as scales, exact rope.

    A page is data then scales: N records of latent and rope, then N records of 7 scale
    bytes and a zero. Pages are padded to whole data records.
    """

    mode: KVQuantMode = KVQuantMode.FP8_PER_TENSOR
    align = 8
    head_size = V4_NOPE + ROPE
    fits = f"a DeepSeek-V4 latent of {V4_NOPE} + {ROPE} elements, head_size_v 0"

    @property
    def page_alignment(self) -> int:
        """Bytes that the page of a layer is rounded up to."""
        return self.layout(self.head_size, 0).plane_widths(0)[0]

    def rows(self, model_dtype: torch.dtype) -> tuple[Field, ...]:
        blocks = V4_NOPE // V4_BLOCK
        return (
            Field("nope", "e4m3", V4_NOPE, note=f"latent, in blocks of {V4_BLOCK}"),
            Field("rope", "bf16", ROPE, note="rotary part, not quantised"),
            Field("nope_scale", "ue8m0", blocks, plane=1, note="one per block"),
        )

    def encode(
        self,
        key: torch.Tensor,
        value: torch.Tensor | None,
        scales: KVScales = UNIT_SCALES,
    ) -> dict[str, torch.Tensor]:
        tiles = finite(key[..., :V4_NOPE]).unflatten(-1, (-1, V4_BLOCK))
        byte = ue8m0_ceil(tiles.abs().amax(-1).clamp_(min=_MIN_AMAX) / E4M3_MAX)
        return {
            "nope": _tile_codes(tiles, ue8m0_value(byte)),
            "rope": saturate(key[..., V4_NOPE:], torch.bfloat16),
            "nope_scale": byte,
        }

    def decode(
        self,
        fields: Mapping[str, torch.Tensor],
        head_size: int,
        head_size_v: int,
        out_dtype: torch.dtype,
        scales: KVScales = UNIT_SCALES,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        step = ue8m0_value(fields["nope_scale"].contiguous())
        return _joined(_tile_values(fields["nope"], step), fields["rope"], out_dtype)


@dataclass(frozen=True)
class DsaIndexer(LatentRecord):
    """128 indexer key elements as e4m3 with one fp32 scale; data then scales per page.

    `power_of_two` rounds the scale up to a power of two.
    """

    mode: KVQuantMode = KVQuantMode.FP8_PER_TENSOR
    power_of_two: bool = False
    head_size = INDEXER
    nonfinite = KVFormat.nonfinite
    fits = f"indexer keys of {INDEXER} elements, head_size_v 0"

    def rows(self, model_dtype: torch.dtype) -> tuple[Field, ...]:
        return (
            Field("key", "e4m3", INDEXER, note="indexer key"),
            Field("key_scale", "f32", 1, plane=1, note="one per key"),
        )

    def encode(
        self,
        key: torch.Tensor,
        value: torch.Tensor | None,
        scales: KVScales = UNIT_SCALES,
    ) -> dict[str, torch.Tensor]:
        x = finite(key)
        step = x.abs().amax(-1, keepdim=True).clamp_(min=_MIN_AMAX) / E4M3_MAX
        if self.power_of_two:
            step = ue8m0_value(ue8m0_ceil(step))
        return {"key": _tile_codes(x.unsqueeze(-2), step), "key_scale": step}

    def decode(
        self,
        fields: Mapping[str, torch.Tensor],
        head_size: int,
        head_size_v: int,
        out_dtype: torch.dtype,
        scales: KVScales = UNIT_SCALES,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        key = saturate(_tile_values(fields["key"], fields["key_scale"]), out_dtype)
        return key, key[..., :0]


def _transposed(x: torch.Tensor, columns: int) -> torch.Tensor:
    return x.unflatten(-1, (-1, columns)).transpose(-1, -2).flatten(-2)


def _joined(
    nope: torch.Tensor, rope: torch.Tensor, out_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    parts = [saturate(nope, out_dtype), saturate(rope, out_dtype)]
    key = torch.cat(parts, dim=-1)
    return key, key[..., :0]


_E4M3 = Tolerance(key=0.03, value=0.0)

FORMATS: tuple[KVFormat, ...] = (
    Fp8DsMla(
        "fp8_ds_mla",
        tolerance=_E4M3,
        summary="DeepSeek latent, e4m3 tiles and exact rope",
    ),
    NvFp4DsMla(
        "nvfp4_ds_mla",
        tolerance=Tolerance(key=0.11, value=0.0),
        summary="DeepSeek latent, e2m1 groups and e4m3 rope",
    ),
)
MODEL_FORMATS: tuple[KVFormat, ...] = (
    DeepSeekV4(
        "deepseek_v4",
        tolerance=_E4M3,
        summary="DeepSeek-V4 latent, power-of-two scales and exact rope",
    ),
    DsaIndexer(
        "dsa_indexer",
        tolerance=_E4M3,
        summary="keys of DeepSeek's sparse-attention indexer",
    ),
    DsaIndexer(
        "dsa_indexer_ue8m0",
        power_of_two=True,
        tolerance=_E4M3,
        summary="indexer keys with power-of-two scales",
    ),
)
