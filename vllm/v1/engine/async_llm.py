"""The asynchronous engine: a stream of outputs per request, the core in its own
process.

Use it on one event loop. The end of the core ends every stream with EngineDeadError.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import partial
from typing import Any

from vllm.config import ModelConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import EngineDeadError, EngineGenerateError
from vllm.inputs import PromptType
from vllm.logger import init_logger
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.utils.daemon_pool import DaemonPool
from vllm.v1.engine import FinishReason
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.output_processor import RequestOutputCollector
from vllm.v1.engine.request_front import RequestFront, start_core
from vllm.v1.metrics.loggers import (
    LoggingStatLogger,
    StatLoggerManager,
    load_stat_logger_plugins,
)
from vllm.v1.metrics.prometheus import PrometheusStatLogger
from vllm.v1.metrics.stats import IterationStats

logger = init_logger(__name__)

# Ids, characters and other values that are looked at in a millisecond.
_FEW_VALUES = 1000


class AsyncLLM:
    """Starts a core and serves it. Construction blocks until the core is ready, and
    raises ValueError or RuntimeError with the core's own message when it is not.

    `log_stats` prints a line of statistics at every `do_log_stats`; metrics for
    Prometheus are kept in any case.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        executor_class: type | None = None,
        log_stats: bool = True,
        log_requests: bool = False,
        stat_loggers: Sequence[Any] | None = None,
    ) -> None:
        self.vllm_config = vllm_config
        self.log_stats = log_stats
        self.log_requests = log_requests
        client, self.tokenizer = start_core(
            vllm_config, executor_class, log_stats=True, asyncio_mode=True
        )
        if not isinstance(client, AsyncMPClient):
            raise TypeError(f"expected an asynchronous client, got {type(client)}")
        self.engine_core = client
        self._front = RequestFront(vllm_config, client, self.tokenizer)
        self.output_processor = self._front.output_processor
        self.input_processor = self._front.input_processor
        factories: list[Any] = [LoggingStatLogger] if log_stats else []
        factories.append(PrometheusStatLogger)
        factories += [*load_stat_logger_plugins(), *(stat_loggers or ())]
        self.logger_manager = StatLoggerManager(vllm_config, factories)
        self.logger_manager.log_engine_initialized()
        self._threads = DaemonPool(2)
        self._output_task: asyncio.Task[None] | None = None
        self._dead_error: EngineDeadError | None = None

    @classmethod
    def from_vllm_config(
        cls,
        vllm_config: VllmConfig,
        stat_loggers: Sequence[Any] | None = None,
        enable_log_requests: bool = False,
        disable_log_stats: bool = False,
        **kwargs: Any,
    ) -> "AsyncLLM":
        return cls(
            vllm_config,
            log_stats=not disable_log_stats,
            log_requests=enable_log_requests,
            stat_loggers=stat_loggers,
            **kwargs,
        )

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **kwargs: Any) -> "AsyncLLM":
        return cls.from_vllm_config(
            engine_args.create_engine_config(),
            enable_log_requests=getattr(engine_args, "enable_log_requests", False),
            disable_log_stats=engine_args.disable_log_stats,
            **kwargs,
        )

    @property
    def model_config(self) -> ModelConfig:
        return self.vllm_config.model_config

    # --- requests ---------------------------------------------------------------------

    async def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields the outputs of a request until one is finished.

        Closing the generator, or cancelling the task that awaits it, aborts the
        request. Raises VLLMValidationError for what cannot be served,
        EngineGenerateError when the engine fails on this request and EngineDeadError
        when it dies.
        """
        self._check_alive()
        self._start_output_task()
        queue = RequestOutputCollector(sampling_params.output_kind, request_id)
        self.output_processor.check_is_new(request_id)
        prepare = partial(
            self.input_processor.process_inputs,
            request_id,
            prompt,
            sampling_params,
            arrival_time=arrival_time,
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
            trace_headers=trace_headers,
            priority=priority,
            data_parallel_rank=data_parallel_rank,
        )
        if _takes_a_while(sampling_params):
            prepared = await self._threads.run(prepare)
            self._check_alive()
        else:
            prepared = prepare()
        self._front.send(prepared, queue)
        if self.log_requests:
            logger.info("request %s added: %s", request_id, sampling_params)
        finished = False
        try:
            while not finished:
                output = queue.get_nowait() or await queue.get()
                finished = output.finished
                _raise_failure(output)
                yield output
        finally:
            if not finished:
                self._abort([request_id])
                if self.log_requests:
                    logger.info("request %s aborted", request_id)

    async def abort(self, request_id: str | Sequence[str]) -> None:
        """Ends requests; their streams end with finish reason "abort"."""
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        self._abort(ids)

    def abort_all(self) -> None:
        """Ends every request; their streams end with finish reason "abort"."""
        self._abort(list(self.output_processor.request_states))

    def _abort(self, request_ids: Sequence[str]) -> None:
        stats = IterationStats()
        self._front.abort(request_ids, stats)
        self.logger_manager.record(None, stats)

    def _start_output_task(self) -> None:
        task = self._output_task
        if task is None or task.get_loop() is not asyncio.get_running_loop():
            self._output_task = asyncio.create_task(self._handle_outputs())

    async def _handle_outputs(self) -> None:
        """Takes news from the core and hands them to the requests' streams, for
        ever."""
        try:
            while True:
                news = await self.engine_core.get_output_async()
                stats = IterationStats() if news.outputs else None
                processed = self.output_processor.process_outputs(
                    news.outputs, news.timestamp, stats
                )
                self.engine_core.abort_requests(processed.reqs_to_abort)
                self.logger_manager.record(news.scheduler_stats, stats)
        except asyncio.CancelledError:
            raise
        except EngineDeadError as error:
            self._die(error)
        except Exception as error:
            logger.exception("outputs can no longer be handled")
            self._die(EngineDeadError(f"outputs can no longer be handled: {error}"))

    def _die(self, error: EngineDeadError) -> None:
        self._dead_error = error
        logger.error("%s", error)
        self.output_processor.fail_all(error)

    # --- state ------------------------------------------------------------------------

    @property
    def errored(self) -> bool:
        """Says whether the engine is dead."""
        return self._dead_error is not None or self.engine_core.is_dead

    @property
    def is_running(self) -> bool:
        return not self.errored

    @property
    def dead_error(self) -> EngineDeadError:
        return self._dead_error or self.engine_core.dead_error()

    def _check_alive(self) -> None:
        if self.errored:
            raise self.dead_error

    async def check_health(self) -> None:
        """Raises EngineDeadError when the engine is dead."""
        self._check_alive()

    async def do_log_stats(self) -> None:
        """Prints the statistics of the time since the last call."""
        self.logger_manager.log()

    def get_tokenizer(self) -> Any:
        return self.tokenizer

    async def get_supported_tasks(self) -> list[str]:
        return await self.engine_core.call_async("get_supported_tasks")

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forgets cached prefixes; False while blocks are in use."""
        return await self.engine_core.call_async(
            "reset_prefix_cache", reset_running_requests, reset_connector
        )

    async def is_sleeping(self) -> bool:
        return await self.engine_core.call_async("is_sleeping")

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Calls a method of every worker; its results in order of rank."""
        return await self.engine_core.call_async(
            "collective_rpc", method, timeout, list(args), kwargs or {}
        )

    def shutdown(self) -> None:
        """Stops the core; streams that still run end with EngineDeadError."""
        if (
            self._output_task is not None
            and not self._output_task.get_loop().is_closed()
        ):
            self._output_task.cancel()
        self._output_task = None
        self.engine_core.shutdown()
        if self._dead_error is None:
            self._dead_error = self.engine_core.dead_error()
        self.output_processor.fail_all(self._dead_error)


def _takes_a_while(params: SamplingParams) -> bool:
    """Says whether checking a request keeps others waiting longer than a thread takes
    to begin: words are tokenized and grammars parsed, lists are copied."""
    return bool(
        params.structured_outputs or params.bad_words or params.num_values > _FEW_VALUES
    )


def _raise_failure(output: RequestOutput) -> None:
    """Raises EngineGenerateError for an output that ends with reason "error"."""
    for completion in output.outputs:
        if completion.finish_reason == str(FinishReason.ERROR):
            reason = completion.stop_reason or "the engine failed on it"
            raise EngineGenerateError(f"request {output.request_id} failed: {reason}")
