"""NVFP4: e2m1 codes in groups of 16, one e4m3 scale per group.

A page holds four regions: K codes, K scales, V codes, V scales, each through all heads
of its side, so K and V take a head slot each. K scales lie state by state. V scales
interleave the bytes of 4 states; in the arrangement "linear" they lie state by state.
In "tile16" the sides of 16 states lie together, codes before scales.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from vllm.v1.kv_formats.base import (
    DEFAULT_ARRANGEMENT,
    TILE16,
    UNIT_SCALES,
    KVFormat,
    KVScales,
    Tolerance,
)
from vllm.v1.kv_formats.casts import (
    E2M1_MAX,
    e2m1_encode,
    e2m1_table,
    finite,
    saturate,
    select,
    tree_sum,
)
from vllm.v1.kv_formats.layout import Extent, Field
from vllm.v1.kv_formats.mode import KVQuantMode
from vllm.v1.kv_formats.packing import look_up, pack_bits

GROUP = 16
V_SCALE_INTERLEAVE = 4
LINEAR = "linear"
# Denominators of the group scale: the largest code, and the one below it.
_SIX, _FOUR = E2M1_MAX, 4.0
# Squared errors of a group stay finite below this.
INPUT_LIMIT = 2.0**58

# e2m1 codes [..., G, 16] and e4m3 scales [..., G]
Block = tuple[torch.Tensor, torch.Tensor]


def quantize_group(x: torch.Tensor, denominator: float, global_scale: float) -> Block:
    """Codes and scales of finite float32 groups [..., G, 16].

    scale = e4m3(amax / denominator / global_scale); a zero scale gives zero codes.
    """
    amax = x.abs().amax(-1)
    scale = saturate((amax * (1.0 / denominator)) / global_scale, torch.float8_e4m3fn)
    step = scale.float() * global_scale
    inverse = torch.where(step > 0, 1.0 / step, torch.zeros_like(step))
    return e2m1_encode(x * inverse.unsqueeze(-1)), scale


def _error(x: torch.Tensor, block: Block, global_scale: float) -> torch.Tensor:
    codes, scale = block
    values = select(e2m1_table(x.device), codes)
    step = scale.float() * global_scale
    return tree_sum((values * step.unsqueeze(-1) - x).square()).squeeze(-1)


@dataclass(frozen=True)
class NvFp4(KVFormat):
    """K and V of equal head size. `four_over_six` only changes the choice of scales.

    four_over_six tries amax / 6 and amax / 4 and keeps the second one where its squared
    error over the group is strictly smaller. Readers see the same format.
    """

    mode: KVQuantMode = KVQuantMode.NVFP4
    four_over_six: bool = False

    arrangements = (DEFAULT_ARRANGEMENT, LINEAR, TILE16)
    latent_capable = False
    per_tensor_scales = True
    fits = f"head sizes that are multiples of {GROUP}, equal for K and V"

    def check_head_size(self, head_size: int, head_size_v: int) -> None:
        super().check_head_size(head_size, head_size_v)
        if head_size % GROUP or head_size != head_size_v:
            raise self._misfit(head_size, head_size_v)

    def extent(self) -> Extent:
        return Extent.TILE if self.arrangement == TILE16 else Extent.SIDE

    def rows(self, model_dtype: torch.dtype) -> tuple[Field, ...]:
        step = 1 if self.arrangement == LINEAR else V_SCALE_INTERLEAVE
        return (
            Field("k_codes", "e2m1", of="k", note="key codes"),
            Field(
                "k_scales",
                "e4m3",
                of="k",
                group=GROUP,
                plane=1,
                note="key group scales",
            ),
            Field("v_codes", "e2m1", of="v", side=1, note="value codes"),
            Field(
                "v_scales",
                "e4m3",
                of="v",
                group=GROUP,
                plane=1,
                side=1,
                interleave=step,
                note="value group scales",
            ),
        )

    def encode(
        self,
        key: torch.Tensor,
        value: torch.Tensor | None,
        scales: KVScales = UNIT_SCALES,
    ) -> dict[str, torch.Tensor]:
        if value is None:
            raise self._misfit(key.shape[-1], 0)
        k_codes, k_scales = self.quantize(key, scales.k)
        v_codes, v_scales = self.quantize(value, scales.v)
        return {
            "k_codes": k_codes,
            "k_scales": k_scales,
            "v_codes": v_codes,
            "v_scales": v_scales,
        }

    def quantize(self, x: torch.Tensor, global_scale: float) -> Block:
        """Packed codes [T, heads, size / 2] and scales [T, heads, size / 16]."""
        groups = finite(x, INPUT_LIMIT).unflatten(-1, (-1, GROUP))
        block = quantize_group(groups, _SIX, global_scale)
        if self.four_over_six:
            other = quantize_group(groups, _FOUR, global_scale)
            better = _error(groups, other, global_scale) < _error(
                groups, block, global_scale
            )
            codes = torch.where(better.unsqueeze(-1), other[0], block[0])
            picked = torch.where(better, other[1].float(), block[1].float())
            block = codes, picked.to(torch.float8_e4m3fn)
        return pack_bits(block[0].flatten(-2), 4), block[1]

    def decode(
        self,
        fields: Mapping[str, torch.Tensor],
        head_size: int,
        head_size_v: int,
        out_dtype: torch.dtype,
        scales: KVScales = UNIT_SCALES,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        key = dequantize(fields["k_codes"], fields["k_scales"], scales.k)
        value = dequantize(fields["v_codes"], fields["v_scales"], scales.v)
        return saturate(key, out_dtype), saturate(value, out_dtype)


def dequantize(
    codes: torch.Tensor, scales: torch.Tensor, global_scale: float = 1.0
) -> torch.Tensor:
    """Float32 [..., size] from packed codes [..., size / 2], e4m3 scales [..., G]."""
    size = scales.shape[-1] * GROUP
    values = look_up(codes, 4, size, e2m1_table(codes.device))
    step = scales.float() * global_scale
    return (values.unflatten(-1, (-1, GROUP)) * step.unsqueeze(-1)).flatten(-2)


FORMATS: tuple[KVFormat, ...] = (
    NvFp4(
        "nvfp4",
        tolerance=Tolerance(key=0.11, value=0.11),
        summary="e2m1 codes, an e4m3 scale per 16 elements",
    ),
    NvFp4(
        "nvfp4_4over6",
        four_over_six=True,
        tolerance=Tolerance(key=0.1, value=0.1),
        summary="nvfp4 pages; the better of two group scales is stored",
    ),
)
