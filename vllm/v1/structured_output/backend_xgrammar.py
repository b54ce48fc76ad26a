"""Grammars in the xgrammar library: JSON schemas, regular expressions, choices, EBNF
and structural tags.

Knows how StructuredOutputsParams become a grammar. Refuses to know batches and logits.
"""

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import torch
import xgrammar as xgr

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams
from vllm.utils.text_utils import short_repr
from vllm.v1.structured_output.backend_types import (
    StructuredOutputBackend,
    StructuredOutputGrammar,
)
from vllm.v1.structured_output.json_schema import check_schema
from vllm.v1.structured_output.open_arrays import open_arrays, with_open_arrays
from vllm.v1.structured_output.regular_expression import check_regex

# Where in the library's source an error arose: "[12:00:00] /a/b.cc:1: ".
_PLACE = re.compile(r"\[[\d:]+\] \S+:\d+: (?:Check failed: .* is false:? ?)?")
_COMPILER_THREADS = 2
_MAX_WHITESPACE = 32  # characters in a row
# A grammar is followed in the engine's steps, where all requests wait for it.
_TRIED_TOKENS = 3
_MAX_SECONDS_PER_TOKEN = 0.1
_CACHE_BYTES = 256 << 20  # compiled grammars, the least recently used ones leave


class XgrammarGrammar(StructuredOutputGrammar):
    """One request's place in a compiled grammar."""

    def __init__(self, matcher: xgr.GrammarMatcher) -> None:
        self.matcher = matcher

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        return all(self.matcher.accept_token(token) for token in tokens)

    def fill_bitmask(self, bitmask: torch.Tensor, batch_index: int) -> None:
        self.matcher.fill_next_token_bitmask(bitmask, batch_index)

    def is_terminated(self) -> bool:
        return self.matcher.is_terminated()

    def reset(self) -> None:
        self.matcher.reset()


class XgrammarBackend(StructuredOutputBackend):
    """Compiles for `tokenizer`, whose ids are the first of `vocab_size` logits."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        info = xgr.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size)
        self._compiler = xgr.GrammarCompiler(
            info, max_threads=_COMPILER_THREADS, cache_limit_bytes=_CACHE_BYTES
        )

    def compile(self, params: Any, stop_token_id: int | None) -> None:
        try:
            self._try(xgr.GrammarMatcher(self._compiled(params)))
        except ValueError as error:
            raise _refusal(params, error) from error

    def _try(self, matcher: xgr.GrammarMatcher) -> None:
        """Follows a grammar for some tokens. ValueError where it allows none, or where
        the engine's steps would wait too long for it."""
        bitmask = xgr.allocate_token_bitmask(1, self._vocab_size)
        for step in range(_TRIED_TOKENS):
            started = time.thread_time()
            bounded = matcher.fill_next_token_bitmask(bitmask, 0)
            spent = time.thread_time() - started
            if spent > _MAX_SECONDS_PER_TOKEN:
                raise ValueError(
                    f"finding what may follow takes {spent:.2f} s of the processor at "
                    f"token {step + 1}, expected at most {_MAX_SECONDS_PER_TOKEN} s: "
                    "nest fewer counted or optional repetitions"
                )
            words = bitmask[0].tolist()
            if not bounded:
                return
            if step == 0 and not any(words):
                raise ValueError("no text, not even an empty one, fits this form")
            token = _first_token(words, matcher.stop_token_ids)
            if token is None or not matcher.accept_token(token):
                return

    def grammar(
        self, params: Any, stop_token_id: int | None
    ) -> StructuredOutputGrammar:
        stop = None if stop_token_id is None else [stop_token_id]
        matcher = xgr.GrammarMatcher(self._compiled(params), override_stop_tokens=stop)
        return XgrammarGrammar(matcher)

    def _compiled(self, params: StructuredOutputsParams) -> xgr.CompiledGrammar:
        try:
            return _build(self._compiler.compile_json_schema, params) or (
                self._compiler.compile_grammar(parse(params))
            )
        except RuntimeError as error:
            raise _refusal(params, error) from error


def _first_token(words: list[int], stops: list[int]) -> int | None:
    """The lowest token of a bitmask, int32 words, that ends no output."""
    for i, word in enumerate(words):
        for bit in range(32) if word else ():
            if word >> bit & 1 and 32 * i + bit not in stops:
                return 32 * i + bit
    return None


def parse(params: StructuredOutputsParams) -> xgr.Grammar:
    """The grammar that the parameters state. VLLMValidationError for an invalid one."""
    try:
        _check_enforced(params)
        return _build(xgr.Grammar.from_json_schema, params) or _plain(params)
    except (RuntimeError, TypeError, ValueError) as error:
        raise _refusal(params, error) from error


def _check_enforced(params: StructuredOutputsParams) -> None:
    """ValueError for a form that its grammar would keep only in part."""
    if params.json is not None:
        check_schema(_loaded("json", _text(params.json)))
    if params.regex is not None:
        check_regex(params.regex)
    if params.structural_tag is not None:
        for schema in _schemas_in(_loaded("structural_tag", params.structural_tag)):
            check_schema(schema)


def _text(schema: str | dict[str, Any]) -> str:
    return schema if isinstance(schema, str) else json.dumps(schema)


def _loaded(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{name} is not valid JSON: {error}") from error


def _schemas_in(tag: Any) -> Iterator[Any]:
    """The JSON schemas of a structural tag, in its current or its former spelling."""
    for part in tag.values() if isinstance(tag, dict) else tag:
        if isinstance(part, (dict, list)):
            yield from _schemas_in(part)
    if isinstance(tag, dict) and tag.get("type") == "json_schema":
        yield tag.get("json_schema", True)
    elif isinstance(tag, dict) and {"begin", "end", "schema"} <= tag.keys():
        yield tag["schema"]


def _build(from_schema: Any, params: StructuredOutputsParams) -> Any:
    """`from_schema` of the JSON schema that is asked for; None when none is."""
    if params.json is None:
        return None
    # Properties beyond the schema's need its "additionalProperties": small models
    # never stop adding some.
    text = with_open_arrays(_text(params.json))
    return from_schema(text, **_whitespace(params), strict_mode=True)


def _whitespace(params: StructuredOutputsParams) -> dict[str, Any]:
    """What may stand between JSON tokens: bounded, since models like newlines."""
    if params.disable_any_whitespace:
        return {"any_whitespace": False}
    return {"any_whitespace": True, "max_whitespace_cnt": _MAX_WHITESPACE}


def _plain(params: StructuredOutputsParams) -> xgr.Grammar:
    if params.json_object:
        # OpenAI's JSON mode promises an object, not any JSON value.
        return xgr.Grammar.from_json_schema(
            json.dumps({"type": "object"}), **_whitespace(params), strict_mode=False
        )
    if params.regex is not None:
        return xgr.Grammar.from_regex(params.regex)
    if params.choice is not None:
        return xgr.Grammar.from_ebnf(_choice_ebnf(params.choice))
    if params.grammar is not None:
        _check_no_nul(params.grammar)
        return xgr.Grammar.from_ebnf(params.grammar)
    return xgr.Grammar.from_structural_tag(_opened_tag(params.structural_tag or ""))


def _opened_tag(text: str) -> str:
    tag = _loaded("structural_tag", text)
    for schema in _schemas_in(tag):
        open_arrays(schema)
    return json.dumps(tag)


# The strings of a grammar; classes and comments are matched to be passed over.
_GRAMMAR_PIECE = re.compile(
    r'(?P<text>"(?:\\.|[^"\\])*")|\[(?:\\.|[^\]\\])*\]|#[^\n]*', re.DOTALL
)
_PLAIN_OR_NUL = re.compile(
    r"(?P<nul>\0|\\(?:0|x0+(?![0-9a-fA-F])|u0{4}|U0{8}))|\\.|[^\\]", re.DOTALL
)


def _check_no_nul(grammar: str) -> None:
    """ValueError for a NUL character in a string, which the library would end there."""
    for piece in _GRAMMAR_PIECE.finditer(grammar):
        for part in _PLAIN_OR_NUL.finditer(piece["text"] or ""):
            if part["nul"]:
                raise ValueError(
                    f"its string {short_repr(piece['text'])} holds a NUL character, "
                    "which no text can have here; remove it"
                )


def _choice_ebnf(choices: list[str]) -> str:
    if not choices or not all(choices):
        raise ValueError(f"choice must be a list of non-empty strings, got {choices}")
    for choice in choices:
        if "\0" in choice:
            raise ValueError(
                f"the choice {short_repr(choice)} holds a NUL character, which no text "
                "can have here; remove it"
            )
    # Escapes of JSON would be two characters beyond U+FFFF.
    texts = (json.dumps(choice, ensure_ascii=False) for choice in choices)
    return "root ::= " + " | ".join(texts)


def _refusal(params: StructuredOutputsParams, error: Exception) -> VLLMValidationError:
    text = _PLACE.sub("", " ".join(str(error).split()))[:400]
    name = params._parameter
    return VLLMValidationError(f"{name} cannot be followed: {text}", parameter=name)
