"""Traces a model's forward into operations over static buffers.

A model is not written twice: it is called once with `Slot`s in the place of tensors.
Its own code composes; its layers, which `traces` marks, answer a slot by emitting their
operation (`emit`) and return the slot of the result. Knows buffers, their lifetimes and
views of them. Refuses to know what models are made of.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from vllm.model_executor.step import records
from vllm.utils.math_utils import round_up

_LINE = 64  # bytes of a cache line
_SET = 1024  # rows a multiple of this many bytes apart would share a set of the cache


class NotPlanned(Exception):
    """Says why a model has no plan."""


@dataclass(eq=False)
class Buffer:
    """Rows of one width that the plan holds from operation `first` to `last`."""

    row_bytes: int
    num_rows: int
    first: int
    last: int
    offset: int = -1

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.row_bytes


class Traced:
    """Stands for a tensor while a model is traced; what has no operation is refused."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(function, "__name__", function)
        raise NotPlanned(f"`{name}` of activations has no operation")

    def __getattr__(self, name: str) -> Any:
        raise NotPlanned(f"`{name}` of activations has no operation")


@dataclass(frozen=True, kw_only=True, eq=False)
class Slot(Traced):
    """Rows of activations, one per token: [tokens, heads * size], or with `by_head`
    [tokens, heads, size].

    `start` is an element of the buffer's row. Heads touch, or lie `apart` elements from
    each other as parts of larger ones. `wanted`: the rows are those whose logits are
    wanted.
    """

    trace: StepTrace
    buffer: Buffer
    dtype: torch.dtype
    heads: int
    size: int
    start: int = 0
    by_head: bool = False
    wanted: bool = False
    apart: int | None = None

    @property
    def head_stride(self) -> int:
        """Elements from head to head."""
        return self.size if self.apart is None else self.apart

    @property
    def width(self) -> int:
        return self.heads * self.size

    @property
    def shape(self) -> tuple[int, ...]:
        """As of a tensor; -1 tokens, since every step has its own number."""
        return (-1, self.heads, self.size) if self.by_head else (-1, self.width)

    @property
    def stride(self) -> int:
        """Elements from row to row."""
        return self.buffer.row_bytes // self.dtype.itemsize

    def unflatten(self, dim: int, sizes: Sequence[int]) -> Slot:
        heads, size = sizes
        heads = self.width // size if heads == -1 else heads
        size = self.width // heads if size == -1 else size
        if dim not in (1, -1) or self.by_head or heads * size != self.width:
            raise NotPlanned(f"rows of {self.width} elements by {tuple(sizes)}")
        return replace(self, heads=heads, size=size, by_head=True)

    def flat(self) -> Slot:
        self._check_touching()
        return replace(self, heads=1, size=self.width, by_head=False)

    def __getitem__(self, index: Any) -> Slot:
        """[:, a:b]: some of the heads, or some of the elements of flat rows.
        [:, :, a:b]: some of every head's elements."""
        if self.by_head and len(index) == 3 and index[:2] == (slice(None),) * 2:
            first, last, _ = index[2].indices(self.size)
            size, apart = last - first, self.head_stride
            return replace(self, start=self.start + first, size=size, apart=apart)
        rows, columns = index
        count = self.heads if self.by_head else self.width
        if rows != slice(None) or not isinstance(columns, slice):
            raise NotPlanned(f"the view {index}")
        first, last, step = columns.indices(count)
        if step != 1 or first >= last:
            raise NotPlanned(f"the view {index}")
        if self.by_head:
            start = self.start + first * self.head_stride
            return replace(self, start=start, heads=last - first)
        return replace(self, start=self.start + first, heads=1, size=last - first)

    def __mul__(self, factor: float) -> Slot:
        self.trace.scale(self, float(factor))
        return self

    def __add__(self, other: Slot) -> Slot:
        """An operation of its own: x + y, rounded."""
        out = self.trace.slot(self.heads, self.size, like=self)
        self.trace.emit(
            records.ADD,
            [out],
            [self, other],
            lambda: {
                "out": out.rows(),
                "x": self.rows(),
                "y": other.rows(),
                "size": self.width,
            },
        )
        return out

    def rows(self) -> records.StepRows:
        """For the kernels; once memory is given out."""
        self._check_touching()
        return records.StepRows(self.trace.address(self), self.stride)

    def address_of_buffer(self) -> int:
        buffer = self.trace.stand_ins.get(id(self.buffer), self.buffer)
        return round_up(self.trace.memory.data_ptr(), _LINE) + buffer.offset

    def _check_touching(self) -> None:
        if self.heads > 1 and self.head_stride != self.size:
            raise NotPlanned(f"heads of {self.size} elements that lie apart")


@dataclass(frozen=True)
class TokenIds(Traced):
    """The step's token ids, in the place of a tensor."""

    trace: StepTrace


@dataclass(frozen=True)
class Positions(Traced):
    """The step's positions, in the place of a tensor."""

    trace: StepTrace


def traces(layer: type[nn.Module]) -> type[nn.Module]:
    """Class decorator: a call with a slot, or with the step's ids, goes to `emit`; a
    layer without that has no operation."""
    inner = layer.__call__

    def call(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(x, Traced):
            return inner(self, x, *args, **kwargs)
        if not hasattr(self, "emit"):
            raise NotPlanned(f"{type(self).__name__} has no operation")
        return self.emit(x, *args, **kwargs)

    layer.__call__ = call  # type: ignore[method-assign]
    return layer


@dataclass(frozen=True, kw_only=True, eq=False)
class Detour:
    """What to do before operation `at` of a step that has a query of more than `up_to`
    tokens: compute(rows of x [T, width], rows of out) writes that query's rows, in
    torch. Attention in the KV-cache group is spared them."""

    at: int
    group: int
    x: Slot
    out: Slot
    up_to: int
    compute: Callable[[torch.Tensor, torch.Tensor], None]


@dataclass(eq=False)
class Operation:
    """One operation: what it reads and writes, and how its record is made once memory
    is given out. What `make` returns besides the record must be kept alive.

    `stand_ins`: by id of a buffer, the one that takes its place in this operation.
    """

    kind: int
    make: Callable[[], tuple[records.StepOp, Any]]
    reads: Sequence[Slot] = ()
    writes: Sequence[Slot] = ()
    keep: Any = None
    settings: dict[str, Any] = field(default_factory=dict)
    stand_ins: dict[int, Buffer] = field(default_factory=dict)


class StepTrace:
    """Collects operations, then gives memory to slots and makes the records.

    `group_of` names the KV-cache group of a layer; see `StepInputs` for its batch.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        max_tokens: int,
        max_wanted: int,
        group_of: dict[str, int],
    ) -> None:
        if dtype not in records.DTYPES:
            raise NotPlanned(f"activations in {dtype}")
        self.dtype = dtype
        self.max_tokens, self.max_wanted = max_tokens, max_wanted
        self.group_of = group_of
        self.detours: list[Detour] = []
        self.copied_bytes = 0  # of weights that the plan holds besides the model
        self.ops: list[Operation] = []
        self.token_ids, self.positions = TokenIds(self), Positions(self)
        self.buffers: list[Buffer] = []
        self.stand_ins: dict[int, Buffer] = {}  # of the operation that is being made
        self._produced: dict[int, Operation] = {}  # by id of the slot's buffer
        self._kept: list[Any] = []
        self.memory = torch.empty(0, dtype=torch.uint8)

    # --- for layers -------------------------------------------------------------------

    def slot(
        self,
        heads: int,
        size: int,
        *,
        like: Slot | None = None,
        wanted: bool = False,
        dtype: torch.dtype | None = None,
        touching: bool = False,
    ) -> Slot:
        """Fresh rows, written by the operation that is emitted next, for the tokens
        whose logits are `wanted`, as in the slot they are `like`, or for all. Rows lie
        apart so that they spread over the cache, unless they are `touching`."""
        wanted = wanted or (like is not None and like.wanted)
        dtype = dtype or self.dtype
        row_bytes = heads * size * dtype.itemsize
        if not touching:
            row_bytes = round_up(row_bytes, _LINE)
            row_bytes += _LINE if row_bytes % _SET == 0 else 0
        now = len(self.ops)
        rows = self.max_wanted if wanted else self.max_tokens
        buffer = Buffer(row_bytes, rows, now, now)
        self.buffers.append(buffer)
        return Slot(
            trace=self,
            buffer=buffer,
            dtype=dtype,
            heads=heads,
            size=size,
            by_head=heads > 1,
            wanted=wanted,
        )

    def emit(
        self,
        kind: int,
        writes: Sequence[Slot],
        reads: Sequence[Slot],
        make: Callable[[], dict[str, Any]],
        keep: Any = None,
    ) -> None:
        """Adds an operation. `make` gives the fields of its record, after memory was
        given out; `keep` lives as long as the plan."""
        now = len(self.ops)
        wanted = (*reads, *writes)[0].wanted

        def record() -> tuple[records.StepOp, Any]:
            fields = make()
            args = fields.pop("args", None)
            op = records.StepOp(
                kind=kind,
                dtype=fields.pop("dtype", records.DTYPES[self.dtype]),
                heads=fields.pop("heads", 1),
                tokens=records.WANTED if wanted else records.ALL_TOKENS,
                args=None if args is None else ctypes.addressof(args),
                **fields,
            )
            return op, (args, keep)

        op = Operation(kind, record, reads, writes, keep)
        self.ops.append(op)
        for slot in (*reads, *writes):
            slot.buffer.last = now
        self._produced.update((id(slot.buffer), op) for slot in writes)

    def detour(
        self,
        group: int,
        x: Slot,
        out: Slot,
        up_to: int,
        compute: Callable[[torch.Tensor, torch.Tensor], None],
    ) -> None:
        """Lets `compute` overwrite rows of `out`, which the last operation so far has
        written; see `Detour`."""
        at = len(self.ops)
        x.buffer.last = at - 1  # not yet another's memory when `out` is written
        self.detours.append(
            Detour(at=at, group=group, x=x, out=out, up_to=up_to, compute=compute)
        )

    def scale(self, x: Slot, factor: float) -> None:
        """Multiplies freshly embedded rows."""
        op = self._produced.get(id(x.buffer))
        if op is None or op is not self.ops[-1] or op.kind != records.EMBED:
            raise NotPlanned("a scale of anything but embeddings")
        op.settings["scale"] = factor

    def made_by(self, x: Slot, kind: int) -> Any:
        """What the operation keeps alive that wrote `x` last; None where that is of
        another kind."""
        op = self._produced.get(id(x.buffer))
        return op.keep if op is not None and op.kind == kind else None

    def restrict(self, first: int, tokens: int) -> None:
        """Operations from `first` on, of wanted rows, are for `tokens`: one of
        `records.WANTED_…`."""
        for op in self.ops[first:]:
            op.settings["tokens"] = tokens

    # --- afterwards -------------------------------------------------------------------

    def finish(self, kept: Sequence[Slot]) -> ctypes.Array[records.StepOp]:
        """The records, over memory that buffers share when they do not live at one
        time. `kept` can be read after the step."""
        for slot in kept:
            slot.buffer.last = len(self.ops)
        total = _place(self.buffers)
        self.memory = torch.empty(total + _LINE, dtype=torch.uint8)
        table = (records.StepOp * len(self.ops))()
        for i, op in enumerate(self.ops):
            self.stand_ins = op.stand_ins
            table[i], keep = op.make()
            for name, value in op.settings.items():
                setattr(table[i], name, value)
            self._kept.append(keep)
        self.stand_ins = {}
        return table

    def close(self) -> None:
        """Lets go of weights, pages and memory at once: operations and slots know their
        trace, and would keep all of it until garbage is collected."""
        for things in (self.ops, self.detours, self.buffers, self._kept):
            things.clear()
        self._produced.clear()
        self.stand_ins = {}
        self.memory = torch.empty(0, dtype=torch.uint8)

    def address(self, slot: Slot) -> int:
        return slot.address_of_buffer() + slot.start * slot.dtype.itemsize

    def tensor(self, slot: Slot) -> torch.Tensor:
        """The rows of a slot that holds them by now, [rows, width]."""
        whole = slot.address_of_buffer() - self.memory.data_ptr()
        typed = self.memory[whole : whole + slot.buffer.num_bytes].view(slot.dtype)
        return typed.view(-1, slot.stride)[:, slot.start : slot.start + slot.width]


def _place(buffers: Sequence[Buffer]) -> int:
    """Gives every buffer an offset, the lowest that no living one covers; returns the
    bytes of all."""
    placed: list[Buffer] = []
    total = 0
    for buffer in sorted(buffers, key=lambda b: b.first):
        size = round_up(buffer.num_bytes, _LINE)
        living = [b for b in placed if b.last >= buffer.first]
        offset = 0
        for other in sorted(living, key=lambda b: b.offset):
            if other.offset - offset >= size:
                break
            offset = max(offset, round_up(other.offset + other.num_bytes, _LINE))
        buffer.offset = offset
        placed.append(buffer)
        total = max(total, offset + size)
    return total
