"""Spares the end of a step the tokens whose logits nobody wants.

Once the last layer has stored its keys and values, a token is read by others no more:
what follows is computed for wanted tokens only. Knows operations in order, and which of
them need to know a row's token. Refuses to know what they compute.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.model_executor.step import records
from vllm.model_executor.step.trace import Buffer, Operation, Slot, StepTrace

# These go by a row's token id, position or slot.
_OF_THE_STEP = {records.EMBED, records.ROTATE, records.STORE, records.SCALE}


def shorten(trace: StepTrace) -> bool:
    """Lets what comes after the last store take wanted rows, and nothing else. False,
    and nothing changed, where some of it has to see all tokens."""
    stores = [i for i, op in enumerate(trace.ops) if op.kind == records.STORE]
    first = stores[-1] + 1 if stores else len(trace.ops)
    tail = trace.ops[first:]
    if not tail or any(op.kind in _OF_THE_STEP for op in tail):
        return False
    if any(detour.at > first for detour in trace.detours):
        return False
    views = _views_from_before(tail, first)
    if any(view.dtype != trace.dtype for view in views):
        return False
    _take_wanted_rows(trace, first, views)
    return True


@dataclass(frozen=True)
class _View:
    """Elements [start, end) of an earlier buffer's rows, which the tail uses."""

    slot: Slot
    start: int
    end: int

    @property
    def dtype(self) -> Any:
        return self.slot.dtype


def _views_from_before(tail: Iterable[Operation], first: int) -> list[_View]:
    """One for each buffer and type."""
    found: dict[Any, _View] = {}
    for op in tail:
        for slot in (*op.reads, *op.writes):
            if slot.buffer.first >= first:
                continue
            end = slot.start + (slot.heads - 1) * slot.head_stride + slot.size
            key = id(slot.buffer), slot.dtype
            known = found.get(key, _View(slot, slot.start, end))
            start, end = min(known.start, slot.start), max(known.end, end)
            found[key] = _View(slot, start, end)
    return list(found.values())


def _take_wanted_rows(trace: StepTrace, first: int, views: Sequence[_View]) -> None:
    """Puts picks of `views` before the tail, whose operations take what they pick."""
    tail, added = trace.ops[first:], len(views)
    for buffer in trace.buffers:
        if buffer.first >= first:
            buffer.first += added
            buffer.num_rows = trace.max_wanted
        if buffer.last >= first:
            buffer.last += added
    stand_ins: dict[int, Buffer] = {}
    picks: list[Operation] = []
    for view in views:
        whole = view.slot.buffer
        picked = Buffer(whole.row_bytes, trace.max_wanted, first, whole.last)
        whole.last = first + added - 1
        stand_ins[id(whole)] = picked
        trace.buffers.append(picked)
        picks.append(_pick(trace, view, picked))
    for op in tail:
        op.stand_ins = stand_ins
        op.settings.setdefault("tokens", records.WANTED)
        if op.kind == records.PICK:
            op.settings["mode"] = records.PICKED
    trace.ops[first:first] = picks


def _pick(trace: StepTrace, view: _View, out: Buffer) -> Operation:
    slot = view.slot

    def make() -> tuple[records.StepOp, Any]:
        at = view.start * slot.dtype.itemsize
        whole = slot.address_of_buffer()
        picked = whole + out.offset - slot.buffer.offset
        return records.StepOp(
            kind=records.PICK,
            dtype=records.DTYPES[trace.dtype],
            tokens=records.WANTED,
            heads=1,
            size=view.end - view.start,
            out=records.StepRows(picked + at, slot.stride),
            x=records.StepRows(whole + at, slot.stride),
        ), None

    return Operation(records.PICK, make)
