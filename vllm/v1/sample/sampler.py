"""Turns logits into one token per row, with log-probabilities where asked for."""

import torch
from torch import nn

from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.bad_words import apply_bad_words
from vllm.v1.sample.ops.logprobs import (
    compute_logprobs,
    gather_logprobs,
    replace_logprob_tokens,
)
from vllm.v1.sample.ops.penalties import apply_all_penalties
from vllm.v1.sample.ops.topk_topp import draw, greedy_argmax, keep_top_k_top_p_

_GREEDY_EPS = 1e-5


class Sampler(nn.Module):
    """Applies, in order: allowed tokens, bad words, processors that may change the most
    likely token, penalties, temperature, the other processors, top-k, top-p, the draw.

    `logprobs_mode` says what is reported: the distribution of the model ("raw_…") or
    the one that was drawn from ("processed_…"), as logprobs or as logits.
    """

    def __init__(self, logprobs_mode: str = "raw_logprobs") -> None:
        super().__init__()
        self.logprobs_mode = logprobs_mode

    def forward(
        self,
        logits: torch.Tensor | None,
        sampling_metadata: SamplingMetadata,
        greedy: torch.Tensor | None = None,
    ) -> SamplerOutput:
        """`logits` [R, V] of any float dtype; may be overwritten; None where `greedy`
        is given and the batch needs nothing else. `greedy` int64 [R]: the largest of
        them, where that is known. Ids come back as int64 [R, 1]."""
        metadata = sampling_metadata
        if logits is None:
            if greedy is None or metadata.needs_logits():
                raise ValueError("the batch cannot be sampled from without logits")
            return SamplerOutput(greedy.unsqueeze(-1))
        wants_logprobs = metadata.max_num_logprobs is not None
        reported = self._raw(logits) if wants_logprobs else None
        edits = metadata.edits_greedy()
        if metadata.all_greedy and not edits:
            sampled, processed = greedy, logits
            if sampled is None:
                sampled = greedy_argmax(logits)
        else:
            logits = logits.float()
            if edits:
                logits = self.apply_logits_processors(logits, metadata)
            sampled, processed = self.sample(logits, metadata)
        logprobs = None
        if wants_logprobs:
            if reported is None:
                reported = self._processed(processed)
            logprobs = self._gather(reported, metadata, sampled)
        return SamplerOutput(sampled.unsqueeze(-1), logprobs)

    @staticmethod
    def apply_logits_processors(
        logits: torch.Tensor, metadata: SamplingMetadata
    ) -> torch.Tensor:
        """Everything that may change a greedy choice. `logits` float32 [R, V]."""
        if metadata.allowed_token_ids_mask is not None:
            logits.masked_fill_(metadata.allowed_token_ids_mask, -float("inf"))
        if metadata.bad_words_token_ids:
            apply_bad_words(
                logits, metadata.bad_words_token_ids, metadata.output_token_ids
            )
        for processor in metadata.logitsprocs.non_argmax_invariant:
            if processor.is_active():
                logits = processor.apply(logits)
        if not metadata.no_penalties:
            logits = apply_all_penalties(
                logits.contiguous(),
                metadata.prompt_token_ids,
                metadata.presence_penalties,
                metadata.frequency_penalties,
                metadata.repetition_penalties,
                metadata.output_token_ids,
            )
        return logits

    def sample(
        self, logits: torch.Tensor, metadata: SamplingMetadata
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens int64 [R], and the logits they were chosen by (float32 [R, V])."""
        if metadata.all_greedy:
            return greedy_argmax(logits), logits
        greedy = None if metadata.all_random else greedy_argmax(logits)
        temperature = metadata.temperature
        if temperature is None:
            raise ValueError("random rows need a temperature: got None")
        is_greedy = temperature < _GREEDY_EPS
        divisor = torch.where(is_greedy, 1.0, temperature)
        logits = logits.div_(divisor.unsqueeze(1))
        for processor in metadata.logitsprocs.argmax_invariant:
            if processor.is_active():
                logits = processor.apply(logits)
        probs = logits.softmax(dim=-1)
        if metadata.top_k is not None or metadata.top_p is not None:
            keep_top_k_top_p_(probs, metadata.top_k, metadata.top_p)
        sampled = draw(probs, metadata.generators)
        if greedy is not None:
            sampled = torch.where(is_greedy, greedy, sampled)
        if self.logprobs_mode.startswith("processed"):
            logits = logits.masked_fill(probs == 0, -float("inf"))
        return sampled, logits

    def _raw(self, logits: torch.Tensor) -> torch.Tensor | None:
        if self.logprobs_mode == "raw_logprobs":
            return compute_logprobs(logits)
        if self.logprobs_mode == "raw_logits":
            return logits.to(torch.float32, copy=True)
        return None

    def _processed(self, logits: torch.Tensor) -> torch.Tensor:
        if self.logprobs_mode == "processed_logits":
            return logits.float()
        return compute_logprobs(logits)

    @staticmethod
    def _gather(
        logprobs: torch.Tensor, metadata: SamplingMetadata, sampled: torch.Tensor
    ) -> LogprobsTensors:
        tensors = gather_logprobs(logprobs, metadata.max_num_logprobs or 0, sampled)
        if metadata.logprob_token_ids:
            tensors = replace_logprob_tokens(
                tensors, logprobs, metadata.logprob_token_ids
            )
        return tensors
