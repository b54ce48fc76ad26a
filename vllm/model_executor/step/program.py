"""A model's step as operations over memory of their own: from token ids to tokens.

Knows in which steps which operations of the output head are needed. Refuses to know
batches and how operations are run.
"""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from vllm.model_executor.layers.screened_head import ScreenedHead
from vllm.model_executor.step import head_ops, ops, records
from vllm.model_executor.step.tail import shorten
from vllm.model_executor.step.trace import Slot, StepTrace


@dataclass(frozen=True, kw_only=True)
class Program:
    """Operations, and where they leave what they compute, for T tokens and W wanted.

    hidden: [T, d], or of a `short` program, which ends with wanted tokens only, [W, d].
    logits: [W, vocabulary]; likeliest: int64 [W], the first largest of each. `screen`
    finds these in steps that need no logits, None: nothing does.
    """

    ops: ctypes.Array[records.StepOp]
    trace: StepTrace
    hidden: torch.Tensor
    logits: torch.Tensor
    likeliest: torch.Tensor
    screen: ScreenedHead | None
    short: bool


def trace_program(
    model: nn.Module,
    dtype: torch.dtype,
    max_tokens: int,
    max_reqs: int,
    group_of: Mapping[str, int],
    *,
    short: bool,
    screen: ScreenedHead | None = None,
) -> Program:
    """Traces the model, whose layers are bound to their pages. `short`: spares the end
    the tokens that are not wanted, where that can be. `screen`: one that was made
    before. Raises NotPlanned where something has no operation."""
    trace = StepTrace(dtype, max_tokens, max_reqs, dict(group_of))
    try:
        return _traced(model, trace, short, screen)
    except BaseException:
        trace.close()
        raise


def _traced(
    model: nn.Module, trace: StepTrace, short: bool, screen: ScreenedHead | None
) -> Program:
    hidden = model(trace.token_ids, trace.positions)
    picked, head = ops.pick(hidden), len(trace.ops)
    logits = model.compute_logits(picked)
    if screen is None:
        screen = head_ops.screen_of(logits)
    largest = head_ops.largest(logits)
    if screen is not None:
        _screen_head(trace, head, picked, screen, largest)
    shortened = short and shorten(trace)
    records_of_ops = trace.finish([hidden, logits, largest])
    return Program(
        ops=records_of_ops,
        trace=trace,
        hidden=trace.tensor(hidden),
        logits=trace.tensor(logits),
        likeliest=trace.tensor(largest).squeeze(1),
        screen=screen,
        short=shortened,
    )


def _screen_head(
    trace: StepTrace, head: int, picked: Slot, screen: ScreenedHead, largest: Slot
) -> None:
    """Operations from `head` on make logits, and find the largest: in steps that need
    nothing but tokens the screen takes their place."""
    trace.restrict(head, records.WANTED_LOGITS)
    screened = len(trace.ops)
    head_ops.likeliest(picked, screen, largest)
    trace.restrict(screened, records.WANTED_TOKENS)
