"""Collects the log probabilities of one request, as callers see them.

Takes arrays from the core and gives dicts from token id to Logprob. Knows no sampling.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from vllm.outputs import Logprob, PromptLogprobs, SampleLogprobs
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

_REPLACEMENT = "\ufffd"
# A character has at most four bytes, so three tokens before it can hold its beginning.
_CHARACTER_CONTEXT = 3


class TokenTexts:
    """The text of single tokens, remembered. Shared by the requests of a tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._text = lru_cache(maxsize=1 << 16)(self._decode_one)

    def _decode_one(self, token_id: int) -> str:
        return self._tokenizer.decode([token_id])

    def text(self, token_id: int, previous_ids: list[int]) -> str:
        """The text of a token after `previous_ids`: that of the character it completes,
        or "" where it only begins or continues one."""
        text = self._text(token_id)
        if not text.endswith(_REPLACEMENT) and not text.startswith(_REPLACEMENT):
            return text
        for count in range(1, min(_CHARACTER_CONTEXT, len(previous_ids)) + 1):
            context = previous_ids[-count:]
            full = self._tokenizer.decode([*context, token_id])
            known = self._tokenizer.decode(context).rstrip(_REPLACEMENT)
            if not full.endswith(_REPLACEMENT) and len(full) > len(known):
                return full[len(known) :]
        return text.strip(_REPLACEMENT)


class LogprobsProcessor:
    """Log probabilities of one request so far.

    `logprobs`: one dict per output token, or None when they were not asked for.
    `prompt_logprobs`: one per prompt token, the first None; or None.
    """

    def __init__(
        self,
        token_texts: TokenTexts | None,
        num_logprobs: int | None,
        num_prompt_logprobs: int | None,
        prompt_token_ids: list[int] | None,
        logprob_token_ids: list[int] | None = None,
    ) -> None:
        self._texts = token_texts
        # Rows show these tokens, whose ranks nobody computed, instead of the likeliest.
        self._num_given = len(logprob_token_ids) if logprob_token_ids else None
        self._num_logprobs = num_logprobs
        self._num_prompt_logprobs = num_prompt_logprobs
        self._prompt_token_ids = prompt_token_ids or []
        self._recent_ids: list[int] = self._prompt_token_ids[-_CHARACTER_CONTEXT:]
        self.logprobs: SampleLogprobs | None = None if num_logprobs is None else []
        self.cumulative_logprob: float | None = None if num_logprobs is None else 0.0
        self.prompt_logprobs: PromptLogprobs | None = (
            None if num_prompt_logprobs is None else [None]
        )
        self._num_prompt_popped = 0

    def update_sample(self, lists: LogprobsLists) -> None:
        """Adds one row per new output token; column 0 is the sampled token."""
        if self.logprobs is None or self._num_logprobs is None:
            return
        ranks = lists.sampled_token_ranks.tolist()
        rows = zip(
            ranks,
            lists.logprobs.tolist(),
            lists.logprob_token_ids.tolist(),
            strict=True,
        )
        for rank, logprobs, token_ids in rows:
            entry = self._entry(
                token_ids, logprobs, self._ranks(rank, token_ids), self._recent_ids
            )
            self.logprobs.append(entry)
            self.cumulative_logprob = (self.cumulative_logprob or 0.0) + logprobs[0]
            self._recent_ids = [*self._recent_ids, token_ids[0]][-_CHARACTER_CONTEXT:]

    def update_prompt(self, tensors: LogprobsTensors) -> None:
        """Adds one row per prompt token from the next unseen one; column 0 is that
        token. The first token of a prompt has no row."""
        if self.prompt_logprobs is None or self._num_prompt_logprobs is None:
            return
        rows = zip(
            tensors.selected_token_ranks.tolist(),
            tensors.logprobs.tolist(),
            tensors.logprob_token_ids.tolist(),
            strict=True,
        )
        for rank, logprobs, token_ids in rows:
            position = self._num_prompt_popped + len(self.prompt_logprobs)
            before = self._prompt_token_ids[
                max(0, position - _CHARACTER_CONTEXT) : position
            ]
            count = _count(self._num_prompt_logprobs, token_ids)
            ranks = [rank, *range(1, count)]
            self.prompt_logprobs.append(self._entry(token_ids, logprobs, ranks, before))

    def pop_prompt_logprobs(self) -> PromptLogprobs | None:
        """What has come since the last call, for outputs that carry news only."""
        news = self.prompt_logprobs
        if news:
            self._num_prompt_popped += len(news)
            self.prompt_logprobs = []
        return news

    def _ranks(self, rank: int, token_ids: list[int]) -> list[int | None]:
        """The rank of each column that this request asked for."""
        if self._num_given is not None:
            return [rank, *[None] * self._num_given]
        return [rank, *range(1, _count(self._num_logprobs, token_ids))]

    def _entry(
        self,
        token_ids: list[int],
        logprobs: list[float],
        ranks: Sequence[int | None],
        previous_ids: list[int],
    ) -> dict[int, Logprob]:
        """The chosen token first, then the others in the order of their columns."""
        entry: dict[int, Logprob] = {}
        for token_id, logprob, rank in zip(token_ids, logprobs, ranks, strict=False):
            if token_id in entry:
                continue  # the chosen token is among the others
            text = self._texts.text(token_id, previous_ids) if self._texts else None
            entry[token_id] = Logprob(logprob, rank, text)
        return entry


def _count(num_logprobs: int | None, token_ids: list[int]) -> int:
    """Columns of a row that belong to a request for so many logprobs."""
    if num_logprobs is None or num_logprobs == -1:
        return len(token_ids)
    return num_logprobs + 1
