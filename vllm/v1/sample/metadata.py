"""What the sampler reads about a batch; built again only when the batch changes."""

from dataclasses import dataclass
from typing import Any

import torch

from vllm.v1.sample.logits_processor import LogitsProcessors


@dataclass
class SamplingMetadata:
    """Sampling settings of R requests, row by row.

    `temperature`, `top_p` float32 [R] and `top_k` int32 [R] are None when no row needs
    them; a top_k of the vocabulary's size is off. Penalties are float32 [R].
    `prompt_token_ids` int64 [R, P] is padded with the vocabulary's size.
    `output_token_ids` are the requests' live lists. `allowed_token_ids_mask` bool
    [R, V] is True where a token is forbidden. `max_num_logprobs` is None for no
    logprobs, the vocabulary's size for all.
    """

    temperature: torch.Tensor | None
    all_greedy: bool
    all_random: bool
    top_p: torch.Tensor | None
    top_k: torch.Tensor | None
    generators: dict[int, torch.Generator]
    max_num_logprobs: int | None
    no_penalties: bool
    prompt_token_ids: torch.Tensor | None
    frequency_penalties: torch.Tensor
    presence_penalties: torch.Tensor
    repetition_penalties: torch.Tensor
    output_token_ids: list[list[int]]
    allowed_token_ids_mask: torch.Tensor | None
    bad_words_token_ids: dict[int, list[list[int]]]
    logitsprocs: LogitsProcessors
    logprob_token_ids: dict[int, list[int]] | None = None
    spec_token_ids: list[list[int]] | None = None
    thinking_budget_state_holder: Any = None

    def needs_logits(self) -> bool:
        """Whether the batch needs more than the most likely token of every row."""
        reports = self.max_num_logprobs is not None
        return reports or not self.all_greedy or self.edits_greedy()

    def edits_greedy(self) -> bool:
        """Whether anything but temperature changes what a greedy request gets."""
        return not (
            self.no_penalties
            and self.allowed_token_ids_mask is None
            and not self.bad_words_token_ids
            and not self.logitsprocs.edits_greedy()
        )
