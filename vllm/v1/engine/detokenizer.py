"""Turns the token ids of one request into text, step by step, and finds stop strings.

Knows when text is final: bytes of an unfinished character and the beginning of what may
become a stop string are held back. Refuses to know how text is sent.
"""

from typing import Any, Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from vllm.sampling_params import SamplingParams

# Tokens of the prompt that give the first output token its context: the text of a token
# may depend on its predecessors (leading spaces, bytes of one character).
_CONTEXT_TOKENS = 6
_MAX_BYTES_OF_A_CHARACTER = 4
_REPLACEMENT = "\ufffd"


class PieceDecoder(Protocol):
    """Decodes a growing sequence of tokens; `flush` gives what is held at its end."""

    def step(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class WindowPieces:
    """Pieces by decoding a sliding window twice: right for every tokenizer.

    The window begins with the tokens of the piece before, so that their text, whatever
    it is, cancels out.
    """

    def __init__(
        self, tokenizer: Any, context_ids: list[int], skip_special_tokens: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window = list(context_ids)
        self._num_emitted = len(self._window)  # tokens of the window already shown

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(
            ids, skip_special_tokens=self._skip_special_tokens
        )

    def _fresh_text(self) -> tuple[str, str]:
        known = self._decode(self._window[: self._num_emitted])
        full = self._decode(self._window)
        if not full.startswith(known):
            # The context ended inside a character, which is complete by now.
            known = known.rstrip(_REPLACEMENT)
        return full, full[len(known) :]

    def step(self, token_id: int) -> str:
        self._window.append(token_id)
        full, fresh = self._fresh_text()
        if not fresh or full.endswith(_REPLACEMENT):
            return ""
        del self._window[: self._num_emitted]
        self._num_emitted = len(self._window)
        return fresh

    def flush(self) -> str:
        if self._num_emitted == len(self._window):
            return ""
        _, fresh = self._fresh_text()
        self._num_emitted = len(self._window)
        return fresh


class StreamPieces:
    """Pieces from the tokenizer library's own stream decoder, under 1 us a token."""

    def __init__(
        self, tokenizer: Tokenizer, context_ids: list[int], skip_special_tokens: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._stream = DecodeStream(
            ids=list(context_ids), skip_special_tokens=skip_special_tokens
        )
        self._shown = list(context_ids)  # tokens of the latest piece
        self._held: list[int] = []  # tokens whose text is not out yet
        self._fallback: WindowPieces | None = None

    def step(self, token_id: int) -> str:
        if self._fallback is not None:
            return self._fallback.step(token_id)
        try:
            piece = self._stream.step(self._tokenizer, token_id)
        except Exception:
            # The stream gives up on sequences whose text is not append-only.
            self._fallback = self._as_window()
            return self._fallback.step(token_id)
        self._held.append(token_id)
        if not piece:
            return ""
        self._shown, self._held = self._held, []
        return piece

    def flush(self) -> str:
        if self._fallback is None:
            if not self._held:
                return ""
            self._fallback = self._as_window()
        return self._fallback.flush()

    def _as_window(self) -> WindowPieces:
        window = WindowPieces(self._tokenizer, self._shown, self._skip_special_tokens)
        window._window.extend(self._held)
        return window


def make_piece_decoder(
    tokenizer: Any, prompt_token_ids: list[int] | None, skip_special_tokens: bool
) -> PieceDecoder:
    """The fastest decoder that this tokenizer allows."""
    context = _context(tokenizer, prompt_token_ids or [])
    backend = getattr(tokenizer, "_tokenizer", tokenizer)
    if isinstance(backend, Tokenizer):
        return StreamPieces(backend, context, skip_special_tokens)
    return WindowPieces(tokenizer, context, skip_special_tokens)


def _context(tokenizer: Any, prompt_token_ids: list[int]) -> list[int]:
    """The last tokens of the prompt, beginning with a whole character: a torn one would
    make some tokenizers give up on all bytes that follow it."""
    for extra in range(_MAX_BYTES_OF_A_CHARACTER):
        context = prompt_token_ids[-_CONTEXT_TOKENS - extra :]
        if _REPLACEMENT not in tokenizer.decode(context):
            return context
    return prompt_token_ids[-_CONTEXT_TOKENS:]


class IncrementalDetokenizer:
    """The output tokens of one request, and their text where there is a tokenizer.

    `token_ids` holds output tokens only; `output_text` everything that is decoded, cut
    at the stop string once one is found.
    """

    def __init__(self, pieces: PieceDecoder | None, params: SamplingParams) -> None:
        self.token_ids: list[int] = []
        self.output_text = ""
        self._pieces = pieces
        stop = params.stop or []
        self._stop = [stop] if isinstance(stop, str) else list(stop)
        self._longest_stop = max((len(text) for text in self._stop), default=0)
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_sent = 0  # characters given out by get_next_output_text

    @classmethod
    def from_new_request(
        cls,
        tokenizer: Any,
        prompt_token_ids: list[int] | None,
        params: SamplingParams,
    ) -> "IncrementalDetokenizer":
        """`tokenizer` None, or params.detokenize False: token ids only, no text."""
        if tokenizer is None or not params.detokenize:
            return cls(None, params)
        pieces = make_piece_decoder(
            tokenizer, prompt_token_ids, params.skip_special_tokens
        )
        return cls(pieces, params)

    def update(self, new_token_ids: list[int], stop_terminated: bool) -> str | None:
        """Adds tokens; returns the stop string that they complete, if any.

        `stop_terminated`: the core ended the request at the last of them, whose text is
        left out unless stop strings are to be included.
        """
        if self._pieces is None:
            self.token_ids.extend(new_token_ids)
            return None
        last = len(new_token_ids) - 1
        for i, token_id in enumerate(new_token_ids):
            self.token_ids.append(token_id)
            if stop_terminated and i == last and not self._include_stop:
                break
            piece = self._pieces.step(token_id)
            if piece and (found := self._append(piece)) is not None:
                return found
        return None

    def finish(self) -> None:
        """Adds the text that was held back inside a character; call it once, at the
        end, unless a stop string was found."""
        if self._pieces is not None:
            self.output_text += self._pieces.flush()

    def _append(self, piece: str) -> str | None:
        start = len(self.output_text)
        self.output_text += piece
        if not self._stop or len(self.token_ids) < self._min_tokens:
            return None
        found = find_stop(self.output_text, start, self._stop)
        if found is None:
            return None
        position, text = found
        end = position + len(text) if self._include_stop else position
        self.output_text = self.output_text[:end]
        return text

    def get_next_output_text(self, finished: bool, delta: bool) -> str:
        """The text that may be shown: all of it, or what is new since the last call.

        Until `finished`, an end that may turn into a stop string stays back.
        """
        end = len(self.output_text)
        if not finished and self._stop and not self._include_stop:
            end -= self._held_back()
        if not delta:
            return self.output_text[:end]
        start, self._num_sent = self._num_sent, max(end, self._num_sent)
        return self.output_text[start:end]

    def _held_back(self) -> int:
        """Characters at the end that begin some stop string."""
        text = self.output_text
        for length in range(min(self._longest_stop - 1, len(text)), 0, -1):
            tail = text[-length:]
            if any(len(s) > length and s.startswith(tail) for s in self._stop):
                return length
        return 0


def find_stop(text: str, start: int, stop: list[str]) -> tuple[int, str] | None:
    """The first stop string that ends after `start`: (position, string), or None.

    Of several that begin at one position the one listed first wins.
    """
    best: tuple[int, str] | None = None
    for candidate in stop:
        position = text.find(candidate, max(0, start - len(candidate) + 1))
        if position >= 0 and (best is None or position < best[0]):
            best = (position, candidate)
    return best
