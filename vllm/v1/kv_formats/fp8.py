"""fp8 with one scale per tensor: code = fp8(x / scale), one byte per element.

The scale belongs to the layer, not to the page.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from vllm.v1.kv_formats.base import UNIT_SCALES, KVFormat, KVScales, Tolerance
from vllm.v1.kv_formats.casts import saturate, widen
from vllm.v1.kv_formats.layout import DTYPES, Field
from vllm.v1.kv_formats.mode import KVQuantMode


@dataclass(frozen=True)
class Fp8PerTensor(KVFormat):
    """K then V in `element` ("e4m3" or "e5m2"), round to nearest even, saturating."""

    element: str = "e4m3"
    typed: bool = False  # the cache tensor has the fp8 type instead of uint8
    mode: KVQuantMode = KVQuantMode.FP8_PER_TENSOR

    per_tensor_scales = True
    nonfinite = "NaN is kept as NaN, infinities saturate"

    def storage_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        return self._code_dtype() if self.typed else torch.uint8

    def _code_dtype(self) -> torch.dtype:
        dtype = DTYPES[self.element].torch_dtype
        if dtype is None:
            raise ValueError(f"{self.element} is not an fp8 type: use e4m3 or e5m2")
        return dtype

    def rows(self, model_dtype: torch.dtype) -> tuple[Field, ...]:
        return (
            Field("k", self.element, of="k", note="key / k_scale of the layer"),
            Field("v", self.element, of="v", note="value / v_scale of the layer"),
        )

    def encode(
        self,
        key: torch.Tensor,
        value: torch.Tensor | None,
        scales: KVScales = UNIT_SCALES,
    ) -> dict[str, torch.Tensor]:
        value = key[..., :0] if value is None else value
        dtype = self._code_dtype()
        return {
            "k": saturate(_divided(key, scales.k), dtype),
            "v": saturate(_divided(value, scales.v), dtype),
        }

    def decode(
        self,
        fields: Mapping[str, torch.Tensor],
        head_size: int,
        head_size_v: int,
        out_dtype: torch.dtype,
        scales: KVScales = UNIT_SCALES,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        key = widen(fields["k"]) * scales.k
        value = widen(fields["v"]) * scales.v
        return saturate(key, out_dtype), saturate(value, out_dtype)


def _divided(x: torch.Tensor, scale: float) -> torch.Tensor:
    return x if scale == 1.0 else x.float() / scale


_E4M3 = Tolerance(key=0.03, value=0.03)
_E5M2 = Tolerance(key=0.06, value=0.06)

FORMATS: tuple[KVFormat, ...] = (
    Fp8PerTensor(
        "fp8", alias_of="fp8_e4m3", tolerance=_E4M3, summary="the same as fp8_e4m3"
    ),
    Fp8PerTensor(
        "fp8_e4m3", tolerance=_E4M3, summary="e4m3 codes, a scale per layer and side"
    ),
    Fp8PerTensor(
        "fp8_e5m2",
        element="e5m2",
        tolerance=_E5M2,
        summary="e5m2 codes, a scale per layer and side",
    ),
    Fp8PerTensor(
        "fp8_inc",
        alias_of="fp8_e4m3",
        typed=True,
        tolerance=_E4M3,
        summary="e4m3 codes in a cache tensor of that type",
    ),
)
