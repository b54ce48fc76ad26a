"""Log-probabilities of prompt tokens, computed chunk by chunk as the prompt is.

Knows hidden states of a step and prompts. Refuses to know the schedule.
"""

from collections.abc import Callable

import torch

from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.ops.logprobs import compute_logprobs, gather_logprobs
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch
from vllm.v1.worker.input_prep import StepInputs

# Prompt positions whose logits exist at one time.
_MAX_LOGITS_ROWS = 256


class PromptLogprobs:
    """Which requests still want prompt logprobs, and what they have so far.

    Position p of a prompt predicts token p + 1, so a prompt of P tokens has P - 1 rows.
    """

    def __init__(
        self, compute_logits: Callable[[torch.Tensor], torch.Tensor], vocab_size: int
    ) -> None:
        self.compute_logits = compute_logits
        self._vocab_size = vocab_size
        self._wanted: dict[str, int] = {}

    def add(self, state: CachedRequestState) -> None:
        """Takes note of a new request."""
        params = state.sampling_params
        if params is not None and params.prompt_logprobs is not None:
            asked = params.prompt_logprobs
            self._wanted[state.req_id] = self._vocab_size if asked == -1 else asked

    def discard(self, req_id: str) -> None:
        """Forgets a finished request."""
        self._wanted.pop(req_id, None)

    @property
    def pending(self) -> bool:
        """Whether a request may still want hidden states of its prompt."""
        return bool(self._wanted)

    def collect(
        self,
        hidden: torch.Tensor | None,
        step: StepInputs,
        batch: InputBatch,
        requests: dict[str, CachedRequestState],
    ) -> dict[str, LogprobsTensors | None]:
        """Adds this step's positions; returns, once, what is complete, by request.

        `hidden` [T, d] are the step's hidden states, None where nothing is `pending`.
        """
        done: dict[str, LogprobsTensors | None] = {}
        if hidden is None:
            return done
        for req_id in list(self._wanted):
            row = batch.req_id_to_index.get(req_id)
            if row is None:
                continue
            state = requests[req_id]
            first = int(batch.num_computed_tokens_cpu[row])
            start, end = step.query_start[row], step.query_start[row + 1]
            self._fill(state, first, hidden[start:end])
            if first + (end - start) >= state.num_prompt_tokens:
                done[req_id] = state.in_progress_prompt_logprobs_cpu
                state.in_progress_prompt_logprobs_cpu = None
                del self._wanted[req_id]
        return done

    def _fill(
        self, state: CachedRequestState, first: int, hidden: torch.Tensor
    ) -> None:
        """Writes the rows of prompt positions `first` … of one request."""
        prompt = state.prompt_token_ids or []
        num_rows, num_logprobs = len(prompt) - 1, self._wanted[state.req_id]
        if state.in_progress_prompt_logprobs_cpu is None:
            state.in_progress_prompt_logprobs_cpu = _unknown(prompt, num_logprobs)
        rows = state.in_progress_prompt_logprobs_cpu
        end = min(first + hidden.shape[0], num_rows)
        for low in range(first, end, _MAX_LOGITS_ROWS):
            high = min(low + _MAX_LOGITS_ROWS, end)
            logits = self.compute_logits(hidden[low - first : high - first])
            targets = torch.tensor(prompt[low + 1 : high + 1], device=logits.device)
            found = gather_logprobs(compute_logprobs(logits), num_logprobs, targets)
            for target, source in zip(rows, found, strict=True):
                target[low:high] = source


def _unknown(prompt: list[int], num_logprobs: int) -> LogprobsTensors:
    """Rows of a prompt before anything is computed: NaN, which remains only where a
    prefix was taken from a cache although prompt logprobs were asked for."""
    rows = LogprobsTensors.empty_cpu(len(prompt) - 1, num_logprobs + 1)
    rows.logprob_token_ids[:] = torch.tensor(prompt[1:], dtype=torch.int32).unsqueeze(1)
    rows.logprobs.fill_(float("nan"))
    rows.selected_token_ranks.zero_()
    return rows
