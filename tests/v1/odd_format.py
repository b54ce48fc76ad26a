"""A format and a backend from elsewhere, of a shape that no built-in one has."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.reference import ReferenceAttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_formats import by_name, registry
from vllm.v1.kv_formats.base import UNIT_SCALES, KVFormat, KVScales
from vllm.v1.kv_formats.layout import Field
from vllm.v1.kv_formats.mode import CACHE_DTYPES, KVQuantMode

NAME = "odd"
SIDES = 3


@dataclass(frozen=True)
class Odd(KVFormat):
    """K, V and K again, each a head slot of its own: float32 elements, then a mark.

    Three head slots per KV head of 4 x head size + 1 bytes. Lossless. Shares its mode
    with plain fp8, which would be priced at a sixth of it.
    """

    mode: KVQuantMode = KVQuantMode.FP8_PER_TENSOR

    arrangements: ClassVar[tuple[str, ...]] = ("cells",)

    def rows(self, model_dtype: torch.dtype) -> tuple[Field, ...]:
        rows = []
        for side, of in enumerate("kvk"):
            rows.append(Field(f"side{side}", "f32", of=of, side=side))
            rows.append(Field(f"mark{side}", "u8", 1, side=side))
        return tuple(rows)

    def encode(
        self,
        key: torch.Tensor,
        value: torch.Tensor | None,
        scales: KVScales = UNIT_SCALES,
    ) -> dict[str, torch.Tensor]:
        fields = {}
        for side, x in enumerate((key, value, key)):
            fields[f"side{side}"] = x.float()
            mark = x.new_full((*x.shape[:-1], 1), 65 + side, dtype=torch.uint8)
            fields[f"mark{side}"] = mark
        return fields

    def decode(
        self,
        fields: Mapping[str, torch.Tensor],
        head_size: int,
        head_size_v: int,
        out_dtype: torch.dtype,
        scales: KVScales = UNIT_SCALES,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not torch.equal(fields["side0"], fields["side2"]):
            raise AssertionError("the pages were not read as they were written")
        return fields["side0"].to(out_dtype), fields["side1"].to(out_dtype)


class OddBackend(ReferenceAttentionBackend):
    """Publishes the odd packing, and nothing for other formats."""

    sizes: ClassVar[list[Any]] = [MultipleOf(16)]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[Any]:
        return OddBackend.sizes

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        mine = spec.kv_quant_mode == KVQuantMode.FP8_PER_TENSOR
        return spec.packed(by_name(NAME)) if mine and not spec.is_packed else spec


@contextmanager
def registered() -> Iterator[type[OddBackend]]:
    """The format under its name and the backend under CUSTOM, for a while."""
    registry.register_kv_format(Odd(NAME))
    path = f"{OddBackend.__module__}.{OddBackend.__qualname__}"
    register_backend(AttentionBackendEnum.CUSTOM, path)
    try:
        yield OddBackend
    finally:
        AttentionBackendEnum.CUSTOM.clear_override()
        del registry._ACCEPTED[NAME], CACHE_DTYPES[NAME]
