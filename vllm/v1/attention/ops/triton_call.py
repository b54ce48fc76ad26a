"""One launch of a Triton kernel: what it gets when it runs, and when it is compiled.

The variants that the ahead-of-time compiler checks are made from calls, so they cannot
differ from what is launched. Needs no triton.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from vllm.v1.attention.ops.triton_variants import KernelVariant, warps_on

# Of a warp of the GPUs that this build of torch drives.
_LANES = 64 if torch.version.hip else 32
_POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@dataclass(frozen=True, kw_only=True)
class Call:
    """`arguments` by name: tensors, whole numbers, floats; None where a variant has no
    such argument. `constants` are known to the compiler. Products are not fused with
    sums unless `fuses`: kernels that store bytes promise them to the last bit."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 2
    fuses: bool = False

    def launch(self) -> None:
        """Runs the kernel on its tensors' device."""
        if 0 in self.grid:
            return
        self.kernel[self.grid](
            **self.arguments,
            **self.constants,
            num_warps=warps_on(_LANES, self.num_warps),
            num_stages=self.num_stages,
            enable_fp_fusion=self.fuses,
        )

    def variant(self, name: str) -> KernelVariant:
        """What the compiler makes of this call, under a name of the caller's."""
        given = {k: v for k, v in self.arguments.items() if v is not None}
        absent = {k: None for k in self.arguments if k not in given}
        return KernelVariant(
            name=name,
            fn=self.kernel,
            signature={k: _type_of(v) for k, v in given.items()},
            constexprs={**absent, **self.constants},
            num_warps=self.num_warps,
            num_stages=self.num_stages,
            enable_fp_fusion=self.fuses,
        )


def _type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _POINTERS[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"
