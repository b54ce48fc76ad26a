"""Checks a prompt and its parameters, and makes them the core's message.

Everything that can be refused is refused here, before the core sees it; what the caller
left open (length, seeds of stop tokens) is filled in.
"""

import time
from collections.abc import Iterable, Mapping
from typing import Any

from vllm.config import ModelConfig, VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.inputs import PromptType
from vllm.lora.request import LoRARequest
from vllm.sampling_params import (
    SamplingParams,
    StructuredOutputsParams,
    check_values,
)
from vllm.transformers_utils.tokenizer import (
    FoundTokenizer,
    find_tokenizer,
    open_tokenizer,
)
from vllm.utils.gc_utils import collector_paused
from vllm.utils.text_utils import is_unicode, short_repr, shorten
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.sample.logits_processor import load_custom_logitsprocs
from vllm.v1.structured_output import check_structured_outputs

# Fields of SamplingParams that no part of this engine acts on.
_UNSUPPORTED_PARAMS = ("thinking_token_budget",)


def look_for_tokenizer(model_config: ModelConfig) -> FoundTokenizer | None:
    """Where the tokenizer that a configuration asks for lies, or None. ValueError, soon
    and before a core is started, when it is not there."""
    if model_config.skip_tokenizer_init:
        return None
    return find_tokenizer(
        model_config.source,
        model_config.tokenizer,
        model_config.trust_remote_code,
        model_config.tokenizer_revision,
    )


@collector_paused()
def load_found(found: FoundTokenizer | None) -> Any:
    """The tokenizer that was found, None for None."""
    return None if found is None else open_tokenizer(found)


@collector_paused()
def load_tokenizer(model_config: ModelConfig) -> Any:
    """The tokenizer that a configuration asks for, or None."""
    return load_found(look_for_tokenizer(model_config))


class InputProcessor:
    """Turns prompts into EngineCoreRequests. `tokenizer` None: token ids only."""

    def __init__(self, vllm_config: VllmConfig, tokenizer: Any = None) -> None:
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.policy = vllm_config.scheduler_config.policy
        self.tokenizer = tokenizer
        self.vocab_size = self.model_config.get_vocab_size()
        self.generation_config = self.model_config.generation_defaults
        self.eos_token_id = self._find_eos_token_id()
        # They may refuse requests; what they edit is the worker's matter.
        self.logits_processors = load_custom_logitsprocs(
            self.model_config.logits_processors
        )

    def _find_eos_token_id(self) -> int | None:
        if self.tokenizer is not None:
            return getattr(self.tokenizer, "eos_token_id", None)
        eos = getattr(self.model_config.hf_text_config, "eos_token_id", None)
        return eos[0] if isinstance(eos, (list, tuple)) else eos

    def process_inputs(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
    ) -> tuple[str | None, EngineCoreRequest]:
        """The prompt's text, where known, and the message to the core.

        `tokenization_kwargs` takes add_special_tokens and truncate_prompt_tokens (keep
        the last so many tokens; -1: as many as the model takes). Raises
        VLLMValidationError, naming the field, for what cannot be served.
        """
        if not isinstance(params, SamplingParams):
            raise VLLMValidationError(
                f"parameters of type {type(params).__name__} are not supported: "
                "expected SamplingParams; this engine serves text generation only"
            )
        if lora_request is not None:
            raise VLLMValidationError(
                "LoRA adapters are not supported: leave lora_request out",
                parameter="lora_request",
            )
        self._check_priority(priority)
        text, token_ids, cache_salt = self._tokenize(prompt, tokenization_kwargs or {})
        self._check_prompt(token_ids)
        check_values(params.n, len(token_ids) + params.num_values)
        self._ask_logits_processors(params)
        request = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=token_ids,
            mm_features=None,
            sampling_params=self._complete(params, len(token_ids)),
            pooling_params=None,
            arrival_time=time.time() if arrival_time is None else arrival_time,
            cache_salt=cache_salt,
            data_parallel_rank=data_parallel_rank,
            priority=priority,
            trace_headers=dict(trace_headers) if trace_headers else None,
        )
        return text, request

    def _tokenize(
        self, prompt: PromptType, kwargs: dict[str, Any]
    ) -> tuple[str | None, list[int], str | None]:
        """Text, token ids and cache salt of a prompt in any of its forms."""
        text, token_ids, salt = split_prompt(prompt)
        if token_ids is None:
            if self.tokenizer is None:
                raise VLLMValidationError(
                    "text prompts need a tokenizer, which skip_tokenizer_init left "
                    "out: pass prompt_token_ids",
                    parameter="prompt",
                )
            special = kwargs.get("add_special_tokens", True)
            token_ids = self.tokenizer.encode(text, add_special_tokens=special)
        keep = kwargs.get("truncate_prompt_tokens")
        if keep is not None:
            token_ids = self._truncate(token_ids, keep)
        return text, list(token_ids), salt

    def _truncate(self, token_ids: list[int], keep: int) -> list[int]:
        longest = self.model_config.max_model_len
        if keep == -1:
            keep = longest - 1
        if not 1 <= keep <= longest:
            raise VLLMValidationError(
                f"truncate_prompt_tokens must be -1 or between 1 and {longest}, got "
                f"{keep}",
                parameter="truncate_prompt_tokens",
                value=keep,
            )
        return token_ids[-keep:]

    def _check_priority(self, priority: int) -> None:
        if priority and self.policy != "priority":
            raise VLLMValidationError(
                f"priority is {priority}, but requests are served in the order in "
                "which they come: leave it out, or start with --scheduling-policy "
                "priority",
                parameter="priority",
                value=priority,
            )

    def _ask_logits_processors(self, params: SamplingParams) -> None:
        for processor in self.logits_processors:
            try:
                processor.validate_params(params)
            except ValueError as error:
                raise VLLMValidationError(
                    f"logits processor {processor.__name__} refuses the request: "
                    f"{error}"
                ) from error

    def _check_prompt(self, token_ids: list[int]) -> None:
        if not token_ids:
            raise VLLMValidationError(
                "the prompt is empty: expected at least one token", parameter="prompt"
            )
        limit = self.model_config.max_model_len
        if len(token_ids) >= limit:
            raise VLLMValidationError(
                f"This model's maximum context length is {limit} tokens. However, the "
                f"prompt has {len(token_ids)} tokens, and at least one is to be "
                "generated: shorten the prompt or raise --max-model-len.",
                parameter="prompt",
                value=len(token_ids),
            )
        if any(not isinstance(t, int) or isinstance(t, bool) for t in token_ids):
            raise VLLMValidationError(
                "prompt_token_ids must hold whole numbers only", parameter="prompt"
            )
        self._check_ids("prompt", (min(token_ids), max(token_ids)))

    def _check_ids(self, parameter: str, token_ids: Any) -> None:
        for token_id in token_ids:
            if not 0 <= token_id < self.vocab_size:
                raise VLLMValidationError(
                    f"{parameter}: token id {token_id} is out of vocabulary, expected "
                    f"0 to {self.vocab_size - 1}",
                    parameter=parameter,
                    value=token_id,
                )

    def _complete(self, params: SamplingParams, num_prompt: int) -> SamplingParams:
        """A copy of the parameters, checked against the model and with nothing open."""
        params = params.clone()
        self._check_supported(params)
        params.logprobs = self._checked_logprobs("logprobs", params.logprobs)
        params.prompt_logprobs = self._checked_logprobs(
            "prompt_logprobs", params.prompt_logprobs
        )
        if params.logprob_token_ids:
            self._check_ids("logprob_token_ids", params.logprob_token_ids)
            self._checked_logprobs("logprob_token_ids", len(params.logprob_token_ids))
            params.logprobs = params.logprobs or 0
        self._check_ids("stop_token_ids", params.stop_token_ids or [])
        if params.allowed_token_ids is not None:
            self._check_ids("allowed_token_ids", params.allowed_token_ids)
        if params.logit_bias is not None:
            params.logit_bias = _int_keys(params.logit_bias)
            self._check_ids("logit_bias", params.logit_bias)
        if params.bad_words:
            params._bad_words_token_ids = self._encode_bad_words(params.bad_words)
        if params.max_tokens is None:
            params.max_tokens = self.model_config.max_model_len - num_prompt
        params.update_from_generation_config(self.generation_config, self.eos_token_id)
        return params

    def _check_supported(self, params: SamplingParams) -> None:
        for name in _UNSUPPORTED_PARAMS:
            if getattr(params, name) is not None:
                raise VLLMValidationError(
                    f"{name} is not supported: leave it out", parameter=name
                )
        if params.flat_logprobs:
            raise VLLMValidationError(
                "flat_logprobs is not supported: leave it out, logprobs come as one "
                "dict per token",
                parameter="flat_logprobs",
            )
        wish = (params.extra_args or {}).get("kv_transfer_params")
        self._check_transfer(wish)
        if params.structured_outputs is not None:
            self._check_structured_outputs(params.structured_outputs)
        if self.tokenizer is None:
            for name in ("stop", "bad_words"):
                if getattr(params, name):
                    raise VLLMValidationError(
                        f"{name} needs a tokenizer, which skip_tokenizer_init left "
                        "out: use stop_token_ids or logit_bias",
                        parameter=name,
                    )

    def _check_transfer(self, wish: Any) -> None:
        """A wish to a connector needs one; an empty one, such as {"do_remote_prefill":
        false}, asks nothing of it."""
        if not wish or (isinstance(wish, Mapping) and not any(wish.values())):
            return
        if not isinstance(wish, Mapping):
            raise VLLMValidationError(
                f"kv_transfer_params must map names to values, got {short_repr(wish)}",
                parameter="kv_transfer_params",
            )
        if not self.vllm_config.kv_transfer_is_on:
            raise VLLMValidationError(
                f"kv_transfer_params ({shorten(', '.join(map(str, wish)), 100)}) are "
                "for a KV "
                "connector, and this engine has none: start it with "
                "--kv-transfer-config, or leave them out",
                parameter="kv_transfer_params",
            )

    def _check_structured_outputs(self, wanted: StructuredOutputsParams) -> None:
        config = self.vllm_config.structured_outputs_config
        wanted.disable_any_whitespace |= config.disable_any_whitespace
        check_structured_outputs(wanted, self.model_config)

    def _checked_logprobs(self, name: str, wanted: int | None) -> int | None:
        """The number to compute; -1 becomes the whole vocabulary."""
        if wanted is None:
            return None
        limit = self.model_config.max_logprobs
        limit = self.vocab_size if limit == -1 else min(limit, self.vocab_size)
        count = self.vocab_size if wanted == -1 else wanted
        if count > limit:
            asked = f"{wanted}, the whole vocabulary," if wanted == -1 else f"{wanted}"
            raise VLLMValidationError(
                f"{name} {asked} is above the limit of {limit} that this engine was "
                "started with: ask for fewer, or raise --max-logprobs (-1: no limit)",
                parameter=name,
                value=wanted,
            )
        return count

    def _encode_bad_words(self, words: list[str]) -> list[list[int]]:
        """Token sequences of each word, at the start of a text and behind a space."""
        sequences: dict[tuple[int, ...], None] = {}  # in the order of words
        for word in dict.fromkeys(word.lstrip() for word in words):
            for spelling in (word, " " + word):
                ids = self.tokenizer.encode(spelling, add_special_tokens=False)
                if ids:
                    self._check_ids("bad_words", ids)
                    sequences[tuple(ids)] = None
        return [list(ids) for ids in sequences]


def split_prompt(prompt: PromptType) -> tuple[str | None, list[int] | None, str | None]:
    """Text, token ids and cache salt; one of the first two may be None.

    Raises VLLMValidationError for anything that is not one text prompt.
    """
    if isinstance(prompt, str):
        check_text(prompt, "prompt")
        return prompt, None, None
    if isinstance(prompt, (list, tuple)):
        return None, list(prompt), None
    if not isinstance(prompt, Mapping):
        raise VLLMValidationError(
            f"a prompt of type {type(prompt).__name__} is not supported: expected "
            "text, token ids, or a dict with prompt or prompt_token_ids",
            parameter="prompt",
        )
    unknown = sorted(set(prompt) - {"prompt", "prompt_token_ids", "cache_salt", "type"})
    unknown = [name for name in unknown if prompt[name]]
    if unknown:
        raise VLLMValidationError(
            f"prompt fields {', '.join(unknown)} are not supported: expected prompt, "
            "prompt_token_ids and cache_salt",
            parameter="prompt",
        )
    text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if text is None and ids is None:
        raise VLLMValidationError(
            "a prompt dict needs prompt (text) or prompt_token_ids", parameter="prompt"
        )
    if text is not None and not isinstance(text, str):
        raise VLLMValidationError(
            f"prompt must be text, got {type(text).__name__}", parameter="prompt"
        )
    no_ids = isinstance(ids, (str, bytes, bytearray)) or not isinstance(ids, Iterable)
    if ids is not None and no_ids:
        raise VLLMValidationError(
            f"prompt_token_ids must be a list of token ids, got {short_repr(ids)}",
            parameter="prompt",
        )
    salt = prompt.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise VLLMValidationError(
            f"cache_salt must be a non-empty string, got {short_repr(salt)}",
            parameter="cache_salt",
        )
    for given, name in ((text, "prompt"), (salt, "cache_salt")):
        check_text(given or "", name)
    return text, None if ids is None else list(ids), salt


def check_text(text: str, parameter: str) -> None:
    """VLLMValidationError for a text that is not valid Unicode, which no tokenizer and
    no message to the core takes."""
    if not is_unicode(text):
        raise VLLMValidationError(
            f"{parameter} {short_repr(text)} holds half of a surrogate pair: expected "
            "valid Unicode; decode what it comes from with errors='replace'",
            parameter=parameter,
        )


def _int_keys(bias: Mapping[Any, float]) -> dict[int, float]:
    """Token ids as numbers: JSON objects have text keys."""
    try:
        return {int(key): float(value) for key, value in bias.items()}
    except (TypeError, ValueError):
        raise VLLMValidationError(
            "logit_bias must map token ids to numbers", parameter="logit_bias"
        ) from None
