"""The operations that layers emit, each with the fields of its record.

Knows what `csrc/cpu/step.h` wants. Refuses to know which layer asks.
"""

import ctypes
from dataclasses import replace
from typing import Any

import torch

from vllm.model_executor.layers.panel_weight import PanelWeight
from vllm.model_executor.step import records
from vllm.model_executor.step.trace import NotPlanned, Slot, StepTrace, TokenIds


def embed_dense(ids: TokenIds, weight: torch.Tensor) -> Slot:
    """Rows of a dense table [vocabulary, size]."""
    trace = ids.trace
    if weight.dtype != trace.dtype or weight.stride(1) != 1:
        raise NotPlanned(f"an embedding table in {weight.dtype}")
    count, size = weight.shape
    out = trace.slot(1, size)
    trace.emit(
        records.EMBED,
        [out],
        [],
        lambda: {
            "out": out.rows(),
            "size": size,
            "limit": count,
            "weight": weight.data_ptr(),
            "weight_stride": weight.stride(0),
            "scale": 1.0,
        },
        keep=weight,
    )
    return out


def embed_panels(ids: TokenIds, weight: PanelWeight) -> Slot:
    """Rows of a table that is kept in panels."""
    trace = ids.trace
    if weight.dtype != trace.dtype:
        raise NotPlanned(f"an embedding table in {weight.dtype}")
    count, size = weight.shape
    out = trace.slot(1, size)

    def make() -> dict[str, Any]:
        args = weight.args(None)
        args.out, args.out_stride = trace.address(out), out.stride
        return {
            "out": out.rows(),
            "size": size,
            "limit": count,
            "scale": 1.0,
            "args": args,
        }

    trace.emit(records.EMBED, [out], [], make, keep=weight)
    return out


def linear(x: Slot, weight: Any, bias: torch.Tensor | None, name: str) -> Slot:
    """x W^T + b; `name` is the layer's, for the reason why there is no plan."""
    trace = x.trace
    if not isinstance(weight, PanelWeight) or weight.dtype != x.dtype:
        raise NotPlanned(f"the weight of {name} is not packed in panels of {x.dtype}")
    outputs, inputs = weight.shape
    if inputs != x.width:
        raise NotPlanned(f"{name} is given {x.width} of {inputs} inputs")
    out = trace.slot(1, outputs, like=x, dtype=x.dtype)

    def make() -> dict[str, Any]:
        args = weight.args(bias)
        args.out, args.out_stride = trace.address(out), out.stride
        args.x, args.x_stride = trace.address(x), x.stride
        return {"size": outputs, "args": args}

    trace.emit(records.LINEAR, [out], [x], make, keep=(weight, bias))
    return out


def rms_norm(
    x: Slot,
    weight: torch.Tensor | None,
    eps: float,
    mode: int,
    residual: Slot | None = None,
) -> Slot | tuple[Slot, Slot]:
    """Over the last axis; with a residual (norm(x + residual), x + residual).

    `weight` is float32 [size]; `mode` one of `records.NORM_…`.
    """
    trace = x.trace
    out = trace.slot(x.heads, x.size, like=x)
    out = replace(out, by_head=x.by_head)
    reads, writes = [x], [out]
    if residual is not None:
        reads.append(residual)
        writes.append(trace.slot(x.heads, x.size, like=x))

    def make() -> dict[str, Any]:
        fields = {
            "mode": mode,
            "heads": x.heads,
            "size": x.size,
            "out": out.rows(),
            "x": x.rows(),
            "weight": None if weight is None else weight.data_ptr(),
            "eps": eps,
        }
        if residual is not None:
            fields |= {"y": residual.rows(), "sum": writes[1].rows()}
        return fields

    trace.emit(records.NORM, writes, reads, make, keep=weight)
    return out if residual is None else (out, writes[1])


def rotate(x: Slot, table: torch.Tensor, rotary_dim: int, mode: int) -> Slot:
    """Heads rotated in place: who gave the slot away does not read it again.

    `table` [positions, rotary_dim]: cosines, then sines.
    """
    if table.dtype != x.dtype:
        raise NotPlanned(f"a table of rotations in {table.dtype}")

    def make() -> dict[str, Any]:
        rows = records.StepRows(x.trace.address(x), x.stride)
        return {
            "mode": mode,
            "heads": x.heads,
            "size": x.head_stride,  # heads may lie apart: their starts are rotated
            "out_size": rotary_dim,
            "limit": table.shape[0],
            "out": rows,
            "x": rows,
            "weight": table.data_ptr(),
            "weight_stride": table.stride(0),
        }

    x.trace.emit(records.ROTATE, [x], [x], make, keep=table)
    return x


def gate(x: Slot, mode: int) -> Slot:
    """The activated first half of a row times its second half."""
    trace, size = x.trace, x.width // 2
    out = trace.slot(1, size, like=x)
    trace.emit(
        records.GATE,
        [out],
        [x],
        lambda: {"mode": mode, "size": size, "out": out.rows(), "x": x.rows()},
    )
    return out


def soft_cap(x: Slot, cap: float) -> Slot:
    """cap * tanh(x / cap), in place."""
    x.trace.emit(
        records.SOFT_CAP,
        [x],
        [x],
        lambda: {"size": x.width, "scale": cap, "out": x.rows(), "x": x.rows()},
    )
    return x


def pick(x: Slot) -> Slot:
    """The rows whose logits are wanted."""
    trace = x.trace
    out = trace.slot(1, x.width, wanted=True)
    trace.emit(
        records.PICK,
        [out],
        [replace(x, wanted=True)],
        lambda: {"size": x.width, "out": out.rows(), "x": x.rows()},
    )
    return out


def route(
    logits: Slot, bias: torch.Tensor | None, **settings: Any
) -> tuple[Slot, Slot]:
    """Weights and experts of router logits; `settings` are fields of RouteArgs."""
    trace, top_k = logits.trace, settings["top_k"]
    weights = trace.slot(1, top_k, dtype=torch.float32, touching=True)
    ids = trace.slot(1, top_k, dtype=torch.int64, touching=True)
    if bias is not None:
        bias = bias.detach().float().contiguous()
    if logits.dtype not in records.DTYPES:
        raise NotPlanned(f"router logits in {logits.dtype}")

    def make() -> dict[str, Any]:
        args = records.RouteArgs(
            ids=trace.address(ids),
            weights=trace.address(weights),
            bias=None if bias is None else bias.data_ptr(),
            num_experts=logits.width,
            **settings,
        )
        dtype = records.DTYPES[logits.dtype]
        return {"x": logits.rows(), "dtype": dtype, "args": args}

    trace.emit(records.ROUTE, [weights, ids], [logits], make, keep=bias)
    return weights, ids


def experts(
    x: Slot, weights: Slot, ids: Slot, args: ctypes.Structure, keep: Any
) -> Slot:
    """The weighted sum of every token's experts: an ExpertsArgs without tokens."""
    trace = x.trace
    out = trace.slot(1, x.width)

    def make() -> dict[str, Any]:
        args.out, args.out_stride = trace.address(out), out.stride
        args.x, args.x_stride = trace.address(x), x.stride
        args.ids, args.weights = trace.address(ids), trace.address(weights)
        args.top_k = ids.width
        return {"size": x.width, "args": args}

    trace.emit(records.EXPERTS, [out], [x, weights, ids], make, keep)
    return out


def _group(trace: StepTrace, layer: str) -> int:
    if layer not in trace.group_of:
        raise NotPlanned(f"{layer} has no KV cache")
    return trace.group_of[layer]


def store(
    layer: str, args: ctypes.Structure, key: Slot, value: Slot | None, keep: Any
) -> None:
    """Key and value [tokens, heads, size], or latents alone, into the layer's cache: a
    StoreArgs without rows and slots. `keep` lives as long as the plan."""
    trace = key.trace
    group = _group(trace, layer)

    def make() -> dict[str, Any]:
        set_rows(args.key, key)
        set_rows(args.value, key if value is None else value)
        if value is None:
            args.value.size = 0
        return {"group": group, "size": key.size, "args": args}

    trace.emit(records.STORE, [], [key] if value is None else [key, value], make, keep)


def attend(
    layer: str, args: ctypes.Structure, query: Slot, head_size_v: int, keep: Any
) -> Slot:
    """Query heads over the layer's cache: an AttentionArgs without rows and batch."""
    trace = query.trace
    group = _group(trace, layer)
    heads = replace(trace.slot(query.heads, head_size_v), by_head=True)

    def make() -> dict[str, Any]:
        set_rows(args.query, query)
        set_rows(args.out, heads)
        args.num_query_heads = query.heads
        return {"group": group, "size": query.size, "args": args}

    trace.emit(records.ATTEND, [heads], [query], make, keep)
    return heads.flat()


def set_rows(rows: Any, slot: Slot) -> None:
    """Fills the `Rows` of csrc/cpu/api.h."""
    rows.data = slot.trace.address(slot)
    rows.token_stride, rows.head_stride = slot.stride, slot.head_stride
    rows.dtype, rows.size = records.DTYPES[slot.dtype], slot.size
