"""Built-in processors: min-p, logit bias, and stop tokens before min_tokens."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor.interface import (
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

T = TypeVar("T")
NewState = Callable[[SamplingParams, list[int] | None, list[int]], T | None]


def process_dict_updates(
    states: dict[int, T], batch_update: BatchUpdate | None, new_state: NewState[T]
) -> bool:
    """Carries a batch change over to a dict of per-row states; says if it changed.

    `new_state` gives the state of an added request, None when it needs none.
    """
    if batch_update is None:
        return False
    changed = False
    for row in batch_update.removed:
        changed |= states.pop(row, None) is not None
    for row, params, prompt_ids, output_ids in batch_update.added:
        state = new_state(params, prompt_ids, output_ids)
        changed |= states.pop(row, None) is not None or state is not None
        if state is not None:
            states[row] = state
    for source, target, direction in batch_update.moved:
        moving, staying = states.pop(source, None), states.pop(target, None)
        changed |= moving is not None or staying is not None
        if moving is not None:
            states[target] = moving
        if staying is not None and direction is MoveDirectionality.SWAP:
            states[source] = staying
    return changed


class RowStateProcessor(LogitsProcessor, Generic[T]):
    """A processor that only some rows need: keeps their states, idles without any."""

    def __init__(
        self, vllm_config: "VllmConfig", device: torch.device, is_pin_memory: bool
    ) -> None:
        self.device = device
        self.states: dict[int, T] = {}

    def is_active(self) -> bool:
        return bool(self.states)

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if process_dict_updates(self.states, batch_update, self.new_state):
            self.rows_changed()

    def new_state(
        self,
        params: SamplingParams,
        prompt_ids: list[int] | None,
        output_ids: list[int],
    ) -> T | None:
        """State of an added request; None when the processor does not concern it."""
        raise NotImplementedError

    def rows_changed(self) -> None:
        """Rebuilds what is derived from `states`."""


class MinPLogitsProcessor(RowStateProcessor[float]):
    """Drops tokens less likely than min_p times the most likely one."""

    def __init__(
        self, vllm_config: "VllmConfig", device: torch.device, is_pin_memory: bool
    ) -> None:
        super().__init__(vllm_config, device, is_pin_memory)
        self._rows = torch.empty(0, dtype=torch.int64, device=device)
        self._log_min_p = torch.empty((0, 1), dtype=torch.float32, device=device)

    def is_argmax_invariant(self) -> bool:
        return True

    def get_min_p_by_index(self, index: int) -> float:
        """min_p of a row, 0 when it is off."""
        return self.states.get(index, 0.0)

    def new_state(
        self,
        params: SamplingParams,
        prompt_ids: list[int] | None,
        output_ids: list[int],
    ) -> float | None:
        return params.min_p or None

    def rows_changed(self) -> None:
        rows = sorted(self.states)
        self._rows = torch.tensor(rows, dtype=torch.int64, device=self.device)
        values = torch.tensor([self.states[row] for row in rows], device=self.device)
        self._log_min_p = values.log().unsqueeze(1)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if not self.states:
            return logits
        chosen = logits[self._rows]
        # p < min_p * p_max, in logarithms.
        floor = chosen.amax(dim=-1, keepdim=True) + self._log_min_p
        logits[self._rows] = chosen.masked_fill_(chosen < floor, -float("inf"))
        return logits


class _FlatEdits:
    """(row, token) positions, with a value each, as tensors on the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.assign([], [], [])

    def assign(self, rows: list[int], tokens: list[int], values: list[float]) -> None:
        self.rows = torch.tensor(rows, dtype=torch.int64, device=self._device)
        self.tokens = torch.tensor(tokens, dtype=torch.int64, device=self._device)
        self.values = torch.tensor(values, dtype=torch.float32, device=self._device)


class LogitBiasLogitsProcessor(RowStateProcessor[dict[int, float]]):
    """Adds a constant to the logits of chosen tokens."""

    def __init__(
        self, vllm_config: "VllmConfig", device: torch.device, is_pin_memory: bool
    ) -> None:
        super().__init__(vllm_config, device, is_pin_memory)
        self._edits = _FlatEdits(device)

    def is_argmax_invariant(self) -> bool:
        return False

    def new_state(
        self,
        params: SamplingParams,
        prompt_ids: list[int] | None,
        output_ids: list[int],
    ) -> dict[int, float] | None:
        return params.logit_bias or None

    def rows_changed(self) -> None:
        items = [
            (row, int(token), value)
            for row, bias in self.states.items()
            for token, value in bias.items()
        ]
        self._edits.assign(*map(list, zip(*items, strict=True)) if items else ([],) * 3)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if self.states:
            edits = self._edits
            logits[edits.rows, edits.tokens] += edits.values.to(logits.dtype)
        return logits


class MinTokensLogitsProcessor(RowStateProcessor[tuple[int, list[int], set[int]]]):
    """Forbids a request's stop tokens until it has min_tokens of output."""

    def __init__(
        self, vllm_config: "VllmConfig", device: torch.device, is_pin_memory: bool
    ) -> None:
        super().__init__(vllm_config, device, is_pin_memory)
        self._edits = _FlatEdits(device)

    def is_argmax_invariant(self) -> bool:
        return False

    def new_state(
        self,
        params: SamplingParams,
        prompt_ids: list[int] | None,
        output_ids: list[int],
    ) -> tuple[int, list[int], set[int]] | None:
        stops = params.all_stop_token_ids
        if not stops or len(output_ids) >= params.min_tokens:
            return None
        return params.min_tokens, output_ids, stops

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        changed = process_dict_updates(self.states, batch_update, self.new_state)
        done = [
            row
            for row, (min_tokens, output_ids, _) in self.states.items()
            if len(output_ids) >= min_tokens
        ]
        for row in done:
            del self.states[row]
        if changed or done:
            self.rows_changed()

    def rows_changed(self) -> None:
        items = [
            (row, token)
            for row, (_, _, stops) in self.states.items()
            for token in stops
        ]
        rows, tokens = map(list, zip(*items, strict=True)) if items else ([], [])
        self._edits.assign(rows, tokens, [])

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if self.states:
            logits[self._edits.rows, self._edits.tokens] = -float("inf")
        return logits
