"""Decode steps as captured graphs: one for each of a few batch sizes.

A step in which every request has one token runs as the smallest captured batch that
holds it; the rows that are left are padding, which reads block 0 and writes nothing.
Knows the runner's persistent buffers. Refuses to know kernels: a backend's metadata
builder says whether its batches may be captured.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.worker.block_table import BlockTable
from vllm.v1.worker.device import Graph, RunnerDevice
from vllm.v1.worker.input_prep import InputPreparer, StepInputs
from vllm.v1.worker.utils import AttentionGroup

logger = init_logger(__name__)

_LARGEST_SIZE = 512  # above it a step computes long enough to hide its launches
_SIZE_STEP = 8
_NO_SLOT = -1
_PADDING_LENGTH = 1  # of a sequence in block 0: kernels have at least one key to see


def graph_sizes(max_num_reqs: int, asked: Sequence[int] | None = None) -> list[int]:
    """Batch sizes to capture, ascending: 1, 2, 4, then multiples of 8 up to 512 or the
    most requests of a step; or those that were asked for, as far as a step reaches.

    ValueError for sizes below 1.
    """
    if asked is not None:
        if any(size < 1 for size in asked):
            raise ValueError(
                f"cudagraph_capture_sizes {list(asked)}: expected sizes from 1 on"
            )
        return sorted({size for size in asked if size <= max_num_reqs})
    largest = min(max_num_reqs, _LARGEST_SIZE)
    sizes = {1, 2, 4, *range(_SIZE_STEP, largest + 1, _SIZE_STEP), largest}
    return sorted(size for size in sizes if size <= largest)


def why_not_captured(
    device: RunnerDevice,
    vllm_config: VllmConfig,
    attn_groups: Sequence[Sequence[AttentionGroup]],
) -> str:
    """Why decode steps stay eager, in words; empty when they may be captured."""
    if not device.captures_graphs:
        return f"{device.torch_device.type} captures no graphs"
    if vllm_config.model_config.enforce_eager:
        return "enforce_eager is set"
    if vllm_config.kv_transfer_config is not None:
        return "a KV connector works between layers"
    for groups in attn_groups:
        for group in groups:
            support = type(group.get_metadata_builder()).get_cudagraph_support(
                vllm_config, group.kv_cache_spec
            )
            if support is AttentionCGSupport.NEVER:
                name = group.backend.get_name()
                return f"batches of {name} cannot be captured"
    return ""


class DecodeGraphs:
    """Captures once, then replays. Buffers and tables are the runner's own."""

    def __init__(
        self,
        *,
        device: RunnerDevice,
        vllm_config: VllmConfig,
        model: nn.Module,
        inputs: InputPreparer,
        block_tables: Sequence[BlockTable],
        attn_groups: Sequence[Sequence[AttentionGroup]],
        sizes: Sequence[int],
    ) -> None:
        self.device = device
        self.vllm_config = vllm_config
        self.model = model
        self.inputs = inputs
        self.block_tables = block_tables
        self.attn_groups = attn_groups
        self.sizes = sorted(sizes)
        self._graphs: dict[int, Graph] = {}
        most = self.sizes[-1] if self.sizes else 0
        self._starts_cpu = torch.arange(most + 1, dtype=torch.int32)
        self._starts = self._starts_cpu.to(device.torch_device)

    def capture(self) -> bool:
        """Captures every size, the largest first. False, with a warning, where the
        model's own code cannot be captured, for example because it counts on the host
        which experts it needs."""
        try:
            self._capture_all()
        except RuntimeError as error:
            self._graphs.clear()
            logger.warning(
                "Decode steps run without graphs, because the model cannot be "
                "captured: %s. --enforce-eager starts without trying.",
                str(error).splitlines()[0],
            )
            return False
        logger.info("Decode steps are captured for batches of %s", self.sizes)
        return True

    @torch.inference_mode()
    def _capture_all(self) -> None:
        for size in reversed(self.sizes):
            self._pad(0, size)
            lengths = torch.full((size,), _PADDING_LENGTH, dtype=torch.int32)
            metadata: dict[str, Any] = {}
            slots: dict[str, torch.Tensor] = {}
            for builder, names, common in self._groups(size, lengths):
                built = builder.build_for_cudagraph_capture(common)
                for name in names:
                    metadata[name], slots[name] = built, common.slot_mapping
            self._graphs[size] = self._captured(size, metadata, slots)

    def _captured(
        self, size: int, metadata: dict[str, Any], slots: dict[str, torch.Tensor]
    ) -> Graph:
        ids, positions = self.inputs.input_ids.gpu, self.inputs.positions.gpu

        def run() -> torch.Tensor:
            with set_forward_context(metadata, self.vllm_config, slot_mapping=slots):
                return self.model(ids[:size], positions[:size])

        return self.device.capture(run)

    def run(self, step: StepInputs) -> torch.Tensor | None:
        """Hidden states [R, d] of a step with one token per request, valid until the
        next call; None for any other step, which runs as it is."""
        requests = step.num_reqs
        if step.num_tokens != requests:
            return None
        size = next((s for s in self.sizes if s >= requests), None)
        if size is None:
            return None
        self._pad(requests, size)
        lengths = torch.full((size,), _PADDING_LENGTH, dtype=torch.int32)
        lengths[:requests] = self.inputs.seq_lens.cpu[:requests]
        for builder, _, common in self._groups(size, lengths):
            builder.replan_for_graph(common)
        graph = self._graphs[size]
        graph.replay()
        return graph.output[:requests]

    def _pad(self, first: int, last: int) -> None:
        """Makes rows first ... last - 1 requests of one token that are nobody's."""
        inputs, rows = self.inputs, slice(first, last)
        inputs.query_start_loc.gpu[first : last + 1] = self._starts[first : last + 1]
        if first == last:
            return
        inputs.input_ids.gpu[rows] = 0
        inputs.positions.gpu[rows] = 0
        inputs.seq_lens.gpu[rows] = _PADDING_LENGTH
        for table in self.block_tables:
            table.block_table.gpu[rows, :1] = 0
            table.slot_mapping.gpu[rows] = _NO_SLOT

    def _groups(self, size: int, lengths: torch.Tensor) -> list[tuple[Any, Any, Any]]:
        """(builder, layer names, the batch) of every attention group."""
        inputs, found = self.inputs, []
        for groups, table in zip(self.attn_groups, self.block_tables, strict=True):
            common = CommonAttentionMetadata(
                query_start_loc=inputs.query_start_loc.gpu[: size + 1],
                query_start_loc_cpu=self._starts_cpu[: size + 1],
                seq_lens=inputs.seq_lens.gpu[:size],
                num_reqs=size,
                num_actual_tokens=size,
                max_query_len=1,
                # Of every later batch, too: a captured kernel is not told again.
                max_seq_len=self.vllm_config.model_config.max_model_len,
                block_table_tensor=table.block_table.gpu[:size],
                slot_mapping=table.slot_mapping.gpu[:size],
                _seq_lens_cpu=lengths,
            )
            found += [(g.get_metadata_builder(), g.layer_names, common) for g in groups]
        return found
