"""What callers get back for a request."""

from dataclasses import dataclass, field
from typing import Any

from vllm.lora.request import LoRARequest


@dataclass
class Logprob:
    """A token's log probability, its rank (1 is most likely) and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


PromptLogprobs = list[dict[int, Logprob] | None]
SampleLogprobs = list[dict[int, Logprob]]


@dataclass
class CompletionOutput:
    """One continuation: text, tokens and, when it has ended, why."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: SampleLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: LoRARequest | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """A request's prompt and its continuations; `finished` once all have ended."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    prompt_logprobs: PromptLogprobs | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: Any = None
    lora_request: LoRARequest | None = None
    num_cached_tokens: int | None = None
    kv_transfer_params: dict[str, Any] | None = None
    extra: dict[str, Any] = field(default_factory=dict, repr=False)
    # where in `outputs` each continuation is
    _places: dict[int, int] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def add(self, next_output: "RequestOutput", aggregate: bool) -> None:
        """Merges later news: joined when `aggregate`, else replaced."""
        self.finished |= next_output.finished
        # The news of one of several continuations says nothing of those of another.
        self.kv_transfer_params = (
            next_output.kv_transfer_params or self.kv_transfer_params
        )
        # There may be very many, each with news of its own.
        places = self._places
        if len(places) != len(self.outputs):
            places.update((known.index, i) for i, known in enumerate(self.outputs))
        for news in next_output.outputs:
            place = places.get(news.index)
            if place is None:
                places[news.index] = len(self.outputs)
                self.outputs.append(news)
            elif aggregate:
                _extend(self.outputs[place], news)
            else:
                self.outputs[place] = news


def _extend(known: CompletionOutput, news: CompletionOutput) -> None:
    known.text += news.text
    known.token_ids = [*known.token_ids, *news.token_ids]
    if news.logprobs:
        known.logprobs = [*(known.logprobs or []), *news.logprobs]
    known.cumulative_logprob = news.cumulative_logprob
    known.finish_reason = news.finish_reason
    known.stop_reason = news.stop_reason
