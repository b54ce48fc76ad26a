"""From a batch and a schedule to the tensors of one step.

Knows rows, positions, slots and metadata builders. Refuses to know the model and the
sampler. All per-token work is done on arrays; buffers persist between steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.utils import CpuGpuBuffer
from vllm.v1.worker.gpu_input_batch import InputBatch
from vllm.v1.worker.utils import AttentionGroup


@dataclass(kw_only=True)
class StepInputs:
    """One step of R requests and T tokens, request by request in row order.

    `input_ids` and `positions` int64 [T]; `attn_metadata` and `slot_mapping` (int64
    [T]) by layer; `query_start` int32 [R + 1] on the host: first token of each request.
    `samples` bool [R]: all tokens of the request are computed once the step is done.
    """

    num_reqs: int
    num_tokens: int
    input_ids: torch.Tensor
    positions: torch.Tensor
    query_start: np.ndarray
    samples: np.ndarray
    attn_metadata: dict[str, Any]
    slot_mapping: dict[str, torch.Tensor]

    @property
    def last_tokens(self) -> np.ndarray:
        """Index of each request's last token in the step, int32 [R]."""
        return self.query_start[1:] - 1


class InputPreparer:
    """Holds the buffers and fills them for one step after another."""

    def __init__(
        self,
        max_num_reqs: int,
        max_num_tokens: int,
        device: torch.device,
        pin_memory: bool,
        attn_groups: Sequence[Sequence[AttentionGroup]],
    ) -> None:
        self.attn_groups = attn_groups

        def buffer(size: int, dtype: torch.dtype) -> CpuGpuBuffer:
            return CpuGpuBuffer(size, dtype=dtype, device=device, pin_memory=pin_memory)

        self.input_ids = buffer(max_num_tokens, torch.int64)
        self.positions = buffer(max_num_tokens, torch.int64)
        self.query_start_loc = buffer(max_num_reqs + 1, torch.int32)
        self.seq_lens = buffer(max_num_reqs, torch.int32)
        self._tokens_arange = np.arange(max_num_tokens, dtype=np.int64)
        self._reqs_arange = np.arange(max_num_reqs, dtype=np.int64)

    def prepare(self, batch: InputBatch, scheduled: SchedulerOutput) -> StepInputs:
        """The inputs of a step; every request of the batch has at least one token."""
        num_reqs = batch.num_reqs
        counts = scheduled.num_scheduled_tokens
        query_lens = np.fromiter(
            (counts[req_id] for req_id in batch.req_ids), dtype=np.int32, count=num_reqs
        )
        computed = batch.num_computed_tokens_cpu[:num_reqs]
        starts = self.query_start_loc.np
        starts[0] = 0
        np.cumsum(query_lens, out=starts[1 : num_reqs + 1])
        num_tokens = int(starts[num_reqs])
        rows = self._rows_of_tokens(query_lens, num_tokens)
        positions = self.positions.np[:num_tokens]
        np.subtract(
            self._tokens_arange[:num_tokens],
            (starts[:num_reqs] - computed)[rows],
            out=positions,
        )
        tokens = batch.token_ids_cpu
        self.input_ids.np[:num_tokens] = tokens.ravel()[
            rows * tokens.shape[1] + positions
        ]
        seq_lens = self.seq_lens.np[:num_reqs]
        np.add(computed, query_lens, out=seq_lens)
        batch.block_table.compute_slot_mapping(rows, positions)
        metadata, slots = self._attention_metadata(
            batch, num_reqs, num_tokens, query_lens
        )
        return StepInputs(
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            input_ids=self.input_ids.copy_to_gpu(num_tokens),
            positions=self.positions.copy_to_gpu(num_tokens),
            query_start=starts[: num_reqs + 1].copy(),
            samples=seq_lens >= batch.num_tokens_no_spec[:num_reqs],
            attn_metadata=metadata,
            slot_mapping=slots,
        )

    def _rows_of_tokens(self, query_lens: np.ndarray, num_tokens: int) -> np.ndarray:
        rows = self._reqs_arange[: len(query_lens)]
        if num_tokens == len(query_lens):  # one token each, the usual decode step
            return rows
        return np.repeat(rows, query_lens)

    def _attention_metadata(
        self,
        batch: InputBatch,
        num_reqs: int,
        num_tokens: int,
        query_lens: np.ndarray,
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Metadata and slots by layer; layers of one attention group share them."""
        computed = batch.num_computed_tokens_cpu[:num_reqs]
        common: CommonAttentionMetadata | None = None
        metadata: dict[str, Any] = {}
        slots: dict[str, torch.Tensor] = {}
        for groups, table in zip(
            self.attn_groups, batch.block_table.block_tables, strict=True
        ):
            blocks = table.commit_block_table(num_reqs)
            slot_mapping = table.commit_slot_mapping(num_tokens)
            if common is not None:
                common = common.replace(
                    block_table_tensor=blocks, slot_mapping=slot_mapping
                )
            else:
                common = CommonAttentionMetadata(
                    query_start_loc=self.query_start_loc.copy_to_gpu(num_reqs + 1),
                    query_start_loc_cpu=self.query_start_loc.cpu[: num_reqs + 1],
                    seq_lens=self.seq_lens.copy_to_gpu(num_reqs),
                    num_reqs=num_reqs,
                    num_actual_tokens=num_tokens,
                    max_query_len=int(query_lens.max()),
                    max_seq_len=int(self.seq_lens.np[:num_reqs].max()),
                    block_table_tensor=blocks,
                    slot_mapping=slot_mapping,
                    is_prefilling=torch.from_numpy(
                        computed < batch.num_prompt_tokens[:num_reqs]
                    ),
                    _seq_lens_cpu=self.seq_lens.cpu[:num_reqs],
                )
            for group in groups:
                built = group.get_metadata_builder().build(0, common)
                metadata |= dict.fromkeys(group.layer_names, built)
                slots |= dict.fromkeys(group.layer_names, slot_mapping)
        return metadata, slots
