"""Triton's interpreter with the numbers of a GPU: bfloat16, fp8, NaN in minima.

The interpreter of triton 3.7 keeps bfloat16 and fp8 as bit patterns. It adds, compares
and multiplies the patterns, truncates float32 to bfloat16, loses carries and saturation
on the way to fp8, and turns NaN into a minimum. `install` replaces those operations by
torch's conversions and float32 arithmetic. They are private names of triton, so the
version is pinned and `test_interpreter.py` holds a matrix of what must be right.

Whether `@triton.jit` interprets or compiles is decided where a kernel is defined:
`tests/conftest.py` asks for the interpreter before any kernel is imported, unless there
is a GPU. What compiles runs in a process of its own (`tests/triton/compiler.py`).
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter

TORCH_TYPES = {
    tl.float32: torch.float32,
    tl.float64: torch.float64,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
    tl.float8e4b8: torch.float8_e4m3fnuz,
    tl.float8e5b16: torch.float8_e5m2fnuz,
}
# Types that numpy lacks: their handles hold unsigned bit patterns.
AS_BITS = (tl.bfloat16, *(t for t in TORCH_TYPES if t.primitive_bitwidth == 8))

Handle = interpreter.TensorHandle
Builder = interpreter.InterpreterBuilder


def convert(data: np.ndarray, source: Any, target: Any) -> np.ndarray:
    """Data of one Triton float type in another: nearest even, fp8 saturating.

    NaN stays NaN. The result has the numpy type in which handles hold `target`.
    """
    values = torch.from_numpy(np.ascontiguousarray(data).reshape(-1))
    values = values.view(TORCH_TYPES[source])
    if target.primitive_bitwidth == 8:
        limit = torch.finfo(TORCH_TYPES[target]).max
        values = values.float().clamp(-limit, limit)
    out = values.to(TORCH_TYPES[target])
    if target in AS_BITS:
        out = out.view(torch.uint8 if target.primitive_bitwidth == 8 else torch.uint16)
    return out.numpy().reshape(np.shape(data))


def as_float32(handle: Handle) -> np.ndarray:
    return convert(handle.data, handle.dtype.scalar, tl.float32)


def held_as_bits(handle: Handle) -> bool:
    return handle.dtype.scalar in AS_BITS


@np.errstate(all="ignore")
def cast(self: Builder, handle: Handle, dst_type: Any) -> Handle:
    """Any number to any number. float to int truncates towards zero."""
    source, target = handle.dtype.scalar, dst_type.scalar
    data = handle.data
    if source in AS_BITS and target not in AS_BITS:
        data, source = convert(data, source, tl.float32), tl.float32
    elif target in AS_BITS:
        if not source.is_floating():
            data, source = data.astype(np.float32), tl.float32
        return Handle(convert(data, source, target), target)
    return Handle(data.astype(interpreter._get_np_dtype(target)), target)


def cast_float(
    self: Builder, handle: Handle, dst_type: Any, rounding_mode: Any
) -> Handle:
    """fp8 to floats and back. Raises NotImplementedError for other roundings."""
    nearest = interpreter._ir.ROUNDING_MODE.RTNE
    if rounding_mode is not None and rounding_mode != nearest:
        raise NotImplementedError("the interpreter rounds to nearest even only")
    return cast(self, handle, dst_type)


Operation = Callable[..., Handle]


def in_float32(original: Operation) -> Operation:
    """An operation of numpy over numbers instead of bit patterns, rounded once."""

    @np.errstate(all="ignore")  # as on a GPU: infinities and NaN, no warnings
    def operate(self: Builder, *arguments: Any) -> Handle:
        handles = [a for a in arguments if isinstance(a, Handle)]
        kinds = {h.dtype.scalar for h in handles if held_as_bits(h)}
        if not kinds:
            return original(self, *arguments)
        (kind,) = kinds
        widened = [
            Handle(as_float32(a), tl.float32)
            if isinstance(a, Handle) and held_as_bits(a)
            else a
            for a in arguments
        ]
        result = original(self, *widened)
        if not np.issubdtype(result.data.dtype, np.floating):
            return result
        return Handle(convert(result.data, tl.float32, kind), kind)

    return operate


def select(self: Builder, condition: Handle, yes: Handle, no: Handle) -> Handle:
    """Moves bit patterns as they are."""
    return Handle(np.where(condition.data, yes.data, no.data), yes.dtype.scalar)


def clamp(
    self: Builder, x: Handle, low: Handle, high: Handle, propagate_nans: Any
) -> Handle:
    """NaN becomes `low` unless it is asked to stay, as min(max(x, low), high) does."""
    if propagate_nans == interpreter._ir.PROPAGATE_NAN.ALL:
        data = np.clip(x.data, low.data, high.data)
    else:
        data = np.fmin(np.fmax(x.data, low.data), high.data)
    return Handle(data, x.dtype.scalar)


def dot(
    self: Builder,
    a: Handle,
    b: Handle,
    accumulator: Handle,
    input_precision: Any,
    max_num_imprecise_acc: int,
) -> Handle:
    """Matrix product over numbers, in the accumulator's type."""
    left, right = (as_float32(h) if held_as_bits(h) else h.data for h in (a, b))
    kind = accumulator.data.dtype
    product = np.matmul(left.astype(kind), right.astype(kind))
    return Handle(product + accumulator.data, accumulator.dtype.scalar)


def bfloat16_constant(self: Builder, value: float) -> Handle:
    return Handle(
        convert(np.array([value], np.float32), tl.float32, tl.bfloat16), tl.bfloat16
    )


def _fmin(self: Builder, a: Handle, b: Handle) -> Handle:
    return self.binary_op(a, b, np.fmin)


def _fmax(self: Builder, a: Handle, b: Handle) -> Handle:
    return self.binary_op(a, b, np.fmax)


def install() -> None:
    """Puts the operations above into the interpreter, once."""
    if Builder.create_dot is dot:
        return
    Builder.cast_impl = cast
    Builder.create_fp_to_fp = cast_float
    Builder.binary_op = in_float32(Builder.binary_op)
    Builder.create_fma = in_float32(Builder.create_fma)
    Builder.unary_op = in_float32(Builder.unary_op)
    Builder.create_select = select
    Builder.create_minnumf = _fmin
    Builder.create_maxnumf = _fmax
    Builder.create_clampf = in_float32(clamp)
    Builder.create_dot = dot
    Builder.get_bf16 = bfloat16_constant
