"""The requests of the running batch, one row each, in arrays that persist.

Knows tokens, blocks and settings by row. Refuses to know the schedule and the model.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.logits_processor import LogitsProcessors, MoveDirectionality
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.worker.block_table import MultiGroupBlockTable, SlotMappingMode
from vllm.v1.worker.sampling_rows import SamplingRows


@dataclass
class CachedRequestState:
    """A request as the worker keeps it, in the batch or not, until it is finished.

    `block_ids` has one list of manager blocks a group; `output_token_ids` is the live
    list that processors see.
    """

    req_id: str
    prompt_token_ids: list[int] | None
    mm_features: list[MultiModalFeatureSpec]
    sampling_params: SamplingParams | None
    generator: torch.Generator | None
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int
    output_token_ids: list[int]
    mrope_positions: torch.Tensor | None = None
    mrope_position_delta: int | None = None
    xdrope_positions: torch.Tensor | None = None
    lora_request: LoRARequest | None = None
    prompt_embeds: torch.Tensor | None = None
    in_progress_prompt_logprobs_cpu: LogprobsTensors | None = None
    prompt_is_token_ids: list[bool] | None = None
    prev_num_draft_len: int = 0
    pooling_params: PoolingParams | None = None
    pooling_states: Any = None
    num_prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.prompt_token_ids or ())

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of the output so far."""
        return self.num_prompt_tokens + len(self.output_token_ids)

    def get_token_id(self, idx: int) -> int:
        """The token at a position, -1 where there is none yet."""
        if idx < self.num_prompt_tokens:
            return (self.prompt_token_ids or [])[idx]
        idx -= self.num_prompt_tokens
        return self.output_token_ids[idx] if idx < len(self.output_token_ids) else -1


class InputBatch(SamplingRows):
    """Rows 0 … num_reqs - 1 hold the requests of the next step.

    A change of the batch is: `remove_request` …, `add_request` …, `condense`, then
    `refresh_metadata`, which builds `sampling_metadata` again if anything changed and
    must come before the next change. Between removals and `condense` rows may have
    holes.
    """

    def __init__(
        self,
        max_num_reqs: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        device: torch.device,
        vocab_size: int,
        block_sizes: list[int],
        kernel_block_sizes: list[int],
        max_num_blocks_per_req: list[int],
        logitsprocs: LogitsProcessors | None = None,
        logitsprocs_need_output_token_ids: bool = False,
        num_spec_tokens: int = 0,
        is_pooling_model: bool = False,
        cp_kv_cache_interleave_size: int = 1,
        reasoning_config: Any = None,
        use_replayssm: bool = False,
        slot_mapping_modes: list[SlotMappingMode] | None = None,
        pin_memory: bool = False,
    ) -> None:
        super().__init__(max_num_reqs, device, vocab_size, pin_memory, logitsprocs)
        self.max_model_len = max_model_len
        self.max_num_batched_tokens = max_num_batched_tokens
        self.is_pooling_model = is_pooling_model
        self.logitsprocs_need_output_token_ids = logitsprocs_need_output_token_ids
        self._req_ids: list[str | None] = []
        self.req_id_to_index: dict[str, int] = {}
        self.req_output_token_ids: list[list[int] | None] = []
        # Zero pages of this array cost no memory until a token is written.
        self.token_ids_cpu = np.zeros((max_num_reqs, max_model_len), dtype=np.int32)
        self.num_tokens_no_spec = np.zeros(max_num_reqs, dtype=np.int32)
        self.num_prompt_tokens = np.zeros(max_num_reqs, dtype=np.int32)
        self.num_computed_tokens_cpu = np.zeros(max_num_reqs, dtype=np.int32)
        self.block_table = MultiGroupBlockTable(
            max_num_reqs=max_num_reqs,
            max_num_batched_tokens=max_num_batched_tokens,
            pin_memory=pin_memory,
            device=device,
            block_sizes=block_sizes,
            kernel_block_sizes=kernel_block_sizes,
            max_num_blocks=max_num_blocks_per_req,
            cp_kv_cache_interleave_size=cp_kv_cache_interleave_size,
            slot_mapping_modes=slot_mapping_modes,
        )
        self.sampling_metadata = self._make_sampling_metadata()

    @property
    def req_ids(self) -> list[str]:
        """Request ids by row; None only between removal and `condense`."""
        return self._req_ids  # type: ignore[return-value]

    @property
    def num_reqs(self) -> int:
        return len(self.req_id_to_index)

    def add_request(self, request: CachedRequestState) -> int:
        """Puts a request into the lowest free row and returns the row.

        ValueError when the batch is full, or the request has no tokens or parameters.
        """
        params, prompt = request.sampling_params, request.prompt_token_ids
        if params is None or prompt is None:
            raise ValueError(
                f"request {request.req_id!r} has no "
                f"{'prompt_token_ids' if prompt is None else 'sampling_params'}: only "
                "generation from token ids is supported"
            )
        row = self._take_row(request)
        self.batch_update_builder.added.append(
            (row, params, prompt, request.output_token_ids)
        )
        self.req_id_to_index[request.req_id] = row
        num_prompt, num_tokens = request.num_prompt_tokens, request.num_tokens
        self.token_ids_cpu[row, :num_prompt] = prompt
        self.token_ids_cpu[row, num_prompt:num_tokens] = request.output_token_ids
        self.num_prompt_tokens[row] = num_prompt
        self.num_tokens_no_spec[row] = num_tokens
        self.num_computed_tokens_cpu[row] = request.num_computed_tokens
        self.block_table.add_row(request.block_ids, row)
        self.set_sampling_row(row, request.req_id, params, request.generator)
        return row

    def _take_row(self, request: CachedRequestState) -> int:
        row = self.batch_update_builder.pop_removed()
        self.batch_update_builder.batch_changed = True
        if row is None:
            row = len(self._req_ids)
            if row >= self.max_num_reqs:
                raise ValueError(
                    f"request {request.req_id!r} does not fit: the batch already has "
                    f"max_num_seqs = {self.max_num_reqs} requests"
                )
            self._req_ids.append(None)
            self.req_output_token_ids.append(None)
        self._req_ids[row] = request.req_id
        self.req_output_token_ids[row] = request.output_token_ids
        return row

    def remove_request(self, req_id: str) -> int | None:
        """Frees a request's row and returns it, None if the request has none."""
        row = self.req_id_to_index.pop(req_id, None)
        if row is None:
            return None
        self.batch_update_builder.removed_append(row)
        self._req_ids[row] = None
        self.req_output_token_ids[row] = None
        self.block_table.clear_row(row)
        self.clear_sampling_row(row, req_id)
        return row

    def condense(self) -> None:
        """Moves requests from the last rows into free ones until no hole is left."""
        builder = self.batch_update_builder
        num_reqs = self.num_reqs
        last = len(self._req_ids) - 1
        while (hole := builder.peek_removed()) is not None and hole < num_reqs:
            while self._req_ids[last] is None:
                last -= 1
            builder.pop_removed()
            builder.moved.append((last, hole, MoveDirectionality.UNIDIRECTIONAL))
            self._move_row(last, hole)
        del self._req_ids[num_reqs:]
        del self.req_output_token_ids[num_reqs:]

    def _move_row(self, source: int, target: int) -> None:
        req_id = self._req_ids[source]
        self._req_ids[target], self._req_ids[source] = req_id, None
        outputs = self.req_output_token_ids
        outputs[target], outputs[source] = outputs[source], None
        self.req_id_to_index[req_id] = target  # type: ignore[index]
        num_tokens = self.num_tokens_no_spec[source]
        tokens = self.token_ids_cpu
        tokens[target, :num_tokens] = tokens[source, :num_tokens]
        for column in self._counts():
            column[target] = column[source]
        self.block_table.move_row(source, target)
        self.move_sampling_row(source, target)

    def swap_states(self, i1: int, i2: int) -> None:
        """Exchanges two rows."""
        for by_row in (self._req_ids, self.req_output_token_ids):
            by_row[i1], by_row[i2] = by_row[i2], by_row[i1]
        for row in (i1, i2):
            self.req_id_to_index[self.req_ids[row]] = row
        used = max(self.num_tokens_no_spec[[i1, i2]])
        tokens = self.token_ids_cpu
        tokens[[i1, i2], :used] = tokens[[i2, i1], :used]
        for column in self._counts():
            column[i1], column[i2] = column[i2], column[i1]
        self.block_table.swap_row(i1, i2)
        self.swap_sampling_rows(i1, i2)
        self.batch_update_builder.moved.append((i1, i2, MoveDirectionality.SWAP))

    def _counts(self) -> tuple[np.ndarray, ...]:
        return (
            self.num_tokens_no_spec,
            self.num_prompt_tokens,
            self.num_computed_tokens_cpu,
        )

    def refresh_metadata(self) -> None:
        """Tells the processors what changed; rebuilds the metadata if anything did."""
        update = self.batch_update_builder.get_and_reset(self.num_reqs)
        self.logitsprocs.update_state(update)
        if update is not None:
            self.sampling_metadata = self._make_sampling_metadata()

    def _make_sampling_metadata(self) -> SamplingMetadata:
        num_reqs = self.num_reqs
        prompts = None if self.no_penalties else self._make_prompt_token_ids_tensor()
        # The live lists: they grow while this metadata is in use.
        outputs = [
            [] if tokens is None else tokens
            for tokens in self.req_output_token_ids[:num_reqs]
        ]
        return self.sampling_metadata_of_rows(num_reqs, prompts, outputs)

    def _make_prompt_token_ids_tensor(self) -> torch.Tensor:
        """Prompts int64 [R, P], padded with the vocabulary's size."""
        lengths = self.num_prompt_tokens[: self.num_reqs]
        width = int(lengths.max(initial=0))
        prompts = self.token_ids_cpu[: self.num_reqs, :width].astype(np.int64)
        prompts[np.arange(width) >= lengths[:, None]] = self.vocab_size
        return torch.from_numpy(prompts).to(self.device)

    def append_sampled(self, rows: np.ndarray, token_ids: np.ndarray) -> None:
        """Writes one new token for each of `rows` int [n]; rows at the maximum model
        length keep their tokens."""
        ends = self.num_tokens_no_spec[rows]
        fits = ends < self.max_model_len
        if not fits.all():
            rows, ends, token_ids = rows[fits], ends[fits], token_ids[fits]
        self.token_ids_cpu[rows, ends] = token_ids
        self.num_tokens_no_spec[rows] = ends + 1
