"""Sampling settings of a batch, one row per request, as persistent arrays.

Knows what the sampler reads. Refuses to know tokens, blocks and schedules.
"""

from typing import Any

import numpy as np
import torch

from vllm.sampling_params import SamplingParams, SamplingType
from vllm.v1.sample.logits_processor import BatchUpdateBuilder, LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.utils import CpuGpuBuffer

# Array attribute -> its torch dtype; the parameter has the singular name.
_FLOAT_COLUMNS = (
    "temperature",
    "top_p",
    "frequency_penalties",
    "presence_penalties",
    "repetition_penalties",
)


class SamplingRows:
    """Settings by row (arrays and dicts) and, by request id, who needs which.

    The sets say which parts of SamplingMetadata can be left out: nothing is computed
    for a setting that no request uses.
    """

    def __init__(
        self,
        max_num_reqs: int,
        device: torch.device,
        vocab_size: int,
        pin_memory: bool,
        logitsprocs: LogitsProcessors | None,
    ) -> None:
        self.max_num_reqs = max_num_reqs
        self.device = device
        self.vocab_size = vocab_size
        self.pin_memory = pin_memory
        self.temperature = self._column(torch.float32)
        self.top_p = self._column(torch.float32)
        self.top_k = self._column(torch.int32)
        self.frequency_penalties = self._column(torch.float32)
        self.presence_penalties = self._column(torch.float32)
        self.repetition_penalties = self._column(torch.float32)

        self.greedy_reqs: set[str] = set()
        self.random_reqs: set[str] = set()
        self.top_p_reqs: set[str] = set()
        self.top_k_reqs: set[str] = set()
        self.penalty_reqs: set[str] = set()
        self.has_allowed_token_ids: set[str] = set()
        # By request id: the number of logprobs; the vocabulary's size for all.
        self.num_logprobs: dict[str, int] = {}

        # By row.
        self.generators: dict[int, torch.Generator] = {}
        self.bad_words_token_ids: dict[int, list[list[int]]] = {}
        self.logprob_token_ids: dict[int, list[int]] = {}
        # bool [max_num_reqs, V], True where forbidden; allocated when first needed.
        self.allowed_token_ids_mask: torch.Tensor | None = None

        self.batch_update_builder = BatchUpdateBuilder()
        self.logitsprocs = logitsprocs or LogitsProcessors()

    def _column(self, dtype: torch.dtype) -> CpuGpuBuffer:
        return CpuGpuBuffer(
            self.max_num_reqs,
            dtype=dtype,
            device=self.device,
            pin_memory=self.pin_memory,
        )

    def set_sampling_row(
        self,
        row: int,
        req_id: str,
        params: SamplingParams,
        generator: torch.Generator | None,
    ) -> None:
        """Writes a request's settings into a row that holds none."""
        is_greedy = params.sampling_type == SamplingType.GREEDY
        (self.greedy_reqs if is_greedy else self.random_reqs).add(req_id)
        self.temperature.np[row] = 0.0 if is_greedy else params.temperature
        self.top_p.np[row] = params.top_p
        if params.top_p < 1.0:
            self.top_p_reqs.add(req_id)
        cuts_by_rank = 0 < params.top_k < self.vocab_size
        self.top_k.np[row] = params.top_k if cuts_by_rank else self.vocab_size
        if cuts_by_rank:
            self.top_k_reqs.add(req_id)
        penalties = (
            params.frequency_penalty,
            params.presence_penalty,
            params.repetition_penalty,
        )
        self.frequency_penalties.np[row] = penalties[0]
        self.presence_penalties.np[row] = penalties[1]
        self.repetition_penalties.np[row] = penalties[2]
        if penalties != (0.0, 0.0, 1.0):
            self.penalty_reqs.add(req_id)
        if generator is not None:
            self.generators[row] = generator
        if params.bad_words_token_ids:
            self.bad_words_token_ids[row] = params.bad_words_token_ids
        self._set_logprobs(row, req_id, params)
        if params.allowed_token_ids:
            self._allow_only(row, params.allowed_token_ids)
            self.has_allowed_token_ids.add(req_id)

    def _set_logprobs(self, row: int, req_id: str, params: SamplingParams) -> None:
        wanted = params.logprobs
        if params.logprob_token_ids:
            self.logprob_token_ids[row] = params.logprob_token_ids
            wanted = wanted or 0
        if wanted is not None:
            self.num_logprobs[req_id] = self.vocab_size if wanted == -1 else wanted

    def _allow_only(self, row: int, token_ids: list[int]) -> None:
        if self.allowed_token_ids_mask is None:
            shape = (self.max_num_reqs, self.vocab_size)
            self.allowed_token_ids_mask = torch.zeros(shape, dtype=torch.bool)
        self.allowed_token_ids_mask[row] = True
        self.allowed_token_ids_mask[row, token_ids] = False

    def clear_sampling_row(self, row: int, req_id: str) -> None:
        """Forgets a request's settings."""
        for reqs in self._request_sets():
            reqs.discard(req_id)
        self.num_logprobs.pop(req_id, None)
        for states in self._row_dicts():
            states.pop(row, None)
        if self.allowed_token_ids_mask is not None:
            self.allowed_token_ids_mask[row] = False

    def move_sampling_row(self, source: int, target: int) -> None:
        """Moves a row's settings over a free row."""
        for column in self._columns():
            column[target] = column[source]
        for states in self._row_dicts():
            states.pop(target, None)
            if source in states:
                states[target] = states.pop(source)
        if self.allowed_token_ids_mask is not None:
            self.allowed_token_ids_mask[target] = self.allowed_token_ids_mask[source]
            self.allowed_token_ids_mask[source] = False

    def swap_sampling_rows(self, i1: int, i2: int) -> None:
        """Exchanges the settings of two rows."""
        for column in self._columns():
            column[i1], column[i2] = column[i2], column[i1]
        for states in self._row_dicts():
            first, second = states.pop(i1, None), states.pop(i2, None)
            if first is not None:
                states[i2] = first
            if second is not None:
                states[i1] = second
        mask = self.allowed_token_ids_mask
        if mask is not None:
            mask[[i1, i2]] = mask[[i2, i1]]

    def _columns(self) -> tuple[np.ndarray, ...]:
        floats = tuple(getattr(self, name).np for name in _FLOAT_COLUMNS)
        return (*floats, self.top_k.np)

    def _row_dicts(self) -> tuple[dict[int, Any], ...]:
        return (self.generators, self.bad_words_token_ids, self.logprob_token_ids)

    def _request_sets(self) -> tuple[set[str], ...]:
        return (
            self.greedy_reqs,
            self.random_reqs,
            self.top_p_reqs,
            self.top_k_reqs,
            self.penalty_reqs,
            self.has_allowed_token_ids,
        )

    def sampling_metadata_of_rows(
        self,
        num_reqs: int,
        prompt_token_ids: torch.Tensor | None,
        output_token_ids: list[list[int]],
    ) -> SamplingMetadata:
        """Metadata of the first rows; on a CPU its tensors are views of the columns."""
        mask = None
        if self.has_allowed_token_ids and self.allowed_token_ids_mask is not None:
            mask = self.allowed_token_ids_mask[:num_reqs].to(self.device)
        greedy = self.all_greedy
        return SamplingMetadata(
            temperature=None if greedy else self.temperature.copy_to_gpu(num_reqs),
            all_greedy=greedy,
            all_random=self.all_random,
            top_p=self.top_p.copy_to_gpu(num_reqs) if self.top_p_reqs else None,
            top_k=self.top_k.copy_to_gpu(num_reqs) if self.top_k_reqs else None,
            generators=dict(self.generators),
            max_num_logprobs=self.max_num_logprobs,
            no_penalties=self.no_penalties,
            prompt_token_ids=prompt_token_ids,
            frequency_penalties=self.frequency_penalties.copy_to_gpu(num_reqs),
            presence_penalties=self.presence_penalties.copy_to_gpu(num_reqs),
            repetition_penalties=self.repetition_penalties.copy_to_gpu(num_reqs),
            output_token_ids=output_token_ids,
            allowed_token_ids_mask=mask,
            bad_words_token_ids=dict(self.bad_words_token_ids),
            logitsprocs=self.logitsprocs,
            logprob_token_ids=dict(self.logprob_token_ids) or None,
        )

    @property
    def all_greedy(self) -> bool:
        return not self.random_reqs

    @property
    def all_random(self) -> bool:
        return not self.greedy_reqs

    @property
    def no_penalties(self) -> bool:
        return not self.penalty_reqs

    @property
    def max_num_logprobs(self) -> int | None:
        """The largest number of logprobs that a request asks for, None without any."""
        return max(self.num_logprobs.values(), default=None)
