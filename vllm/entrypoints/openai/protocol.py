"""Requests to the HTTP API, in the OpenAI shape with vLLM's extensions; and, by name,
the answers to them.

Says which fields exist and what they mean to the sampler. Knows nothing of the engine.
"""

from typing import Any, Literal

from pydantic import Field, model_validator

from vllm.entrypoints.openai.output_form import structured_outputs
from vllm.entrypoints.openai.protocol_answers import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletionChunk,
    ChatCompletionResponse,
    ChatDelta,
    ChatLogProbContent,
    ChatLogProbs,
    ChatMessage,
    ChatTopLogProb,
    ChoiceExtras,
    CompletionChoice,
    CompletionLogProbs,
    CompletionResponse,
    DetokenizeResponse,
    ErrorInfo,
    ErrorResponse,
    ModelCard,
    ModelList,
    ModelPermission,
    PromptTokensDetails,
    TokenizeResponse,
    UsageInfo,
)
from vllm.entrypoints.openai.protocol_base import (
    Biases,
    Float,
    Int,
    ListOf,
    OpenAIModel,
    RequestId,
    TokenId,
    check_messages,
    random_uuid,
)
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.utils.text_utils import short_repr

__all__ = [
    "ChatChoice",
    "ChatChunkChoice",
    "ChatCompletionChunk",
    "ChatCompletionRequest",
    "ChatCompletionResponse",
    "ChatDelta",
    "ChatLogProbContent",
    "ChatLogProbs",
    "ChatMessage",
    "ChatTopLogProb",
    "ChoiceExtras",
    "CompletionChoice",
    "CompletionLogProbs",
    "CompletionRequest",
    "CompletionResponse",
    "DetokenizeRequest",
    "DetokenizeResponse",
    "ErrorInfo",
    "ErrorResponse",
    "GenerationRequest",
    "ModelCard",
    "ModelList",
    "ModelPermission",
    "PromptTokensDetails",
    "StreamOptions",
    "TokenizeRequest",
    "TokenizeResponse",
    "UsageInfo",
]

# Prompts of one request, and continuations of all of them: each is a request to the
# engine, and whoever else is served waits while they enter it, 50 us each.
MAX_PROMPTS = 2048
MAX_SEQUENCES = 16384
# Former names of constraints on the form of the output: refused, because ignoring one
# would silently return unconstrained text.
_FORMER_CONSTRAINTS = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}


class StreamOptions(OpenAIModel):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class GenerationRequest(OpenAIModel):
    """The fields that completions and chat completions share."""

    model: str | None = None
    n: Int = 1
    seed: Int | None = None
    stop: str | ListOf[str] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: Float | None = None
    top_p: Float | None = None
    presence_penalty: Float | None = None
    frequency_penalty: Float | None = None
    logit_bias: Biases | None = None
    user: str | None = None
    response_format: dict[str, Any] | None = None
    # extensions
    top_k: Int | None = None
    min_p: Float | None = None
    repetition_penalty: Float | None = None
    stop_token_ids: ListOf[TokenId] | None = None
    ignore_eos: bool = False
    min_tokens: Int = 0
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    bad_words: ListOf[str] | None = None
    allowed_token_ids: ListOf[TokenId] | None = None
    prompt_logprobs: Int | None = None
    truncate_prompt_tokens: Int | None = Field(default=None, ge=-1)
    add_special_tokens: bool = True
    priority: Int = Field(default=0, ge=-(2**63), lt=2**63)
    request_id: RequestId = Field(default_factory=random_uuid)
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    vllm_xargs: dict[str, Any] | None = None
    use_beam_search: bool = False
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structured_outputs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_common(self) -> "GenerationRequest":
        for name, now in _FORMER_CONSTRAINTS.items():
            if getattr(self, name) is not None:
                raise VLLMValidationError(
                    f'{name} is gone: use "structured_outputs": {{"{now}": …}}',
                    parameter=name,
                )
        structured_outputs(self.structured_outputs, self.response_format)
        if self.use_beam_search:
            raise VLLMValidationError(
                "use_beam_search is not supported: sample with n instead",
                parameter="use_beam_search",
            )
        if self.stream_options is not None and not self.stream:
            raise VLLMValidationError(
                "stream_options needs stream=true", parameter="stream_options"
            )
        if self.truncate_prompt_tokens == 0:
            raise VLLMValidationError(
                "truncate_prompt_tokens must be at least 1, or -1 for what fits, got 0",
                parameter="truncate_prompt_tokens",
            )
        if self.cache_salt is not None and not self.cache_salt:
            raise VLLMValidationError(
                "cache_salt must be a non-empty string", parameter="cache_salt"
            )
        return self

    def sampling_values(self, defaults: dict[str, Any]) -> dict[str, Any]:
        """Keyword arguments of SamplingParams without lengths and logprobs.

        Values of the request win over `defaults`, the model's generation settings.
        """
        chosen = {
            name: getattr(self, name)
            for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        }
        values = {
            name: defaults.get(name) if value is None else value
            for name, value in chosen.items()
        }
        kind = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        extra = dict(self.vllm_xargs or {})
        if self.kv_transfer_params is not None:
            extra["kv_transfer_params"] = self.kv_transfer_params
        values.update(
            n=self.n,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            seed=self.seed,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens,
            skip_special_tokens=self.skip_special_tokens,
            spaces_between_special_tokens=self.spaces_between_special_tokens,
            include_stop_str_in_output=self.include_stop_str_in_output,
            bad_words=self.bad_words,
            allowed_token_ids=self.allowed_token_ids,
            logit_bias=self._logit_bias(),
            structured_outputs=structured_outputs(
                self.structured_outputs, self.response_format
            ),
            output_kind=kind,
            extra_args=extra or None,
        )
        return values

    def _logit_bias(self) -> dict[int, float] | None:
        if self.logit_bias is None:
            return None
        for token, bias in self.logit_bias.items():
            is_id = token.isascii() and token.isdigit() and len(token) < 20
            if not is_id or not -100 <= bias <= 100:  # also refuses NaN
                raise VLLMValidationError(
                    "logit_bias must map token ids to numbers from -100 to 100, got "
                    f"{short_repr(token)}: {bias}",
                    parameter="logit_bias",
                )
        return {int(token): bias for token, bias in self.logit_bias.items()}

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: str | ListOf[str] | ListOf[TokenId] | ListOf[ListOf[TokenId]] | None = None
    max_tokens: Int | None = Field(default=16)
    logprobs: Int | None = None
    echo: bool = False
    suffix: str | None = None
    best_of: Int | None = None

    @model_validator(mode="after")
    def _check_prompts(self) -> "CompletionRequest":
        given = self.prompt
        if given is None or given == "" or given == []:
            raise VLLMValidationError(
                "prompt must be a non-empty string, list of strings, list of token ids "
                "or list of such lists",
                parameter="prompt",
            )
        if isinstance(given, str) or isinstance(given[0], int):
            return self
        if len(given) > MAX_PROMPTS:
            raise VLLMValidationError(
                f"prompt must hold at most {MAX_PROMPTS:,} prompts, got "
                f"{len(given):,}: send the others in further requests",
                parameter="prompt",
            )
        if len(given) * self.n > MAX_SEQUENCES:
            raise VLLMValidationError(
                f"n must be at most {MAX_SEQUENCES // len(given):,} for {len(given):,} "
                f"prompts, got {self.n:,}: a request has at most {MAX_SEQUENCES:,} "
                "continuations, ask for the others in further ones",
                parameter="n",
            )
        return self

    @model_validator(mode="after")
    def _check_completion(self) -> "CompletionRequest":
        if self.suffix is not None:
            raise VLLMValidationError("suffix is not supported", parameter="suffix")
        if self.best_of is not None and self.best_of != self.n:
            raise VLLMValidationError(
                f"best_of ({self.best_of}) is not supported: use n", parameter="best_of"
            )
        if self.logprobs is not None and self.logprobs < 0:
            raise VLLMValidationError(
                f"logprobs must be at least 0, got {self.logprobs}",
                parameter="logprobs",
            )
        if self.max_tokens == 0 and not self.echo:
            raise VLLMValidationError(
                "max_tokens must be at least 1, got 0 (0 is for echo=true)",
                parameter="max_tokens",
            )
        return self

    def to_sampling_params(
        self, defaults: dict[str, Any], max_tokens: int
    ) -> SamplingParams:
        """Sampling parameters; `max_tokens` is what fits behind the prompt."""
        prompt_logprobs = self.prompt_logprobs
        if prompt_logprobs is None and self.echo:
            prompt_logprobs = self.logprobs
        return SamplingParams.from_optional(
            **self.sampling_values(defaults),
            max_tokens=max_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=prompt_logprobs,
        )


class ChatCompletionRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    refused_extras = frozenset({"functions", "function_call", "audio"})

    messages: ListOf[dict[str, Any]]
    max_tokens: Int | None = None
    max_completion_tokens: Int | None = None
    logprobs: bool | None = False
    top_logprobs: Int | None = 0
    echo: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: ListOf[dict[str, Any]] | None = None
    modalities: ListOf[Literal["text"]] | None = None
    tools: ListOf[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    # The values that OpenAI has; a template sees which one is wanted.
    reasoning_effort: (
        Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None
    ) = None
    add_special_tokens: bool = False

    @model_validator(mode="after")
    def _check_tools(self) -> "ChatCompletionRequest":
        if self.tools and self.tool_choice != "none":
            raise VLLMValidationError(
                "tools: this server does not parse tool calls; tool_choice 'none' "
                "shows the tools to the chat template only",
                parameter="tools",
            )
        if self.tool_choice not in (None, "none"):
            raise VLLMValidationError(
                f"tool_choice {short_repr(self.tool_choice)} is not supported, and "
                "has no meaning without tools: leave it out, or set it to 'none'",
                parameter="tool_choice",
            )
        return self

    @model_validator(mode="after")
    def _check_chat(self) -> "ChatCompletionRequest":
        check_messages(self.messages)
        if self.top_logprobs and not self.logprobs:
            raise VLLMValidationError(
                "top_logprobs needs logprobs=true", parameter="top_logprobs"
            )
        if self.top_logprobs is not None and self.top_logprobs < 0:
            raise VLLMValidationError(
                f"top_logprobs must be at least 0, got {self.top_logprobs}",
                parameter="top_logprobs",
            )
        if self.continue_final_message and self.add_generation_prompt:
            raise VLLMValidationError(
                "continue_final_message needs add_generation_prompt=false",
                parameter="continue_final_message",
            )
        return self

    @property
    def names_of_fields(self) -> dict[str, str]:
        """What this request calls the fields that completions and engine know."""
        names = {"prompt": "messages", "logprobs": "top_logprobs"}
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        return names

    @property
    def wanted_tokens(self) -> int | None:
        """Tokens asked for: max_completion_tokens, else the older max_tokens."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return self.max_tokens

    def to_sampling_params(
        self, defaults: dict[str, Any], max_tokens: int
    ) -> SamplingParams:
        """Sampling parameters; `max_tokens` is what fits behind the prompt."""
        return SamplingParams.from_optional(
            **self.sampling_values(defaults),
            max_tokens=max_tokens,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            prompt_logprobs=self.prompt_logprobs,
        )


class TokenizeRequest(OpenAIModel):
    """POST /tokenize: of a prompt, or of messages through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: ListOf[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool | None = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: ListOf[dict[str, Any]] | None = None

    @model_validator(mode="after")
    def _one_input(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise VLLMValidationError(
                "give either prompt or messages", parameter="prompt"
            )
        if self.messages is not None:
            check_messages(self.messages)
        return self


class DetokenizeRequest(OpenAIModel):
    """POST /detokenize."""

    model: str | None = None
    tokens: ListOf[TokenId]
