"""POST /v1/completions: prompts in, continuations out, whole or as a stream."""

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from vllm.entrypoints.openai.errors import to_error
from vllm.entrypoints.openai.protocol import (
    CompletionChoice,
    CompletionLogProbs,
    CompletionRequest,
    CompletionResponse,
    UsageInfo,
)
from vllm.entrypoints.openai.serving import (
    ServingContext,
    merge,
    primed,
    prompt_logprobs_json,
)
from vllm.exceptions import VLLMValidationError
from vllm.outputs import CompletionOutput, Logprob, RequestOutput
from vllm.sampling_params import SamplingParams, check_values

_LOGPROB_FLOOR = -9999.0


@dataclass
class Prompt:
    """One prompt of a request, as text (when known) and as token ids."""

    text: str | None
    ids: list[int]


class CompletionServer:
    """Serves completion requests over a context."""

    def __init__(self, context: ServingContext) -> None:
        self.context = context

    async def create(
        self, request: CompletionRequest
    ) -> CompletionResponse | AsyncIterator[str]:
        """Answers a request: a response, or the lines of an event stream.

        Raises NotFoundError and ValueError before anything is scheduled.
        """
        # Tokenizing a long prompt takes a while; other requests go on meanwhile.
        answer = await self.context.threads.run(_Answer, self.context, request)
        if request.stream:
            return answer.stream(await primed(merge(answer.streams)))
        return await answer.whole()


class _Answer:
    """The work on one request: its prompts, their streams and the choices from them."""

    def __init__(self, context: ServingContext, request: CompletionRequest) -> None:
        self.context, self.request = context, request
        self.model = context.check_model(request.model)
        self.id = f"cmpl-{request.request_id}"
        self.created = int(time.time())
        self.prompts = self._prompts()
        self.prompt_tokens = sum(len(p.ids) for p in self.prompts)
        self.echo_only = request.echo and request.max_tokens == 0
        self.streams = self._begin()

    def _prompts(self) -> list[Prompt]:
        """Splits the four accepted prompt forms into single prompts."""
        prompt = self.request.prompt
        if isinstance(prompt, str):
            given: list[str | list[int]] = [prompt]
        elif isinstance(prompt, list) and all(isinstance(p, int) for p in prompt):
            given = [prompt]  # type: ignore[list-item]
        else:
            given = list(prompt or [])  # type: ignore[arg-type]
        room_asked = self.request.max_tokens or 1
        prompts = []
        for item in given:
            text = item if isinstance(item, str) else None
            ids = (
                self.context.encode(item, self.request.add_special_tokens)
                if isinstance(item, str)
                else list(item)
            )
            if not ids:
                raise VLLMValidationError("prompt has no tokens", parameter="prompt")
            keep = self.request.truncate_prompt_tokens
            kept = self.context.truncate(ids, keep, room_asked)
            prompts.append(Prompt(text if kept == ids else None, kept))
        return prompts

    def _begin(self) -> list[AsyncIterator[RequestOutput]]:
        request, streams = self.request, []
        for i, prompt in enumerate(self.prompts):
            params = self._params(prompt)
            if i == 0:
                values = self.prompt_tokens + len(self.prompts) * params.num_values
                check_values(request.n, values, "prompt")
            stream = self.context.generate(
                prompt.ids, prompt.text, params, request, f"{self.id}-{i}"
            )
            streams.append(stream)
        return streams

    def _params(self, prompt: Prompt) -> SamplingParams:
        request, context = self.request, self.context
        default = context.default_sampling.get("max_tokens")
        # Scoring a prompt (max_tokens 0) samples one token, which is thrown away.
        wanted = 1 if self.echo_only else request.max_tokens
        room = context.room_for(len(prompt.ids), wanted, default)
        return request.to_sampling_params(context.default_sampling, room)

    async def whole(self) -> CompletionResponse:
        finals: dict[int, RequestOutput] = {}
        async for i, output in merge(self.streams):
            finals[i] = output
        choices, completion_tokens, cached = [], 0, 0
        for i in range(len(self.prompts)):
            final = finals[i]
            cached += final.num_cached_tokens or 0
            for out in sorted(final.outputs, key=lambda o: o.index):
                choices.append(self._choice(i, out, final, first=True))
                completion_tokens += 0 if self.echo_only else len(out.token_ids)
        return CompletionResponse(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=self.context.usage(self.prompt_tokens, completion_tokens, cached),
            kv_transfer_params=finals[0].kv_transfer_params,
        )

    async def stream(
        self, events: AsyncIterator[tuple[int, RequestOutput]]
    ) -> AsyncIterator[str]:
        generated = 0
        offsets: dict[int, int] = {}
        cached: dict[int, int] = {}
        num_cached = 0
        told: dict[int, dict[str, Any] | None] = {}
        try:
            async for i, output in events:
                num_cached -= cached.get(i, 0)
                cached[i] = output.num_cached_tokens or 0
                num_cached += cached[i]
                told[i] = output.kv_transfer_params
                for out in output.outputs:
                    key = i * self.request.n + out.index
                    first = key not in offsets
                    generated += 0 if self.echo_only else len(out.token_ids)
                    choice = self._choice(i, out, output, first, offsets.get(key, 0))
                    offsets[key] = offsets.get(key, 0) + len(choice.text)
                    usage = None
                    if self.request.continuous_usage:
                        usage = self._usage(generated, num_cached)
                    yield self._line(
                        [choice], usage, told[i] if out.finished() else None
                    )
            if self.request.include_usage or self.context.enable_force_include_usage:
                usage = self._usage(generated, num_cached)
                yield self._line([], usage, told.get(0))
        except Exception as error:
            yield f"data: {to_error(error).model_dump_json()}\n\n"
        yield "data: [DONE]\n\n"

    def _usage(self, generated: int, cached: int) -> UsageInfo:
        return self.context.usage(self.prompt_tokens, generated, cached)

    def _line(
        self,
        choices: list[CompletionChoice],
        usage: UsageInfo | None,
        told: dict[str, Any] | None,
    ) -> str:
        """One event. `told` is what the connector returned, for the last chunk of a
        prompt and for the last one of all."""
        chunk = CompletionResponse(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=usage,
            kv_transfer_params=told,
        )
        return f"data: {chunk.model_dump_json(exclude_unset=False)}\n\n"

    def _choice(
        self,
        prompt_index: int,
        out: CompletionOutput,
        output: RequestOutput,
        first: bool,
        text_start: int = 0,
    ) -> CompletionChoice:
        """One choice, or one chunk of it; the first one carries the echoed prompt."""
        request = self.request
        prompt = self.prompts[prompt_index]
        text, ids = ("", []) if self.echo_only else (out.text, list(out.token_ids))
        entries = [] if self.echo_only else list(out.logprobs or [])
        log_ids = list(ids)
        if request.echo and first:
            shown = prompt.text
            if shown is None:
                shown = self.context.tokenizer.decode(prompt.ids)
            text, log_ids = shown + text, prompt.ids + log_ids
            if request.logprobs is not None:
                entries = list(output.prompt_logprobs or []) + entries
        choice = CompletionChoice(
            index=prompt_index * request.n + out.index,
            text=text,
            finish_reason="length" if self.echo_only else out.finish_reason,
            stop_reason=out.stop_reason,
        )
        if request.logprobs is not None:
            choice.logprobs = self._logprobs(log_ids, entries, text_start)
        if request.prompt_logprobs is not None and first:
            choice.prompt_logprobs = prompt_logprobs_json(output.prompt_logprobs)
        if request.return_token_ids:
            choice.token_ids = ids
            choice.prompt_token_ids = prompt.ids if first else None
        return choice

    def _logprobs(
        self, ids: list[int], entries: list[dict[int, Logprob] | None], start: int
    ) -> CompletionLogProbs:
        """The four parallel lists of completion logprobs, one entry per token."""
        result = CompletionLogProbs()
        as_ids = self.context.shows_ids(self.request)
        limit = self.request.logprobs or 0
        offset = start
        for token, entry in zip(ids, entries, strict=True):
            if entry is None:  # the first prompt token has no prediction
                item = Logprob(0.0)
                result.token_logprobs.append(None)
                result.top_logprobs.append(None)
            else:
                item = entry[token]
                result.token_logprobs.append(max(item.logprob, _LOGPROB_FLOOR))
                result.top_logprobs.append(self._top(entry, token, limit, as_ids))
            shown = self.context.token_text(token, item, as_ids)
            result.tokens.append(shown)
            result.text_offset.append(offset)
            offset += len(shown)
        return result

    def _top(
        self, entry: dict[int, Logprob], token: int, limit: int, as_ids: bool
    ) -> dict[str, float]:
        """The `limit` most likely tokens and the chosen one, by text."""
        kept = [
            (t, item)
            for t, item in entry.items()
            if t == token or (item.rank or 0) <= limit
        ]
        return {
            self.context.token_text(t, item, as_ids): max(item.logprob, _LOGPROB_FLOOR)
            for t, item in kept
        }
