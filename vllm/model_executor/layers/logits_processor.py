"""From the last hidden states to logits: head, soft cap, scale."""

import torch
from torch import nn

from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.step import NotPlanned, Slot, ops


class LogitsProcessor(nn.Module):
    """hidden [T, d] -> logits [T, org_vocab_size]."""

    def __init__(
        self,
        vocab_size: int,
        org_vocab_size: int | None = None,
        scale: float = 1.0,
        logits_as_input: bool = False,
        soft_cap: float | None = None,
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.org_vocab_size = org_vocab_size or vocab_size
        self.scale = scale
        self.logits_as_input = logits_as_input
        self.soft_cap = soft_cap

    def forward(
        self,
        lm_head: ParallelLMHead,
        hidden_states: torch.Tensor,
        embedding_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        logits = (
            hidden_states
            if self.logits_as_input
            else lm_head.logits(hidden_states, embedding_bias)
        )
        if logits.shape[-1] != self.org_vocab_size:
            logits = logits[..., : self.org_vocab_size]
        if isinstance(logits, Slot):
            return self.emit(logits)
        if self.soft_cap is not None:
            logits = torch.tanh(logits / self.soft_cap) * self.soft_cap
        return logits if self.scale == 1.0 else logits * self.scale

    def emit(self, logits: Slot) -> Slot:
        if self.scale != 1.0:
            raise NotPlanned("logits with a scale")
        return logits if self.soft_cap is None else ops.soft_cap(logits, self.soft_cap)
