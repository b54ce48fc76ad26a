"""A whole step of the model as one C++ call.

Knows when a plan serves and what it wants of a step's inputs. The operations are
traced from the model (`model_executor.step`); refuses to know what they are.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import nn

from vllm.logger import init_logger
from vllm.model_executor.step import Detour, NotPlanned, StepTrace, records
from vllm.model_executor.step.program import Program, trace_program
from vllm.utils.mem_utils import format_bytes
from vllm.v1.attention.ops import cpu_kernels
from vllm.v1.worker.input_prep import StepInputs
from vllm.v1.worker.utils import AttentionGroup

logger = init_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class PlannedOutput:
    """What a step leaves behind; the next one overwrites it.

    hidden: [T, d] of all tokens, None where these were not asked for. logits:
    [W, vocabulary] of the wanted tokens, None where only the most likely tokens,
    `likeliest` int64 [W], were.
    """

    hidden: torch.Tensor | None
    logits: torch.Tensor | None
    likeliest: torch.Tensor


class StepPlan:
    """The operations of one model over its own buffers, replayed for every step."""

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype,
        max_tokens: int,
        max_reqs: int,
        groups: Sequence[Sequence[AttentionGroup]],
    ) -> None:
        """Traces the model, whose layers are bound to their pages. Raises NotPlanned
        where something has no operation."""
        function = records.step_function()
        if function is None:
            raise NotPlanned(cpu_kernels.why_unavailable() or "another build's kernels")
        if not getattr(model, "is_traceable", False):
            raise NotPlanned(f"{type(model).__name__} is not made of our layers")
        self._function = function
        flat = [group for of_group in groups for group in of_group]
        group_of = {name: i for i, g in enumerate(flat) for name in g.layer_names}
        self._layers = [group.layer_names[0] for group in flat]  # one for each batch
        self._batches = (records.StepBatch * len(flat))()
        self._trace = partial(
            trace_program, model, dtype, max_tokens, max_reqs, group_of
        )
        self.program = self._trace(short=True)
        self._whole = None if self.program.short else self.program

    @property
    def trace(self) -> StepTrace:
        """Of the program that steps take where nobody asks for every token."""
        return self.program.trace

    def close(self) -> None:
        """Gives weights and memory back at once; nothing runs after it."""
        for program in (self.program, self._whole):
            if program is not None:
                program.trace.close()

    def _program(self, every_token: bool) -> Program:
        """The one that ends with every token is traced when it is asked for."""
        if not every_token:
            return self.program
        if self._whole is None:
            self._whole = self._trace(short=False, screen=self.program.screen)
        return self._whole

    def run(
        self,
        step: StepInputs,
        wanted: np.ndarray,
        *,
        only_tokens: bool,
        every_token: bool,
    ) -> PlannedOutput:
        """Computes the step. `wanted`: int32 [W], the last tokens of all requests, or
        none. `only_tokens`: nothing but their most likely successors is needed;
        `every_token`: hidden states of all tokens are."""
        program = self._program(every_token)
        for i, name in enumerate(self._layers):
            metadata = step.attn_metadata[name]
            self._batches[i] = records.StepBatch(
                metadata.query_start_loc.data_ptr(),
                metadata.seq_lens.data_ptr(),
                metadata.block_table.data_ptr(),
                step.slot_mapping[name].data_ptr(),
                metadata.block_table.stride(0),
                metadata.block_table.shape[1],
                metadata.seq_lens.shape[0],
            )
        tokens = step.num_tokens
        inputs = records.StepInputs(
            step.input_ids.data_ptr(),
            step.positions.data_ptr(),
            wanted.ctypes.data,
            ctypes.cast(self._batches, ctypes.POINTER(records.StepBatch)),
            tokens,
            len(wanted),
            len(self._layers),
            only_tokens,
        )
        begin, detours = 0, self._detours(program, step)
        short = self._only_short_queries(step, detours)
        for group, seq_lens in short.items():
            self._batches[group].seq_lens = seq_lens.data_ptr()
        for detour in detours:
            self._call(program, begin, detour.at, inputs)
            x, out = program.trace.tensor(detour.x), program.trace.tensor(detour.out)
            detour.compute(x[:tokens], out[:tokens])
            begin = detour.at
        self._call(program, begin, len(program.ops), inputs)
        return PlannedOutput(
            hidden=program.hidden[:tokens] if every_token else None,
            logits=None if only_tokens else program.logits[: len(wanted)],
            likeliest=program.likeliest[: len(wanted)],
        )

    def _detours(self, program: Program, step: StepInputs) -> list[Detour]:
        """Those that the longest query of the step makes necessary."""
        detours = program.trace.detours
        if not detours or step.num_tokens <= min(d.up_to for d in detours):
            return []
        longest = int(np.diff(step.query_start).max())
        return [detour for detour in detours if longest > detour.up_to]

    def _only_short_queries(
        self, step: StepInputs, detours: Sequence[Detour]
    ) -> dict[int, torch.Tensor]:
        """By group the lengths of requests, int32 [R]: 0 of those that detours are for,
        whose queries so see no keys."""
        lengths = {}
        for group, up_to in {d.group: d.up_to for d in detours}.items():
            metadata = step.attn_metadata[self._layers[group]]
            is_long = metadata.query_start_loc.diff() > up_to
            lengths[group] = metadata.seq_lens.masked_fill(is_long, 0)
        return lengths

    def _call(
        self, program: Program, begin: int, end: int, inputs: records.StepInputs
    ) -> None:
        """Runs operations [begin, end)."""
        if begin == end:
            return
        result = self._function(program.ops[begin], end - begin, inputs)
        if result:
            records.raise_for(result)


def make_step_plan(
    model: nn.Module,
    dtype: torch.dtype,
    device: torch.device,
    max_tokens: int,
    max_reqs: int,
    groups: Sequence[Sequence[AttentionGroup]],
    *,
    enforce_eager: bool,
) -> StepPlan | None:
    """The model's plan, or None where steps run eager; says which, and why."""
    if device.type != "cpu":
        return None
    if enforce_eager:
        logger.info("Steps run eager: enforce_eager asks for it")
        return None
    try:
        plan = StepPlan(model, dtype, max_tokens, max_reqs, groups)
    except NotPlanned as reason:
        logger.info("Steps run eager, without a plan: %s", reason)
        return None
    program = plan.program
    logger.info(
        "Steps are planned: %d operations in one call, %s of buffers, %s of weights "
        "packed once more, %s to find greedy tokens without logits",
        len(program.ops),
        format_bytes(program.trace.memory.numel()),
        format_bytes(program.trace.copied_bytes),
        format_bytes(0 if program.screen is None else program.screen.num_bytes),
    )
    return plan
