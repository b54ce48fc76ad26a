"""Keeps a request's output inside its grammar."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor.builtin import RowStateProcessor
from vllm.v1.structured_output import backend_for
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_BITS = torch.arange(32, dtype=torch.int32)


@dataclass
class GrammarRow:
    """Where a row is in its grammar: `num_seen` of its output tokens are accepted.

    `left` says that the output left the grammar or ended: only `stop_token_id` follows.
    """

    grammar: StructuredOutputGrammar
    output_ids: list[int]
    stop_token_id: int | None
    num_seen: int = 0
    left: bool = False

    def catch_up(self) -> None:
        """Accepts the tokens that were sampled since the last step."""
        new = self.output_ids[self.num_seen :]
        self.num_seen += len(new)
        if not self.left and new:
            accepted = self.grammar.accept_tokens("", new)
            self.left = not accepted or self.grammar.is_terminated()


class StructuredOutputLogitsProcessor(RowStateProcessor[GrammarRow]):
    """Forbids every token that the grammar does not allow next.

    A grammar wins over min_tokens and ignore_eos: a finished output ends.
    """

    def __init__(
        self, vllm_config: "VllmConfig", device: torch.device, is_pin_memory: bool
    ) -> None:
        super().__init__(vllm_config, device, is_pin_memory)
        self.vllm_config = vllm_config

    def is_argmax_invariant(self) -> bool:
        return False

    def new_state(
        self,
        params: SamplingParams,
        prompt_ids: list[int] | None,
        output_ids: list[int],
    ) -> GrammarRow | None:
        wanted = params.structured_outputs
        if wanted is None:
            return None
        stop = params.eos_token_id
        grammar = backend_for(self.vllm_config.model_config).grammar(wanted, stop)
        return GrammarRow(grammar, output_ids, stop)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if not self.states:
            return logits
        num_tokens = logits.shape[-1]
        words = torch.zeros(1, (num_tokens + 31) // 32, dtype=torch.int32)
        for row, state in self.states.items():
            state.catch_up()
            if state.left:
                self._end(logits[row], state)
                continue
            state.grammar.fill_bitmask(words, 0)
            bits = (words[0].unsqueeze(-1) >> _BITS) & 1
            allowed = bits.flatten()[:num_tokens].bool().to(logits.device)
            self._keep(logits[row], allowed)
        return logits

    @staticmethod
    def _keep(row: torch.Tensor, allowed: torch.Tensor) -> None:
        """`row` [V] without the forbidden tokens. Where other settings forbid all that
        is left, these settings lose."""
        if not torch.isfinite(row[allowed]).any():
            row.zero_()
        row.masked_fill_(~allowed, -float("inf"))

    @staticmethod
    def _end(row: torch.Tensor, state: GrammarRow) -> None:
        if state.stop_token_id is not None:
            row.fill_(-float("inf"))
            row[state.stop_token_id] = 0.0
