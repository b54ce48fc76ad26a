"""A screen for an output head on the CPU: the most likely tokens without the logits.

Knows the C ABI of `csrc/cpu/screen.h`. Beside a packed weight it keeps codes of one
byte and bounds of their errors, by which most of the vocabulary is ruled out; the rest
is multiplied exactly. Refuses to know when logits are needed all the same.
"""

import ctypes
from functools import lru_cache
from types import SimpleNamespace

import torch

from vllm.model_executor.layers.panel_weight import PANEL, LinearArgs, PanelWeight
from vllm.utils.huge_pages import HugePages
from vllm.utils.math_utils import cdiv
from vllm.v1.attention.ops import cpu_functions, cpu_kernels

_CODES_PER_UNIT = 4  # `kCodesPerUnit`
_BOUNDS = 3  # float32 per output: `ScreenBounds`
_UNSUPPORTED = 1

_MEMORY = HugePages(cpu_kernels.advise_huge_pages)


class ScreenArgs(ctypes.Structure):
    _fields_ = (
        ("head", LinearArgs),
        ("codes", ctypes.c_void_p),
        ("bounds", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
    )


class ScreenedHead:
    """The first `outputs` rows of a weight [N, K], as codes and bounds."""

    def __init__(self, weight: PanelWeight, outputs: int) -> None:
        if not serves(weight):
            raise ValueError(
                f"a weight in {weight.dtype} cannot be screened on this machine: ask "
                "serves(weight) first"
            )
        if not 0 < outputs <= weight.shape[0]:
            raise ValueError(
                f"outputs is {outputs}: expected 1 to {weight.shape[0]}, the rows of "
                "the weight"
            )
        self.weight, self.outputs = weight, outputs
        panels = cdiv(outputs, PANEL)
        units = cdiv(weight.shape[1], _CODES_PER_UNIT)
        shape = panels, units * PANEL * _CODES_PER_UNIT
        self.codes = _MEMORY.empty(shape, torch.uint8)
        self.bounds = torch.empty(panels, _BOUNDS, PANEL)
        cpu_kernels.raise_for(_loaded().vllm_cpu_screen_pack(self.args()))

    @property
    def num_bytes(self) -> int:
        """Besides the weight's."""
        return self.codes.nbytes + self.bounds.nbytes

    def args(self) -> ScreenArgs:
        """The kernel's arguments, without rows; valid as long as this."""
        head = self.weight.args(None)
        head.outputs = self.outputs
        return ScreenArgs(
            head=head, codes=self.codes.data_ptr(), bounds=self.bounds.data_ptr()
        )

    def likeliest(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, K] in the weight's dtype -> int64 [T]: the first largest of each row's
        logits, as `PanelWeight.linear` rounds them. NaN is passed over."""
        inputs = self.weight.shape[1]
        if x.dtype != self.weight.dtype or x.dim() != 2 or x.shape[1] != inputs:
            raise ValueError(
                f"x is {x.dtype} {tuple(x.shape)}: expected {self.weight.dtype} "
                f"[tokens, {inputs}]"
            )
        x = x.contiguous()
        tokens = torch.empty(x.shape[0], dtype=torch.int64)
        args = self.args()
        args.head.x, args.head.x_stride = x.data_ptr(), inputs
        args.head.num_rows = x.shape[0]
        args.tokens = tokens.data_ptr()
        cpu_kernels.raise_for(_loaded().vllm_cpu_screen(args))
        return tokens


def serves(weight: PanelWeight) -> bool:
    """Whether this machine has instructions by which a screen of the weight pays."""
    functions = _functions()
    if functions is None:
        return False
    nothing = ScreenArgs(head=weight.args(None))
    nothing.head.outputs = 0
    return functions.vllm_cpu_screen_pack(nothing) != _UNSUPPORTED


def _loaded() -> SimpleNamespace:
    return cpu_functions.required(_functions(), "the screen's kernel")


@lru_cache(maxsize=1)
def _functions() -> SimpleNamespace | None:
    args = (ctypes.POINTER(ScreenArgs),)
    return cpu_functions.bound(
        "vllm_cpu_screen_abi",
        ctypes.sizeof(ScreenArgs),
        {"vllm_cpu_screen_pack": args, "vllm_cpu_screen": args},
    )
