"""The operations on the heads of rows, and on rows of another type.

Knows what `csrc/cpu/head_ops.cpp` wants. Refuses to know which layer asks.
"""

import ctypes
from dataclasses import replace
from typing import Any

import torch

from vllm.model_executor.layers import screened_head
from vllm.model_executor.layers.panel_weight import PANEL, LinearArgs, PanelWeight
from vllm.model_executor.layers.screened_head import ScreenedHead
from vllm.model_executor.step import records
from vllm.model_executor.step.ops import set_rows
from vllm.model_executor.step.trace import NotPlanned, Slot
from vllm.utils.math_utils import round_up

_MOST_TURNED = 1024  # elements of a block: `kMostTurned`


class HeadWeights:
    """A weight [N, K] for every head, in panels, as `linear` of `panel_weight` has it.

    weight: [heads, N, K], in a type that panels hold; it is copied.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self.heads, self.outputs, self.inputs = weight.shape
        rows = round_up(self.outputs, PANEL)
        padded = weight.new_zeros(self.heads, rows, self.inputs)
        padded[:, : self.outputs] = weight
        self._panels = PanelWeight(padded.flatten(0, 1))

    @property
    def dtype(self) -> torch.dtype:
        return self._panels.dtype

    @property
    def num_bytes(self) -> int:
        return self._panels.data.nbytes

    def args(self) -> ctypes.Array[LinearArgs]:
        """Each head's arguments, without rows; valid as long as this."""
        every = (LinearArgs * self.heads)()
        for head in range(self.heads):
            every[head] = self._panels.args(None)
            every[head].weight += head * self.num_bytes // self.heads
            every[head].outputs = self.outputs
        return every


def head_linear(x: Slot, weights: HeadWeights, beside: Slot | None = None) -> Slot:
    """Every head [K] of x times its own weight: [N], followed by the head of `beside`.

    x [tokens, heads, K], heads touching or not -> [tokens, heads, N + beside's size].
    """
    trace, heads = x.trace, weights.heads
    if (heads, weights.inputs, weights.dtype) != (x.heads, x.size, x.dtype):
        raise NotPlanned(f"{x.heads} heads of {x.size} elements times other weights")
    more = 0 if beside is None else beside.size
    whole = replace(trace.slot(heads, weights.outputs + more), by_head=True)
    out = whole[:, :, : weights.outputs]

    def make() -> dict[str, Any]:
        args, size = weights.args(), x.dtype.itemsize
        for head in range(heads):
            args[head].out = trace.address(out) + head * out.head_stride * size
            args[head].x = trace.address(x) + head * x.head_stride * size
            args[head].out_stride, args[head].x_stride = out.stride, x.stride
        return {"heads": heads, "size": weights.outputs, "args": args}

    trace.copied_bytes += weights.num_bytes
    trace.emit(records.HEAD_LINEAR, [out], [x], make, keep=weights)
    if beside is not None:
        _copy(beside, whole[:, :, weights.outputs :])
    return whole


def joined(x: Slot, y: Slot) -> Slot:
    """The elements of x, then those of y: one head [tokens, 1, both]."""
    trace = x.trace
    whole = replace(trace.slot(1, x.width + y.width), by_head=True)
    _copy(x.flat(), whole.flat()[:, : x.width])
    _copy(y.flat(), whole.flat()[:, x.width :])
    return whole


def _copy(x: Slot, out: Slot) -> None:
    def make() -> dict[str, Any]:
        args = records.CopyArgs()
        set_rows(args.out, out)
        set_rows(args.x, x)
        return {"heads": out.heads, "size": out.size, "args": args}

    if (x.heads, x.size, x.dtype) != (out.heads, out.size, out.dtype):
        raise NotPlanned(f"a copy of {x.shape} in {x.dtype} to {out.shape}")
    x.trace.emit(records.COPY, [out], [x], make)


def turn(x: Slot, signs: torch.Tensor, mode: int) -> Slot:
    """Heads rotated in place, block by block: times `signs`, float32 [block], and the
    Hadamard matrix over its size; `mode` is SIGNS_FIRST or SIGNS_LAST."""
    block = len(signs)
    if x.size % block or block > _MOST_TURNED:
        raise NotPlanned(f"a rotation of {block} of {x.size} elements")

    def make() -> dict[str, Any]:
        return {
            "mode": mode,
            "heads": x.heads,
            "size": x.size,
            "out_size": block,
            "out": x.rows(),
            "x": x.rows(),
            "weight": signs.data_ptr(),
            "scale": 1.0 / block,
        }

    x.trace.emit(records.HADAMARD, [x], [x], make, keep=signs)
    return x


def widen(x: Slot) -> Slot:
    """Rows as float32."""
    if x.dtype is torch.float32:
        return x
    trace = x.trace
    out = trace.slot(1, x.width, like=x, dtype=torch.float32)
    trace.emit(
        records.WIDEN,
        [out],
        [x],
        lambda: {"size": x.width, "out": out.rows(), "x": x.rows()},
    )
    return out


def scale_by_position(x: Slot, factors: torch.Tensor) -> Slot:
    """Rows times `factors` float32 [positions] of their positions, in place: who gave
    the slot away does not read it again."""
    factors = factors.float().contiguous()
    x.trace.emit(
        records.SCALE,
        [x],
        [x],
        lambda: {
            "heads": x.heads,
            "size": x.size,
            "limit": len(factors),
            "out": x.rows(),
            "x": x.rows(),
            "weight": factors.data_ptr(),
        },
        keep=factors,
    )
    return x


def spread(x: Slot, factors: Slot) -> Slot:
    """x [tokens, size] times each of its token's factors, float32 [tokens, k], rounded
    to x's type first: [tokens, k, size], touching from token to token."""
    trace, heads = x.trace, factors.width
    out = replace(trace.slot(heads, x.width, touching=True), by_head=True)
    trace.emit(
        records.SPREAD,
        [out],
        [x, factors],
        lambda: {
            "heads": heads,
            "size": x.width,
            "out": out.rows(),
            "x": x.rows(),
            "y": factors.rows(),
        },
    )
    return out


def head_experts(x: Slot, ids: Slot, args: ctypes.Structure, keep: Any) -> Slot:
    """Each head of x [tokens, k, size], which `spread` made, through the expert of its
    own of `ids` [tokens, k]: an ExpertsArgs without tokens."""
    trace, heads = x.trace, x.heads
    if x.stride != x.width or ids.width != heads:
        raise NotPlanned(f"{heads} heads apart for {ids.width} experts")
    out = replace(trace.slot(heads, x.size, touching=True), by_head=True)
    ones = torch.ones(trace.max_tokens * heads)

    def make() -> dict[str, Any]:
        args.out, args.out_stride = trace.address(out), out.size
        args.x, args.x_stride = trace.address(x), x.size
        args.ids, args.weights = trace.address(ids), ones.data_ptr()
        args.top_k = 1
        return {"heads": heads, "size": x.size, "args": args}

    trace.emit(records.EXPERTS, [out], [x, ids], make, (keep, ones))
    return out


def sum_heads(x: Slot) -> Slot:
    """x [tokens, heads, size] -> [tokens, size]."""
    out = x.trace.slot(1, x.size, like=x)
    x.trace.emit(
        records.SUM_HEADS,
        [out],
        [x],
        lambda: {
            "heads": x.heads,
            "size": x.size,
            "out": out.rows(),
            "x": x.rows(),
        },
    )
    return out


def largest(x: Slot) -> Slot:
    """Which of each row is largest, int64 [tokens, 1], the first of equal ones; NaN is
    passed over."""
    out = x.trace.slot(1, 1, like=x, dtype=torch.int64, touching=True)
    x.trace.emit(
        records.LARGEST,
        [out],
        [x],
        lambda: {"size": x.width, "out": out.rows(), "x": x.rows()},
    )
    return out


def screen_of(logits: Slot) -> ScreenedHead | None:
    """What finds the largest of logits that a linear made, without them; None where
    something else made them, or where that would not be faster."""
    weight, bias = logits.trace.made_by(logits, records.LINEAR) or (None, None)
    if weight is None or bias is not None or logits.start != 0:
        return None
    if not screened_head.serves(weight):
        return None
    return ScreenedHead(weight, logits.width)


def likeliest(x: Slot, screen: ScreenedHead, out: Slot) -> None:
    """What `largest` would find of the logits of x [tokens, K], written to its slot."""

    def make() -> dict[str, Any]:
        args = screen.args()
        args.head.x, args.head.x_stride = x.trace.address(x), x.stride
        args.tokens = x.trace.address(out)
        return {"size": screen.outputs, "args": args}

    x.trace.emit(records.LIKELIEST, [out], [x], make, keep=screen)
