"""Applies a schedule to the worker's requests and to its batch.

Knows which requests come, go on, pause and end. Refuses to know tensors of a step.
"""

from collections.abc import Callable

import numpy as np
import torch

from vllm.sampling_params import SamplingType
from vllm.v1.core.sched.output import (
    CachedRequestData,
    NewRequestData,
    SchedulerOutput,
)
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch


class RequestStates:
    """Every unfinished request the worker knows, in the batch or waiting outside it.

    `on_new` and `on_finished` are called for requests that come and (by id) that go.
    """

    def __init__(
        self,
        device: torch.device,
        on_new: Callable[[CachedRequestState], None],
        on_finished: Callable[[str], None],
    ) -> None:
        self.requests: dict[str, CachedRequestState] = {}
        self._device = device
        self._on_new = on_new
        self._on_finished = on_finished

    def apply(self, scheduled: SchedulerOutput, batch: InputBatch) -> None:
        """Brings the batch to exactly the scheduled requests, without holes."""
        for req_id in scheduled.finished_req_ids:
            self._on_finished(req_id)
            self.requests.pop(req_id, None)
            batch.remove_request(req_id)
        cached = scheduled.scheduled_cached_reqs
        self._remove_unscheduled(scheduled, batch)
        entering = self._update_known(cached, batch)
        for data in scheduled.scheduled_new_reqs:
            # An id may be used again once its former request is gone.
            batch.remove_request(data.req_id)
            state = self._new_state(data)
            self.requests[state.req_id] = state
            self._on_new(state)
            entering.append(state)
        for state in entering:
            batch.add_request(state)
        batch.condense()

    @staticmethod
    def _remove_unscheduled(scheduled: SchedulerOutput, batch: InputBatch) -> None:
        """Preempted and paused requests leave the batch; their states stay. Resumed
        ones leave too: they enter again with other blocks."""
        leaving = batch.req_id_to_index.keys() - scheduled.num_scheduled_tokens.keys()
        leaving |= (
            scheduled.scheduled_cached_reqs.resumed_req_ids
            & batch.req_id_to_index.keys()
        )
        for req_id in leaving:
            batch.remove_request(req_id)

    def _update_known(
        self, cached: CachedRequestData, batch: InputBatch
    ) -> list[CachedRequestState]:
        """Takes over the news of known requests; returns those to enter the batch."""
        entering = []
        rows, computed = [], []
        for i, req_id in enumerate(cached.req_ids):
            state = self.requests[req_id]
            state.num_computed_tokens = cached.num_computed_tokens[i]
            new_blocks = cached.new_block_ids[i]
            row = batch.req_id_to_index.get(req_id)
            if req_id in cached.resumed_req_ids:
                self._resume(state, new_blocks, cached.all_token_ids.get(req_id))
            elif new_blocks is not None:
                for ids, added in zip(state.block_ids, new_blocks, strict=True):
                    ids.extend(added)
                if row is not None:
                    batch.block_table.append_row(new_blocks, row)
            if cached.num_output_tokens[i] < len(state.output_token_ids):
                self._truncate(state, cached.num_output_tokens[i], batch, row)
            if row is None:
                entering.append(state)
            else:
                rows.append(row)
                computed.append(state.num_computed_tokens)
        batch.num_computed_tokens_cpu[np.asarray(rows, dtype=np.int64)] = computed
        return entering

    @staticmethod
    def _resume(
        state: CachedRequestState,
        block_ids: tuple[list[int], ...] | None,
        all_token_ids: list[int] | None,
    ) -> None:
        """A preempted request gets other blocks for all its tokens."""
        if block_ids is None:
            raise ValueError(f"request {state.req_id!r} is resumed without blocks")
        state.block_ids = tuple(list(ids) for ids in block_ids)
        if all_token_ids is not None:
            # In place: processors hold this list.
            state.output_token_ids[:] = all_token_ids[state.num_prompt_tokens :]

    @staticmethod
    def _truncate(
        state: CachedRequestState, num_output: int, batch: InputBatch, row: int | None
    ) -> None:
        """The scheduler threw sampled tokens away."""
        del state.output_token_ids[num_output:]
        if row is not None:
            batch.num_tokens_no_spec[row] = state.num_tokens

    def _new_state(self, data: NewRequestData) -> CachedRequestState:
        if data.prompt_embeds is not None or data.lora_request is not None:
            what = "prompt_embeds" if data.lora_request is None else "a LoRA adapter"
            raise ValueError(f"request {data.req_id!r} has {what}: not supported")
        return CachedRequestState(
            req_id=data.req_id,
            prompt_token_ids=data.prompt_token_ids,
            mm_features=data.mm_features,
            sampling_params=data.sampling_params,
            generator=self._generator(data),
            block_ids=tuple(list(ids) for ids in data.block_ids),
            num_computed_tokens=data.num_computed_tokens,
            output_token_ids=[],
        )

    def _generator(self, data: NewRequestData) -> torch.Generator | None:
        params = data.sampling_params
        if params is None or params.sampling_type != SamplingType.RANDOM_SEED:
            return None
        generator = torch.Generator(device=self._device)
        generator.manual_seed(params.seed)  # type: ignore[arg-type]
        return generator
