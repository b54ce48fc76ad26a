"""Outputs of a given form: grammars are checked at the door, compiled beside the
engine's steps, and followed in the sampler.

Knows when a grammar is needed. Refuses to know how one is written: that is the
backend's matter.
"""

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

from vllm.config import ModelConfig, VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.transformers_utils.tokenizer import get_tokenizer
from vllm.utils.import_utils import resolve
from vllm.v1.request import Request
from vllm.v1.structured_output.backend_types import (
    StructuredOutputBackend,
    StructuredOutputGrammar,
)

__all__ = [
    "StructuredOutputBackend",
    "StructuredOutputGrammar",
    "StructuredOutputManager",
    "backend_for",
    "check_structured_outputs",
]

# The library is loaded with the first request that needs it: that takes seconds.
_BACKEND = "vllm.v1.structured_output.backend_xgrammar:XgrammarBackend"
_PARSE = "vllm.v1.structured_output.backend_xgrammar:parse"
BACKENDS = ("auto", "xgrammar")
# Larger forms take seconds to compile, while others wait.
MAX_FORM_CHARACTERS = 1 << 17


def _library(name: str) -> Any:
    try:
        return resolve(name)
    except ImportError as error:
        raise VLLMValidationError(
            f"structured_outputs needs the xgrammar package ({error}): "
            "pip install xgrammar, or leave it out",
            parameter="structured_outputs",
        ) from error


def check_structured_outputs(
    params: StructuredOutputsParams, model_config: ModelConfig
) -> None:
    """Raises VLLMValidationError for a grammar that cannot be followed."""
    if model_config.skip_tokenizer_init:
        raise VLLMValidationError(
            f"{params._parameter} needs a tokenizer, which skip_tokenizer_init left "
            "out",
            parameter=params._parameter,
        )
    if (length := params.num_values) > MAX_FORM_CHARACTERS:
        raise VLLMValidationError(
            f"{params._parameter} has {length:,} characters: expected at most "
            f"{MAX_FORM_CHARACTERS:,}; ask for a simpler form",
            parameter=params._parameter,
        )
    if params.whitespace_pattern is not None:
        raise VLLMValidationError(
            "structured_outputs.whitespace_pattern is not supported: leave it out, or "
            "set disable_any_whitespace",
            parameter="structured_outputs",
        )
    _library(_PARSE)(params)


@cache
def _backend(source: Any, tokenizer: str, trust: bool, revision: Any, size: int) -> Any:
    built = get_tokenizer(source, tokenizer, trust, revision)
    return _library(_BACKEND)(built, size)


def backend_for(model_config: ModelConfig) -> StructuredOutputBackend:
    """The compiler for a model's tokenizer, one per process."""
    return _backend(
        model_config.source,
        model_config.tokenizer,
        model_config.trust_remote_code,
        model_config.tokenizer_revision,
        model_config.get_vocab_size(),
    )


class StructuredOutputManager:
    """Compiles the grammars of requests on a thread of its own; a request reaches the
    scheduler once its grammar can be followed."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.vllm_config = vllm_config
        config = vllm_config.structured_outputs_config
        if config.backend not in BACKENDS:
            raise ValueError(
                f"structured outputs backend {config.backend!r} is unknown: expected "
                f"one of {', '.join(BACKENDS)}"
            )
        self._threads: ThreadPoolExecutor | None = None
        self._compiling: dict[str, tuple[Request, Future[None]]] = {}

    def grammar_init(self, request: Request) -> None:
        """Starts to compile the grammar of a request that has one."""
        params = request.sampling_params
        if params is None or params.structured_outputs is None:
            raise ValueError(f"request {request.request_id!r} has no structured output")
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        compilation = self._threads.submit(self._compile, params)
        self._compiling[request.request_id] = request, compilation

    def has_compilations(self) -> bool:
        """Says whether requests wait for their grammars."""
        return bool(self._compiling)

    def take_compiled(self) -> list[tuple[Request, BaseException | None]]:
        """Requests whose grammars are compiled since the last call, with the error of
        those whose grammars cannot be."""
        ready = [rid for rid, (_, job) in self._compiling.items() if job.done()]
        taken = [self._compiling.pop(request_id) for request_id in ready]
        return [(request, job.exception()) for request, job in taken]

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forgets requests that wait; unknown ids are ignored."""
        for request_id in request_ids:
            if taken := self._compiling.pop(request_id, None):
                taken[1].cancel()

    def _compile(self, params: SamplingParams) -> None:
        backend = backend_for(self.vllm_config.model_config)
        backend.compile(params.structured_outputs, params.eos_token_id)

    def shutdown(self) -> None:
        """Waits for nothing: compilations under way end on their own."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
