"""Weights in panels for the CPU's own linear kernel.

Knows the packing and the C ABI of `csrc/cpu/linear.h`. Serves float32, bfloat16
and float16 on every instruction set. A sum runs over the inputs in order, so that a
row's bits depend on nothing else in the batch, and reading a prompt gives what decoding
it would.
"""

import ctypes
from functools import lru_cache
from types import SimpleNamespace

import torch

from vllm.utils.huge_pages import LARGE, HugePages
from vllm.utils.math_utils import cdiv
from vllm.v1.attention.ops import cpu_functions, cpu_kernels

PANEL = 32  # outputs of a panel: `kPanel`
# Elements per 32-bit unit, and the number of the type.
_UNITS = {torch.float32: (1, 0), torch.float16: (2, 1), torch.bfloat16: (2, 2)}

_MEMORY = HugePages(cpu_kernels.advise_huge_pages)


class LinearArgs(ctypes.Structure):
    _fields_ = (
        ("out", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("out_stride", ctypes.c_int64),
        ("x_stride", ctypes.c_int64),
        ("num_rows", ctypes.c_int32),
        ("inputs", ctypes.c_int32),
        ("outputs", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
    )


class PanelWeight:
    """A weight [N, K] in a type of `_UNITS`, as [N / 32, units of K, 32 units].

    N and K are filled up with zeros to whole panels and units. A weight whose holders,
    `dropped_by` modules, all drop it becomes panels where it lies, if they fill its
    memory exactly.
    """

    def __init__(self, weight: torch.Tensor, dropped_by: int = 0) -> None:
        if weight.dtype not in _UNITS or weight.dim() != 2:
            raise ValueError(
                f"the weight is {weight.dtype} of shape {tuple(weight.shape)}: "
                "expected float32, bfloat16 or float16 [outputs, inputs]"
            )
        self.shape = weight.shape
        self.dtype = weight.dtype
        outputs, inputs = weight.shape
        elems, self._number = _UNITS[weight.dtype]
        shape = cdiv(outputs, PANEL), cdiv(inputs, elems), PANEL * elems
        taken = (
            dropped_by > 0
            and dropped_by == getattr(weight, "holders", 0)
            and weight.is_contiguous()
            and _fills_panels(weight.shape, weight.dtype)
        )
        weight = weight.detach()
        self.data = weight.view(shape) if taken else _MEMORY.empty(shape, weight.dtype)
        self._move(weight if weight.stride(1) == 1 else weight.contiguous(), back=False)
        self._bias: tuple[torch.Tensor, torch.Tensor] | None = None

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [..., K] -> [..., N], both in the weight's dtype, plus `bias` [N].

        Sums are float32 and start from the bias; only the result is rounded.
        """
        outputs, inputs = self.shape
        if x.dtype != self.dtype or x.shape[-1] != inputs:
            raise ValueError(
                f"x is {x.dtype} {tuple(x.shape)}: expected {self.dtype} "
                f"[..., {inputs}]"
            )
        rows = x if x.dim() == 2 else x.reshape(-1, inputs)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        out = torch.empty(rows.shape[0], outputs, dtype=self.dtype)
        args = self.args(bias)
        args.out, args.x = out.data_ptr(), rows.data_ptr()
        args.out_stride, args.x_stride = outputs, rows.stride(0)
        args.num_rows = rows.shape[0]
        cpu_kernels.raise_for(_loaded().vllm_cpu_linear(args))
        return out if x.dim() == 2 else out.view(*x.shape[:-1], outputs)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """ids int64 [T] -> those rows of the weight, [T, K]. IndexError outside."""
        ids = ids.contiguous()
        out = torch.empty(ids.shape[0], self.shape[1], dtype=self.dtype)
        args = self.args(None)
        args.out, args.out_stride = out.data_ptr(), out.shape[1]
        args.num_rows = out.shape[0]
        address = cpu_kernels.vector_at("ids", ids, torch.int64)
        if _loaded().vllm_cpu_gather(args, address):
            raise IndexError(
                f"an id is outside of the {self.shape[0]} rows of the weight"
            )
        return out

    def args(self, bias: torch.Tensor | None) -> LinearArgs:
        """The kernel's arguments, without rows; valid as long as this and `bias`."""
        outputs, inputs = self.shape
        return LinearArgs(
            weight=self.data.data_ptr(),
            bias=None if bias is None else self._packed_bias(bias).data_ptr(),
            inputs=inputs,
            outputs=outputs,
            dtype=self._number,
        )

    def to_dense(self) -> torch.Tensor:
        """A fresh row-major copy of the weight, [N, K]."""
        dense = torch.empty(self.shape, dtype=self.dtype)
        self._move(dense, back=True)
        return dense

    def _packed_bias(self, bias: torch.Tensor) -> torch.Tensor:
        """Float32, filled up; kept for the bias that was asked for last."""
        if self._bias is None or self._bias[0] is not bias:
            padding = self.data.shape[0] * PANEL - self.shape[0]
            packed = torch.nn.functional.pad(bias.detach().float(), (0, padding))
            self._bias = bias, packed
        return self._bias[1]

    def _move(self, dense: torch.Tensor, *, back: bool) -> None:
        size = dense.element_size()
        _loaded().vllm_cpu_pack(
            self.data.data_ptr(),
            dense.data_ptr(),
            dense.stride(0) * size,
            dense.shape[1] * size,
            dense.shape[0],
            back,
        )


def room_for(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Like `torch.empty` on the host, for a weight: one that panels fill, and a large
    one, lies on huge pages, so that packing may leave it there."""
    if _fills_panels(shape, dtype) or shape.numel() * dtype.itemsize > LARGE:
        return _MEMORY.empty(shape, dtype)
    return torch.empty(shape, dtype=dtype)


def _fills_panels(shape: torch.Size, dtype: torch.dtype) -> bool:
    """Whether a weight is whole panels of whole units."""
    if dtype not in _UNITS or len(shape) != 2:
        return False
    return shape[0] % PANEL == 0 and shape[1] % _UNITS[dtype][0] == 0


def count_holder(weight: torch.nn.Parameter) -> None:
    """Notes that one more module holds a parameter whose memory is from `room_for`."""
    weight.holders = getattr(weight, "holders", 0) + 1  # type: ignore[attr-defined]


def serves(weight: torch.Tensor) -> bool:
    """Whether the kernel is there and takes this weight."""
    fits = weight.device.type == "cpu" and weight.dtype in _UNITS and weight.dim() == 2
    return fits and min(weight.shape) > 0 and _functions() is not None


def _loaded() -> SimpleNamespace:
    return cpu_functions.required(_functions(), "the linear kernel")


@lru_cache(maxsize=1)
def _functions() -> SimpleNamespace | None:
    args, pointer, size = ctypes.POINTER(LinearArgs), ctypes.c_void_p, ctypes.c_int64
    return cpu_functions.bound(
        "vllm_cpu_linear_abi",
        ctypes.sizeof(LinearArgs),
        {
            "vllm_cpu_linear": (args,),
            "vllm_cpu_gather": (args, pointer),
            "vllm_cpu_pack": (pointer, pointer, size, size, size, ctypes.c_int32),
        },
    )
