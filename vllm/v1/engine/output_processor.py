"""Turns the news of the core into what callers get: text, logprobs, finish reasons.

Keeps one state per running request. Knows no sockets and no scheduling.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.engine.logprobs import LogprobsProcessor, TokenTexts
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.metrics.recording import record_finished, record_output
from vllm.v1.metrics.stats import IterationStats, RequestStateStats


class RequestOutputCollector:
    """Hands the outputs of one request to one consumer.

    A consumer that lags gets one merged output: deltas are joined, others replaced. An
    exception that is put in is raised by the next `get`.
    """

    def __init__(self, output_kind: RequestOutputKind, request_id: str) -> None:
        self.request_id = request_id
        self._aggregate = output_kind == RequestOutputKind.DELTA
        self._output: RequestOutput | BaseException | None = None
        self._ready = asyncio.Event()

    def put(self, output: RequestOutput | BaseException) -> None:
        """Non-blocking; call it on the event loop's thread."""
        if isinstance(output, RequestOutput) and isinstance(
            self._output, RequestOutput
        ):
            self._output.add(output, aggregate=self._aggregate)
        elif not isinstance(self._output, BaseException):
            self._output = output
        self._ready.set()

    def get_nowait(self) -> RequestOutput | None:
        output, self._output = self._output, None
        self._ready.clear()
        if isinstance(output, BaseException):
            raise output
        return output

    async def get(self) -> RequestOutput:
        """Waits for the next output."""
        while (output := self.get_nowait()) is None:
            await self._ready.wait()
        return output


@dataclass(kw_only=True)
class RequestState:
    """One running request (one child, where n continuations were asked for)."""

    request_id: str
    index: int
    parent: ParentRequest | None
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    detokenizer: IncrementalDetokenizer
    logprobs: LogprobsProcessor
    queue: RequestOutputCollector | None
    stream_interval: int
    stats: RequestStateStats
    shows_stats: bool
    is_prefilling: bool = True
    num_cached_tokens: int = 0
    num_sent_tokens: int = 0

    @classmethod
    def from_new_request(
        cls,
        request: EngineCoreRequest,
        prompt: str | None,
        parent: ParentRequest | None,
        index: int,
        queue: RequestOutputCollector | None,
        tokenizer: Any,
        token_texts: TokenTexts | None,
        stream_interval: int,
        shows_stats: bool = True,
    ) -> "RequestState":
        params = request.sampling_params
        if params is None:
            raise VLLMValidationError(
                f"request {request.request_id!r} has no sampling parameters: only text "
                "generation is served"
            )
        prompt_token_ids = request.prompt_token_ids or []
        return cls(
            request_id=request.request_id,
            index=index,
            parent=parent,
            prompt=prompt,
            prompt_token_ids=prompt_token_ids,
            params=params,
            detokenizer=IncrementalDetokenizer.from_new_request(
                tokenizer, prompt_token_ids, params
            ),
            logprobs=LogprobsProcessor(
                token_texts if params.detokenize else None,
                params.logprobs,
                params.prompt_logprobs,
                prompt_token_ids,
                params.logprob_token_ids,
            ),
            queue=queue,
            stream_interval=params.stream_interval or stream_interval,
            stats=RequestStateStats(arrival_time=request.arrival_time),
            shows_stats=shows_stats,
        )

    def make_request_output(
        self,
        finish_reason: FinishReason | None,
        stop_reason: int | str | None,
        kv_transfer_params: dict[str, Any] | None = None,
    ) -> RequestOutput | None:
        """What the caller is to see now, or None for nothing yet."""
        finished = finish_reason is not None
        if not finished and not self._is_due():
            return None
        completion = self._completion(finish_reason, stop_reason)
        outputs = [completion]
        request_id, prompt_logprobs = self.request_id, self._pop_prompt_logprobs()
        num_cached_tokens: int | None = self.num_cached_tokens
        if (parent := self.parent) is not None:
            if self.index == 0:
                parent.prompt_logprobs = prompt_logprobs
                parent.num_cached_tokens = num_cached_tokens
            outputs = parent.collect(self.request_id, completion)
            if not outputs:
                return None
            request_id, finished = parent.request_id, parent.finished
            if parent.num_cached_tokens is not None:
                num_cached_tokens = parent.num_cached_tokens
            if self.params.output_kind == RequestOutputKind.FINAL_ONLY:
                prompt_logprobs = parent.prompt_logprobs
        return RequestOutput(
            request_id=request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=prompt_logprobs,
            outputs=outputs,
            finished=finished,
            metrics=self.stats if self.shows_stats else None,
            num_cached_tokens=num_cached_tokens,
            kv_transfer_params=kv_transfer_params,
        )

    def _is_due(self) -> bool:
        if self.params.output_kind == RequestOutputKind.FINAL_ONLY:
            return False
        num_unsent = len(self.detokenizer.token_ids) - self.num_sent_tokens
        return self.num_sent_tokens == 0 or num_unsent >= self.stream_interval

    def _pop_prompt_logprobs(self) -> Any:
        if self.params.output_kind == RequestOutputKind.DELTA:
            return self.logprobs.pop_prompt_logprobs()
        return self.logprobs.prompt_logprobs

    def _completion(
        self, finish_reason: FinishReason | None, stop_reason: int | str | None
    ) -> CompletionOutput:
        delta = self.params.output_kind == RequestOutputKind.DELTA
        text = self.detokenizer.get_next_output_text(finish_reason is not None, delta)
        start = self.num_sent_tokens if delta else 0
        token_ids = self.detokenizer.token_ids[start:]
        logprobs = self.logprobs.logprobs
        if logprobs is not None:
            logprobs = logprobs[start : start + len(token_ids)]
        self.num_sent_tokens = len(self.detokenizer.token_ids)
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=token_ids,
            cumulative_logprob=self.logprobs.cumulative_logprob,
            logprobs=logprobs,
            finish_reason=None if finish_reason is None else str(finish_reason),
            stop_reason=stop_reason,
        )


@dataclass(kw_only=True)
class OutputProcessorOutput:
    """`request_outputs` and `refusals` of requests without a queue; `reqs_to_abort`:
    requests that ended at a stop string, which the core still runs."""

    request_outputs: list[RequestOutput] = field(default_factory=list)
    refusals: list[VLLMValidationError] = field(default_factory=list)
    reqs_to_abort: list[str] = field(default_factory=list)


class OutputProcessor:
    """The states of all running requests of one front-end. With `log_stats` outputs
    carry the times of their request."""

    def __init__(
        self, tokenizer: Any = None, log_stats: bool = True, stream_interval: int = 1
    ) -> None:
        self.tokenizer = tokenizer
        self.log_stats = log_stats
        self.stream_interval = stream_interval
        self.request_states: dict[str, RequestState] = {}
        self.parent_requests: dict[str, ParentRequest] = {}
        self._token_texts = TokenTexts(tokenizer) if tokenizer is not None else None

    def get_num_unfinished_requests(self) -> int:
        return len(self.request_states)

    def has_unfinished_requests(self) -> bool:
        return bool(self.request_states)

    def check_is_new(self, request_id: str) -> None:
        """Raises VLLMValidationError for the id of a request that is still running."""
        if request_id in self.request_states or request_id in self.parent_requests:
            raise VLLMValidationError(
                f"request id {request_id!r} is already running: give each request an "
                "id of its own",
                parameter="request_id",
                value=request_id,
            )

    def add_request(
        self,
        request: EngineCoreRequest,
        prompt: str | None,
        parent: ParentRequest | None = None,
        index: int = 0,
        queue: RequestOutputCollector | None = None,
    ) -> None:
        """Begins to keep a request; `prompt` is its text, where known."""
        self.check_is_new(request.request_id)
        state = RequestState.from_new_request(
            request,
            prompt,
            parent,
            index,
            queue,
            self.tokenizer,
            self._token_texts,
            self.stream_interval,
            self.log_stats,
        )
        self.request_states[request.request_id] = state
        if parent is not None:
            self.parent_requests[parent.request_id] = parent

    def process_outputs(
        self,
        outputs: Iterable[EngineCoreOutput],
        core_timestamp: float = 0.0,
        iteration_stats: IterationStats | None = None,
    ) -> OutputProcessorOutput:
        """Takes the news of one step. News of unknown requests (aborted ones) is
        dropped."""
        result = OutputProcessorOutput()
        for output in outputs:
            state = self.request_states.get(output.request_id)
            if state is None:
                continue
            if iteration_stats is not None:
                record_output(
                    iteration_stats,
                    state.stats,
                    output,
                    core_timestamp,
                    len(state.prompt_token_ids),
                    state.is_prefilling,
                )
            self._process_one(state, output, iteration_stats, result)
        return result

    def _process_one(
        self,
        state: RequestState,
        output: EngineCoreOutput,
        iteration_stats: IterationStats | None,
        result: OutputProcessorOutput,
    ) -> None:
        finish_reason, stop_reason = output.finish_reason, output.stop_reason
        if output.refused:
            refusal = VLLMValidationError(
                str(stop_reason), parameter=output.refused_parameter
            )
            if state.queue is None:
                result.refusals.append(refusal)
            else:
                state.queue.put(refusal)
            self._forget(state, FinishReason.ERROR, iteration_stats)
            return
        if output.new_prompt_logprobs_tensors is not None:
            state.logprobs.update_prompt(output.new_prompt_logprobs_tensors)
        if state.is_prefilling and output.new_token_ids:
            state.num_cached_tokens = output.num_cached_tokens
            state.is_prefilling = False
        stopped_by_token = finish_reason == FinishReason.STOP
        stop_string = state.detokenizer.update(output.new_token_ids, stopped_by_token)
        if output.new_logprobs is not None:
            state.logprobs.update_sample(output.new_logprobs)
        if stop_string is not None:
            if finish_reason is None:
                result.reqs_to_abort.append(state.request_id)
            finish_reason, stop_reason = FinishReason.STOP, stop_string
        elif finish_reason is not None:
            state.detokenizer.finish()
        if not output.new_token_ids and finish_reason is None:
            return  # the prompt is not finished
        self._emit(state, finish_reason, stop_reason, result, output.kv_transfer_params)
        if finish_reason is not None:
            self._forget(state, finish_reason, iteration_stats)

    def _emit(
        self,
        state: RequestState,
        finish_reason: FinishReason | None,
        stop_reason: int | str | None,
        result: OutputProcessorOutput,
        kv_transfer_params: dict[str, Any] | None = None,
    ) -> None:
        request_output = state.make_request_output(
            finish_reason, stop_reason, kv_transfer_params
        )
        if request_output is None:
            return
        if state.queue is not None:
            state.queue.put(request_output)
        else:
            result.request_outputs.append(request_output)

    def _forget(
        self,
        state: RequestState,
        finish_reason: FinishReason,
        iteration_stats: IterationStats | None,
    ) -> None:
        self.request_states.pop(state.request_id, None)
        parent = state.parent
        n = 1
        if parent is not None:
            n = parent.n
            parent.unfinished_child_ids.discard(state.request_id)
            parent.max_num_generation_tokens = max(
                parent.max_num_generation_tokens, len(state.detokenizer.token_ids)
            )
            if parent.finished:
                self.parent_requests.pop(parent.request_id, None)
        if iteration_stats is None:
            return
        record_finished(
            iteration_stats,
            state.stats,
            finish_reason,
            len(state.prompt_token_ids),
            state.num_cached_tokens,
            state.params.max_tokens,
            n,
        )
        if parent is None or parent.finished:
            num_tokens = len(state.detokenizer.token_ids)
            longest = num_tokens if parent is None else parent.max_num_generation_tokens
            iteration_stats.max_num_generation_tokens_iter.append(longest)
            iteration_stats.n_params_iter.append(n)

    def abort_requests(
        self, request_ids: Iterable[str], iteration_stats: IterationStats | None = None
    ) -> tuple[list[str], list[RequestOutput]]:
        """Ends requests with finish reason "abort"; unknown ids are ignored.

        An id with several continuations stands for all of them. Returns the ids that
        the core knows, and the last outputs of those without a queue.
        """
        result = OutputProcessorOutput()
        core_ids: list[str] = []
        for request_id in list(request_ids):
            parent = self.parent_requests.get(request_id)
            children = sorted(parent.unfinished_child_ids) if parent else [request_id]
            for child_id in children:
                state = self.request_states.get(child_id)
                if state is None:
                    continue
                core_ids.append(child_id)
                state.detokenizer.finish()
                self._emit(state, FinishReason.ABORT, None, result)
                self._forget(state, FinishReason.ABORT, iteration_stats)
        return core_ids, result.request_outputs

    def fail_all(self, error: BaseException) -> None:
        """Ends every request with an error, which its consumer gets raised."""
        for state in self.request_states.values():
            if state.queue is not None:
                state.queue.put(error)
        self.request_states.clear()
        self.parent_requests.clear()
