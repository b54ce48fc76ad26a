"""POST /v1/chat/completions: messages in, an assistant message out."""

import time
from collections.abc import AsyncIterator
from typing import Any

from vllm.entrypoints.openai.errors import to_error
from vllm.entrypoints.openai.protocol import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatDelta,
    ChatLogProbContent,
    ChatLogProbs,
    ChatMessage,
    ChatTopLogProb,
    UsageInfo,
)
from vllm.entrypoints.openai.serving import (
    ServingContext,
    primed,
    prompt_logprobs_json,
    renamed,
)
from vllm.exceptions import VLLMValidationError
from vllm.outputs import CompletionOutput, Logprob, RequestOutput
from vllm.transformers_utils.chat_template import flatten_content, render_chat

_LOGPROB_FLOOR = -9999.0


def encoded_chat(context: ServingContext, request: Any) -> tuple[str, list[int]]:
    """The prompt of a request's messages, as text and as token ids. Raises
    VLLMValidationError."""
    text = _prompt(context, request)
    with renamed({"prompt": "messages"}):
        return text, context.encode(text, bool(request.add_special_tokens))


def _prompt(context: ServingContext, request: Any) -> str:
    variables = dict(request.chat_template_kwargs or {})
    _check_trust(context, "chat_template", request.chat_template)
    _check_trust(context, "chat_template_kwargs", variables.get("chat_template"))
    # /tokenize has no such fields.
    if (effort := getattr(request, "reasoning_effort", None)) is not None:
        variables.setdefault("reasoning_effort", effort)
    try:
        return render_chat(
            context.tokenizer,
            request.messages,
            chat_template=request.chat_template or context.chat_template,
            tools=request.tools,
            documents=getattr(request, "documents", None),
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            chat_template_kwargs=variables,
        )
    except VLLMValidationError:
        raise
    except ValueError as error:
        param = "chat_template" if request.chat_template else "messages"
        raise VLLMValidationError(str(error), parameter=param) from error


def _check_trust(context: ServingContext, name: str, template: Any) -> None:
    if template is not None and not context.trust_request_chat_template:
        raise VLLMValidationError(
            f"{name}: this server takes no chat template from requests, since one can "
            "run for ever; leave it out, or start the server with "
            "--trust-request-chat-template",
            parameter=name,
        )


class ChatServer:
    """Serves chat completion requests over a context."""

    def __init__(self, context: ServingContext) -> None:
        self.context = context

    async def create(
        self, request: ChatCompletionRequest
    ) -> ChatCompletionResponse | AsyncIterator[str]:
        """Answers a request: a response, or the lines of an event stream.

        Raises NotFoundError and ValueError before anything is scheduled.
        """
        # Tokenizing a long prompt takes a while; other requests go on meanwhile.
        with renamed(request.names_of_fields):
            answer = await self.context.threads.run(_Answer, self.context, request)
            if request.stream:
                return answer.stream(await primed(answer.outputs))
            return await answer.whole()


class _Answer:
    def __init__(self, context: ServingContext, request: ChatCompletionRequest) -> None:
        self.context, self.request = context, request
        self.model = context.check_model(request.model)
        self.id = f"chatcmpl-{request.request_id}"
        self.created = int(time.time())
        self.role = "assistant"
        text, ids = encoded_chat(context, request)
        wanted = request.wanted_tokens
        self.ids = context.truncate(ids, request.truncate_prompt_tokens, wanted or 1)
        if wanted == 0:
            raise VLLMValidationError(
                "max_tokens must be at least 1, got 0", parameter="max_tokens"
            )
        room = context.room_for(
            len(self.ids), wanted, context.default_sampling.get("max_tokens")
        )
        params = request.to_sampling_params(context.default_sampling, room)
        self.outputs = context.generate(self.ids, text, params, request, self.id)

    def _prefix(self) -> str:
        """The text that echo puts before the answer: a continued message's own."""
        if not self.request.echo:
            return ""
        last = self.request.messages[-1]
        is_assistant = last.get("role") == self.role
        return str(flatten_content(last)["content"]) if is_assistant else ""

    async def whole(self) -> ChatCompletionResponse:
        final: RequestOutput | None = None
        async for output in self.outputs:
            final = output
        if final is None:
            raise RuntimeError(f"request {self.id} ended without output")
        outs = sorted(final.outputs, key=lambda o: o.index)
        choices = [
            ChatChoice(
                index=out.index,
                message=ChatMessage(content=self._prefix() + out.text),
                logprobs=self._logprobs(out),
                finish_reason=out.finish_reason,
                stop_reason=out.stop_reason,
                token_ids=list(out.token_ids)
                if self.request.return_token_ids
                else None,
            )
            for out in outs
        ]
        return ChatCompletionResponse(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=self.context.usage(
                len(self.ids),
                sum(len(out.token_ids) for out in outs),
                final.num_cached_tokens,
            ),
            prompt_logprobs=prompt_logprobs_json(final.prompt_logprobs),
            prompt_token_ids=self.ids if self.request.return_token_ids else None,
            kv_transfer_params=final.kv_transfer_params,
        )

    async def stream(self, outputs: AsyncIterator[RequestOutput]) -> AsyncIterator[str]:
        generated: dict[int, int] = {}
        cached, told = 0, None
        try:
            async for output in outputs:
                cached = output.num_cached_tokens or 0
                told = output.kv_transfer_params
                for out in output.outputs:
                    if out.index not in generated:
                        generated[out.index] = 0
                        yield self._opening(out.index, cached)
                    generated[out.index] += len(out.token_ids)
                    yield self._line(
                        [self._chunk(out)],
                        self._running_usage(generated, cached),
                        told if out.finished() else None,
                    )
            if self.request.include_usage or self.context.enable_force_include_usage:
                yield self._line([], self._usage(generated, cached), told)
        except Exception as error:
            yield f"data: {to_error(error).model_dump_json()}\n\n"
        yield "data: [DONE]\n\n"

    def _opening(self, index: int, cached: int) -> str:
        """The first chunk of a choice: the role, with the echoed prefix if any."""
        delta = ChatDelta(role=self.role, content=self._prefix())
        return self._line(
            [ChatChunkChoice(index=index, delta=delta)],
            self._running_usage({}, cached),
        )

    def _chunk(self, out: CompletionOutput) -> ChatChunkChoice:
        return ChatChunkChoice(
            index=out.index,
            delta=ChatDelta(content=out.text),
            logprobs=self._logprobs(out),
            finish_reason=out.finish_reason,
            stop_reason=out.stop_reason,
            token_ids=list(out.token_ids) if self.request.return_token_ids else None,
        )

    def _usage(self, generated: dict[int, int], cached: int) -> UsageInfo:
        return self.context.usage(len(self.ids), sum(generated.values()), cached)

    def _running_usage(
        self, generated: dict[int, int], cached: int
    ) -> UsageInfo | None:
        if not self.request.continuous_usage:
            return None
        return self._usage(generated, cached)

    def _line(
        self,
        choices: list[ChatChunkChoice],
        usage: UsageInfo | None,
        told: dict[str, Any] | None = None,
    ) -> str:
        """One event. `told` is what the connector returned, for the last chunks."""
        chunk = ChatCompletionChunk(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=usage,
            kv_transfer_params=told,
        )
        return f"data: {chunk.model_dump_json(exclude_none=False)}\n\n"

    def _logprobs(self, out: CompletionOutput) -> ChatLogProbs | None:
        """Logprobs of the generated tokens, each with its `top_logprobs` likeliest."""
        if not self.request.logprobs or out.logprobs is None:
            return None
        limit = self.request.top_logprobs or 0
        content = []
        for token, entry in zip(out.token_ids, out.logprobs, strict=True):
            chosen = self._top(token, entry[token])
            ranked = sorted(entry.items(), key=lambda pair: pair[1].rank or 0)
            top = [
                self._top(t, item) for t, item in ranked if (item.rank or 0) <= limit
            ]
            content.append(
                ChatLogProbContent(**chosen.model_dump(), top_logprobs=top[:limit])
            )
        return ChatLogProbs(content=content)

    def _top(self, token: int, item: Logprob) -> ChatTopLogProb:
        text = self.context.token_text(
            token, item, self.context.shows_ids(self.request)
        )
        return ChatTopLogProb(
            token=text,
            logprob=max(item.logprob, _LOGPROB_FLOOR),
            bytes=list(text.encode("utf-8", errors="replace")),
        )
