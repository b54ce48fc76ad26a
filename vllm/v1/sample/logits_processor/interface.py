"""The interface of a logits processor and of the batch changes that it is told."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, TypeAlias

import torch

from vllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class MoveDirectionality(Enum):
    """Whether the first row moves over the second, or both trade places."""

    UNIDIRECTIONAL = auto()
    SWAP = auto()


#: Row that became free.
RemovedRequest: TypeAlias = int
#: Row, its parameters, its prompt (None if it has no ids), and its output so far: the
#: live list, which grows as tokens are sampled.
AddedRequest: TypeAlias = tuple[int, SamplingParams, list[int] | None, list[int]]
#: From row, to row, how.
MovedRequest: TypeAlias = tuple[int, int, MoveDirectionality]


@dataclass(frozen=True)
class BatchUpdate:
    """What changed since the last step; apply `removed`, then `added`, then `moved`.

    An added row may replace a row that was in use: the former request is gone then.
    `batch_size` is the number of requests after all changes.
    """

    batch_size: int
    removed: Sequence[RemovedRequest]
    added: Sequence[AddedRequest]
    moved: Sequence[MovedRequest]


class LogitsProcessor(ABC):
    """Edits the logits of a whole batch; holds state per row."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raises ValueError for a request whose parameters this processor refuses."""
        return

    @abstractmethod
    def __init__(
        self, vllm_config: "VllmConfig", device: torch.device, is_pin_memory: bool
    ) -> None:
        raise NotImplementedError

    @abstractmethod
    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Edits `logits` float32 [R, V], perhaps in place, and returns the result."""
        raise NotImplementedError

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """True if the most likely token of every row stays the same, so that greedy
        requests need not wait for it. Asked once, at construction."""
        raise NotImplementedError

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Called before every step, with None when the batch did not change."""
        raise NotImplementedError

    def is_active(self) -> bool:
        """False promises that `apply` would change nothing now, and is not called."""
        return True
