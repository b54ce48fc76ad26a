"""What constrains an output: a grammar that follows one request's tokens."""

from abc import ABC, abstractmethod

import torch


class StructuredOutputGrammar(ABC):
    """The state of one request's output in its grammar."""

    @abstractmethod
    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Moves on by these tokens; False when one of them is not allowed here."""

    @abstractmethod
    def fill_bitmask(self, bitmask: torch.Tensor, batch_index: int) -> None:
        """Writes the tokens that may follow, one bit each, to row `batch_index` of
        `bitmask` int32 [R, ceil(V / 32)]."""

    @abstractmethod
    def is_terminated(self) -> bool:
        """Says whether the output is complete and ended: nothing may follow."""

    @abstractmethod
    def reset(self) -> None:
        """Back to the start of the grammar."""


class StructuredOutputBackend(ABC):
    """Compiles grammars for one tokenizer."""

    @abstractmethod
    def compile(self, params: object, stop_token_id: int | None) -> None:
        """Prepares the grammar of these StructuredOutputsParams. Raises
        VLLMValidationError for one that is not valid. Thread-safe, and free for a
        grammar that was compiled before."""

    @abstractmethod
    def grammar(
        self, params: object, stop_token_id: int | None
    ) -> StructuredOutputGrammar:
        """A grammar at its start, for one request."""
