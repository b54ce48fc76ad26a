"""What a step of the model runner returns: plain data."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class LogprobsLists(NamedTuple):
    """Logprobs of sampled tokens, on the host.

    `logprob_token_ids` int [R, n+1], `logprobs` float [R, n+1], `sampled_token_ranks`
    int [R]; column 0 is the sampled token. `cu_num_generated_tokens` gives, for
    requests that got several tokens, the first row of each.
    """

    logprob_token_ids: np.ndarray
    logprobs: np.ndarray
    sampled_token_ranks: np.ndarray
    cu_num_generated_tokens: list[int] | None = None

    def slice_request(self, req_idx: int, num_positions: int) -> "LogprobsLists":
        """The rows of one request."""
        start = (
            self.cu_num_generated_tokens[req_idx]
            if self.cu_num_generated_tokens is not None
            else req_idx
        )
        end = start + num_positions
        return LogprobsLists(
            self.logprob_token_ids[start:end],
            self.logprobs[start:end],
            self.sampled_token_ranks[start:end],
        )


class LogprobsTensors(NamedTuple):
    """Logprobs as tensors: ids [T, n+1], logprobs [T, n+1], ranks [T]."""

    logprob_token_ids: torch.Tensor
    logprobs: torch.Tensor
    selected_token_ranks: torch.Tensor

    def tolists(
        self, cu_num_generated_tokens: list[int] | None = None
    ) -> LogprobsLists:
        return LogprobsLists(
            self.logprob_token_ids.cpu().numpy(),
            self.logprobs.cpu().numpy(),
            self.selected_token_ranks.cpu().numpy(),
            cu_num_generated_tokens,
        )

    @staticmethod
    def empty_cpu(
        num_positions: int, num_tokens_per_position: int
    ) -> "LogprobsTensors":
        """Uninitialised host tensors for `num_positions` rows."""
        shape = (num_positions, num_tokens_per_position)
        return LogprobsTensors(
            torch.empty(shape, dtype=torch.int32),
            torch.empty(shape, dtype=torch.float32),
            torch.empty(num_positions, dtype=torch.int32),
        )


@dataclass
class SamplerOutput:
    """`sampled_token_ids` int [R, 1]; logprobs when any request asks for them."""

    sampled_token_ids: torch.Tensor
    logprobs_tensors: LogprobsTensors | None = None


@dataclass
class KVConnectorOutput:
    """News of a worker's connector: transfers done, failed blocks, statistics.

    `failed_recving` names requests whose load is over and failed as a whole,
    `failure_reasons` why, where a connector says it.
    """

    finished_sending: set[str] | None = None
    finished_recving: set[str] | None = None
    failed_recving: set[str] | None = None
    failure_reasons: dict[str, str] = field(default_factory=dict)
    kv_connector_stats: Any = None
    kv_cache_events: Any = None
    kv_connector_worker_meta: Any = None
    invalid_block_ids: set[int] = field(default_factory=set)
    expected_finished_count: int = 0

    def is_empty(self) -> bool:
        return not (
            self.finished_sending
            or self.finished_recving
            or self.failed_recving
            or self.kv_connector_stats
            or self.kv_cache_events
            or self.kv_connector_worker_meta
            or self.invalid_block_ids
        )


@dataclass
class ECConnectorOutput:
    """News of an encoder-cache connector; none is built in."""

    finished_sending: set[str] | None = None
    finished_recving: set[str] | None = None
    ec_connector_worker_meta: Any = None


@dataclass
class DraftTokenIds:
    """Draft tokens of a speculative step."""

    req_ids: list[str]
    draft_token_ids: list[list[int]]


@dataclass
class ModelRunnerOutput:
    """Sampled tokens of one step, row i for request `req_ids[i]`; an empty row for a
    request whose prompt is not finished."""

    req_ids: list[str]
    req_id_to_index: dict[str, int]
    sampled_token_ids: list[list[int]] = field(default_factory=list)
    logprobs: LogprobsLists | None = None
    prompt_logprobs_dict: dict[str, LogprobsTensors | None] = field(
        default_factory=dict
    )
    pooler_output: list[torch.Tensor | None] | None = None
    kv_connector_output: KVConnectorOutput | None = None
    ec_connector_output: ECConnectorOutput | None = None
    num_nans_in_logits: dict[str, int] | None = None
    cudagraph_stats: Any = None
    routed_experts: Any = None
    sampling_masks: Any = None


EMPTY_MODEL_RUNNER_OUTPUT = ModelRunnerOutput(req_ids=[], req_id_to_index={})


def make_empty_encoder_model_runner_output(
    scheduler_output: "SchedulerOutput",
) -> ModelRunnerOutput:
    """An output with one placeholder token 0 for each scheduled request."""
    req_ids = list(scheduler_output.num_scheduled_tokens)
    if not req_ids:
        return EMPTY_MODEL_RUNNER_OUTPUT
    return ModelRunnerOutput(
        req_ids=req_ids,
        req_id_to_index={req_id: i for i, req_id in enumerate(req_ids)},
        sampled_token_ids=[[0] for _ in req_ids],
    )
