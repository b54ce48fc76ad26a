"""Dense formats: K and V as plain floats, one after the other.

"auto" stores the model's dtype; resolve it before asking for a format id.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from vllm.v1.kv_formats.base import UNIT_SCALES, KVFormat, KVScales, Tolerance
from vllm.v1.kv_formats.casts import saturate
from vllm.v1.kv_formats.layout import DTYPES, Field
from vllm.v1.kv_formats.mode import KVQuantMode

# torch type -> name and relative RMS rounding error of the dense format that stores it
_STORED = {
    torch.float32: ("float32", 0.0),
    torch.float16: ("float16", 4e-4),
    torch.bfloat16: ("bfloat16", 3e-3),
}


@dataclass(frozen=True)
class Dense(KVFormat):
    """Head vectors in `dtype`; None is "auto", the dtype of the model.

    Values of a wider dtype are clamped to the finite range first, NaN is kept. Equal
    dtypes are copied bit by bit.
    """

    dtype: torch.dtype | None = None
    mode: KVQuantMode = KVQuantMode.NONE

    nonfinite = "kept bit by bit; infinities saturate when the cache dtype is narrower"

    def resolve(self, model_dtype: torch.dtype) -> KVFormat:
        """The named dense format that "auto" stands for."""
        if self.dtype is not None:
            return self
        dtype = self.storage_dtype(model_dtype)
        return dense(dtype).arranged(self.arrangement)

    def storage_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        dtype = self.dtype or model_dtype
        if dtype not in _STORED:
            names = ", ".join(name for name, _ in _STORED.values())
            raise ValueError(
                f"KV cache format {self.name} cannot store model dtype {dtype}: "
                f"expected one of {names}"
            )
        return dtype

    def rows(self, model_dtype: torch.dtype) -> tuple[Field, ...]:
        storage = self.storage_dtype(model_dtype)
        name = next(n for n, d in DTYPES.items() if d.torch_dtype == storage)
        return (
            Field("k", name, of="k", note="key vector"),
            Field("v", name, of="v", note="value vector"),
        )

    def encode(
        self,
        key: torch.Tensor,
        value: torch.Tensor | None,
        scales: KVScales = UNIT_SCALES,
    ) -> dict[str, torch.Tensor]:
        value = key[..., :0] if value is None else value
        dtype = self.storage_dtype(key.dtype)
        return {"k": saturate(key, dtype), "v": saturate(value, dtype)}

    def decode(
        self,
        fields: Mapping[str, torch.Tensor],
        head_size: int,
        head_size_v: int,
        out_dtype: torch.dtype,
        scales: KVScales = UNIT_SCALES,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return saturate(fields["k"], out_dtype), saturate(fields["v"], out_dtype)

    def load(
        self,
        pages: torch.Tensor,
        block_ids: torch.Tensor,
        num_tokens: int,
        head_size: int,
        head_size_v: int,
        out_dtype: torch.dtype,
        scales: KVScales = UNIT_SCALES,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `KVFormat.load`. "auto" takes the type of typed pages, else `out_dtype`.

        Raises ValueError where uint8 pages of "auto" do not have the size of
        `out_dtype`: resolve the format with the model's dtype first.
        """
        if self.dtype is None and pages.dtype in _STORED:
            named = self.resolve(pages.dtype)
            sizes = head_size, head_size_v
            return named.load(pages, block_ids, num_tokens, *sizes, out_dtype, scales)
        return super().load(
            pages, block_ids, num_tokens, head_size, head_size_v, out_dtype, scales
        )


def dense(dtype: torch.dtype) -> Dense:
    """The dense format that stores a torch dtype."""
    name, error = _STORED[dtype]
    return Dense(
        name,
        dtype=dtype,
        tolerance=Tolerance(key=error, value=error),
        summary=f"K and V as {name}",
    )


FORMATS: tuple[KVFormat, ...] = (
    Dense(
        "auto",
        tolerance=dense(torch.bfloat16).tolerance,
        summary="the model's own dtype",
    ),
    *(dense(dtype) for dtype in _STORED),
)
