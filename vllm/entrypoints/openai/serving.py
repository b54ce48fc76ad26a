"""What all endpoints share: model names, tokenisation, length limits, usage."""

import asyncio
import os
import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from vllm.config import VllmConfig
from vllm.entrypoints.openai.errors import NotFoundError
from vllm.entrypoints.openai.protocol import (
    GenerationRequest,
    ModelCard,
    ModelList,
    ModelPermission,
    PromptTokensDetails,
    UsageInfo,
)
from vllm.exceptions import VLLMValidationError
from vllm.inputs import TokensPrompt
from vllm.outputs import Logprob, RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.utils.daemon_pool import DaemonPool
from vllm.v1.engine.async_llm import AsyncLLM

T = TypeVar("T")


@dataclass(kw_only=True)
class ServingContext:
    """The engine behind the endpoints and the settings that shape answers."""

    engine: AsyncLLM
    vllm_config: VllmConfig
    tokenizer: Any
    chat_template: str | None = None
    return_tokens_as_token_ids: bool = False
    enable_prompt_tokens_details: bool = False
    enable_force_include_usage: bool = False
    trust_request_chat_template: bool = False
    default_sampling: dict[str, Any] = field(default_factory=dict)
    threads: DaemonPool = field(
        default_factory=lambda: DaemonPool(min(32, (os.cpu_count() or 1) + 4))
    )

    @property
    def max_model_len(self) -> int:
        return self.vllm_config.model_config.max_model_len

    @property
    def names(self) -> list[str]:
        return self.vllm_config.model_config.served_names

    def models(self) -> ModelList:
        """The served names, as GET /v1/models answers."""
        root = self.vllm_config.model_config.model
        return ModelList(
            data=[
                ModelCard(
                    id=name,
                    root=root,
                    max_model_len=self.max_model_len,
                    permission=[ModelPermission()],
                )
                for name in self.names
            ]
        )

    def check_model(self, name: str | None) -> str:
        """The name to report back; NotFoundError for one that is not served."""
        if name is None or name == "":
            return self.names[0]
        if name not in self.names:
            raise NotFoundError(
                f"The model `{name}` does not exist. Served here: "
                f"{', '.join(self.names)}.",
                param="model",
            )
        return name

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token: no text has fewer tokens than its length
        divided by this."""
        return max(map(len, self.tokenizer.get_vocab()), default=1)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a text.

        Raises VLLMValidationError for one that is too long whatever its tokens are,
        before it is tokenized.
        """
        fewest = len(text) // self.longest_token
        if fewest > self.max_model_len:
            raise VLLMValidationError(
                f"This model's maximum context length is {self.max_model_len} tokens. "
                f"However, the prompt has {len(text)} characters, at least {fewest} "
                "tokens: shorten it.",
                parameter="prompt",
                value=len(text),
            )
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def room_for(
        self, prompt_len: int, wanted: int | None, default: int | None = None
    ) -> int:
        """Tokens that may be generated behind a prompt of `prompt_len` tokens.

        `wanted` is refused when it does not fit; without it, everything that fits, at
        most `default`. Raises VLLMValidationError.
        """
        limit, room = self.max_model_len, self.max_model_len - prompt_len
        if wanted is not None and wanted < 0:
            raise VLLMValidationError(
                f"max_tokens must be at least 1, got {wanted}", parameter="max_tokens"
            )
        if room < 1 or (wanted is not None and wanted > room):
            asked = "" if wanted is None else f" and {wanted} tokens to generate"
            raise VLLMValidationError(
                f"This model's maximum context length is {limit} tokens. However, the "
                f"request has a prompt of {prompt_len} tokens{asked}: shorten the "
                "prompt or lower max_tokens.",
                parameter="max_tokens"
                if wanted is not None and room >= 1
                else "prompt",
                value=prompt_len,
            )
        if wanted is not None:
            return wanted
        return room if default is None else min(room, default)

    def truncate(self, ids: list[int], keep: int | None, max_tokens: int) -> list[int]:
        """The last `keep` tokens of a prompt; -1 keeps what leaves room to generate."""
        if keep is None:
            return ids
        if keep == -1:
            keep = max(self.max_model_len - max_tokens, 1)
        if keep > self.max_model_len:
            raise VLLMValidationError(
                f"truncate_prompt_tokens ({keep}) is above the maximum context length "
                f"({self.max_model_len})",
                parameter="truncate_prompt_tokens",
            )
        return ids[-keep:] if keep else ids

    def generate(
        self,
        ids: list[int],
        text: str | None,
        params: SamplingParams,
        request: GenerationRequest,
        request_id: str,
    ) -> AsyncIterator[RequestOutput]:
        """Starts one prompt on the engine and returns the stream of its outputs."""
        prompt = TokensPrompt(prompt_token_ids=ids)
        if text is not None:
            prompt["prompt"] = text
        if request.cache_salt is not None:
            prompt["cache_salt"] = request.cache_salt
        return self.engine.generate(
            prompt, params, request_id, priority=request.priority
        )

    def token_text(self, token_id: int, logprob: Logprob, as_id: bool) -> str:
        """How a token is shown in logprobs: its text, or "token_id:N"."""
        if as_id:
            return f"token_id:{token_id}"
        if logprob.decoded_token is not None:
            return logprob.decoded_token
        return self.tokenizer.decode([token_id])

    def shows_ids(self, request: GenerationRequest) -> bool:
        wish = request.return_tokens_as_token_ids
        return self.return_tokens_as_token_ids if wish is None else wish

    def usage(
        self, prompt_tokens: int, completion_tokens: int, cached_tokens: int | None
    ) -> UsageInfo:
        """Token counts of an answer; cached tokens where the server reports them."""
        usage = UsageInfo(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
        )
        if self.enable_prompt_tokens_details and cached_tokens is not None:
            usage.prompt_tokens_details = PromptTokensDetails(
                cached_tokens=cached_tokens
            )
        return usage


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Has VLLMValidationErrors name fields as a request names them: `names` maps a name
    in the engine to the one that the client has sent."""
    try:
        yield
    except VLLMValidationError as error:
        name = names.get(error.parameter or "")
        if name is None:
            raise
        message = str(error)
        # "the prompt" is what messages become: it is an English word as well. And
        # options of the server, such as --max-logprobs, keep their names.
        for old, new in names.items():
            if old != "prompt":
                message = re.sub(rf"(?<![\w-]){old}(?![\w-])", new, message)
        raise VLLMValidationError(message, parameter=name, value=error.value) from error


def prompt_logprobs_json(
    prompt_logprobs: Sequence[dict[int, Logprob] | None] | None,
) -> list[Any] | None:
    """Prompt logprobs as clients read them: null first, then {"<id>": {...}}."""
    if prompt_logprobs is None:
        return None
    return [
        None
        if entry is None
        else {
            str(token): {
                "logprob": max(item.logprob, -9999.0),
                "rank": item.rank,
                "decoded_token": item.decoded_token,
            }
            for token, item in entry.items()
        }
        for entry in prompt_logprobs
    ]


async def merge(
    streams: Sequence[AsyncIterator[T]],
) -> AsyncIterator[tuple[int, T]]:
    """Yields (stream index, item) as items arrive. Closes every stream at the end."""
    if len(streams) == 1:
        async for item in streams[0]:
            yield 0, item
        return
    # Each tells of itself: asking all of them would take a step of n items n² steps.
    ready: asyncio.Queue[int] = asyncio.Queue()
    waiting: dict[int, asyncio.Future[T]] = {}

    def begin(i: int) -> None:
        future = asyncio.ensure_future(anext(streams[i]))  # type: ignore[arg-type]
        future.add_done_callback(lambda _: ready.put_nowait(i))
        waiting[i] = future

    for i in range(len(streams)):
        begin(i)
    try:
        while waiting:
            i = await ready.get()
            try:
                item = waiting.pop(i).result()
            except StopAsyncIteration:
                continue
            begin(i)
            yield i, item
    finally:
        for future in waiting.values():
            future.cancel()
        await asyncio.gather(*waiting.values(), return_exceptions=True)
        for stream in streams:
            await stream.aclose()  # type: ignore[attr-defined]


async def primed(stream: AsyncIterator[T]) -> AsyncIterator[T]:
    """The same stream once its first item is there: what the engine refuses raises
    here, before an answer has begun."""
    first = await anext(stream)

    async def whole() -> AsyncIterator[T]:
        try:
            yield first
            async for item in stream:
                yield item
        finally:
            await stream.aclose()  # type: ignore[attr-defined]

    return whole()
