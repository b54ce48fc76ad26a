"""Grammars in the xgrammar library: JSON schemas, regular expressions, choices, EBNF
and structural tags.

Knows how StructuredOutputsParams become a grammar. Refuses to know batches and logits.
"""

import json
import re
from typing import Any

import torch
import xgrammar as xgr

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output.backend_types import (
    StructuredOutputBackend,
    StructuredOutputGrammar,
)

# Where in the library's source an error arose: "[12:00:00] /a/b.cc:1: ".
_PLACE = re.compile(r"\[[\d:]+\] \S+:\d+: ")
_COMPILER_THREADS = 2
_MAX_WHITESPACE = 32  # characters in a row
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
        info = xgr.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size)
        self._compiler = xgr.GrammarCompiler(
            info, max_threads=_COMPILER_THREADS, cache_limit_bytes=_CACHE_BYTES
        )

    def compile(self, params: Any, stop_token_id: int | None) -> None:
        self._compiled(params)

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


def parse(params: StructuredOutputsParams) -> xgr.Grammar:
    """The grammar that the parameters state. VLLMValidationError for an invalid one."""
    try:
        return _build(xgr.Grammar.from_json_schema, params) or _plain(params)
    except (RuntimeError, TypeError, ValueError) as error:
        raise _refusal(params, error) from error


def _build(from_schema: Any, params: StructuredOutputsParams) -> Any:
    """`from_schema` of the JSON schema that is asked for; None when none is."""
    if params.json is None:
        return None
    schema = params.json if isinstance(params.json, str) else json.dumps(params.json)
    # Properties beyond the schema's need its "additionalProperties": small models
    # never stop adding some.
    return from_schema(schema, **_whitespace(params), strict_mode=True)


def _whitespace(params: StructuredOutputsParams) -> dict[str, Any]:
    """What may stand between JSON tokens: bounded, since models like newlines."""
    if params.disable_any_whitespace:
        return {"any_whitespace": False}
    return {"any_whitespace": True, "max_whitespace_cnt": _MAX_WHITESPACE}


def _plain(params: StructuredOutputsParams) -> xgr.Grammar:
    if params.json_object is not None:
        # OpenAI's JSON mode promises an object, not any JSON value.
        return xgr.Grammar.from_json_schema(
            json.dumps({"type": "object"}), **_whitespace(params), strict_mode=False
        )
    if params.regex is not None:
        return xgr.Grammar.from_regex(params.regex)
    if params.choice is not None:
        return xgr.Grammar.from_ebnf(_choice_ebnf(params.choice))
    if params.grammar is not None:
        return xgr.Grammar.from_ebnf(params.grammar)
    return xgr.Grammar.from_structural_tag(params.structural_tag)


def _choice_ebnf(choices: list[str]) -> str:
    if not choices or not all(choices):
        raise ValueError(f"choice must be a list of non-empty strings, got {choices}")
    return "root ::= " + " | ".join(json.dumps(choice) for choice in choices)


def _refusal(params: StructuredOutputsParams, error: Exception) -> VLLMValidationError:
    text = _PLACE.sub("", " ".join(str(error).split()))[:400]
    return VLLMValidationError(
        f"structured_outputs cannot be followed: {text}", parameter="structured_outputs"
    )
