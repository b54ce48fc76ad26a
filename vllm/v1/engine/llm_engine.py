"""The synchronous engine: add requests, step, get outputs. Owns no loop."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm import envs
from vllm.config import CacheConfig, ModelConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.inputs import PromptType
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.engine.request_front import RequestFront, start_core
from vllm.v1.metrics.loggers import (
    LoggingStatLogger,
    StatLoggerManager,
    load_stat_logger_plugins,
)
from vllm.v1.metrics.prometheus import PrometheusStatLogger
from vllm.v1.metrics.stats import IterationStats


class LLMEngine:
    """An engine for callers without an event loop; the core runs in this process unless
    `multiprocess_mode` (or VLLM_ENABLE_V1_MULTIPROCESSING) asks for one of its own."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        executor_class: type | None = None,
        log_stats: bool = False,
        multiprocess_mode: bool | None = None,
        stat_loggers: Sequence[Any] | None = None,
    ) -> None:
        if multiprocess_mode is None:
            multiprocess_mode = envs.VLLM_ENABLE_V1_MULTIPROCESSING
        self.vllm_config = vllm_config
        self.log_stats = log_stats
        self.engine_core, self.tokenizer = start_core(
            vllm_config, executor_class, log_stats, multiprocess_mode=multiprocess_mode
        )
        # An engine that nobody holds any more gives its memory back at once.
        self._finalizer = weakref.finalize(self, self.engine_core.shutdown)
        self._front = RequestFront(
            vllm_config, self.engine_core, self.tokenizer, log_stats
        )
        self.output_processor = self._front.output_processor
        self.input_processor = self._front.input_processor
        self._due: list[RequestOutput] = []
        self._refusals: list[ValueError] = []
        self.logger_manager: StatLoggerManager | None = None
        if log_stats:
            factories = [LoggingStatLogger, PrometheusStatLogger]
            factories += [*load_stat_logger_plugins(), *(stat_loggers or ())]
            self.logger_manager = StatLoggerManager(vllm_config, factories)
            self.logger_manager.log_engine_initialized()

    @classmethod
    def from_vllm_config(
        cls, vllm_config: VllmConfig, disable_log_stats: bool = True, **kwargs: Any
    ) -> "LLMEngine":
        return cls(vllm_config, log_stats=not disable_log_stats, **kwargs)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **kwargs: Any) -> "LLMEngine":
        config = engine_args.create_engine_config()
        return cls(config, log_stats=not engine_args.disable_log_stats, **kwargs)

    @property
    def model_config(self) -> ModelConfig:
        return self.vllm_config.model_config

    @property
    def cache_config(self) -> CacheConfig:
        return self.vllm_config.cache_config

    def get_tokenizer(self) -> Any:
        return self.tokenizer

    @property
    def runs_in_process(self) -> bool:
        """Whether the core, and so the model, is an object of this process."""
        return isinstance(self.engine_core, InprocClient)

    def get_num_unfinished_requests(self) -> int:
        return self.output_processor.get_num_unfinished_requests()

    def has_unfinished_requests(self) -> bool:
        news = bool(self._due or self._refusals)
        return news or self.output_processor.has_unfinished_requests()

    def add_request(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
    ) -> None:
        """Accepts a request. Raises VLLMValidationError for what cannot be served."""
        self._front.add(
            request_id,
            prompt,
            params,
            arrival_time=arrival_time,
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
            trace_headers=trace_headers,
            priority=priority,
        )

    def abort_request(self, request_ids: Sequence[str]) -> list[RequestOutput]:
        """Ends requests; their last outputs have finish reason "abort"."""
        if self.logger_manager is None:
            return self._front.abort(request_ids)
        stats = IterationStats()
        last = self._front.abort(request_ids, stats)
        self.logger_manager.record(None, stats)
        return last

    def step(self) -> list[RequestOutput]:
        """One step of the core; the outputs that are due after it. Nothing happens when
        no request is unfinished.

        Raises ValueError for each request that the core refused, step by step; outputs
        that were due then come with the next step.
        """
        if self._refusals:
            raise self._refusals.pop(0)
        if not self.output_processor.has_unfinished_requests():
            return self._take_due()
        news = self.engine_core.get_output()
        stats = IterationStats() if self.log_stats else None
        processed = self.output_processor.process_outputs(
            news.outputs, news.timestamp, stats
        )
        self.engine_core.abort_requests(processed.reqs_to_abort)
        if self.logger_manager is not None:
            self.logger_manager.record(news.scheduler_stats, stats)
        self._due += processed.request_outputs
        self._refusals += processed.refusals
        if self._refusals:
            raise self._refusals.pop(0)
        return self._take_due()

    def _take_due(self) -> list[RequestOutput]:
        due, self._due = self._due, []
        return due

    def do_log_stats(self) -> None:
        """Prints the statistics of the time since the last call."""
        if self.logger_manager is not None:
            self.logger_manager.log()

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forgets cached prefixes; False while blocks are in use."""
        return self.engine_core.call(
            "reset_prefix_cache", reset_running_requests, reset_connector
        )

    def is_sleeping(self) -> bool:
        return self.engine_core.call("is_sleeping")

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Calls a method of every worker, or `method(worker, …)` where the core runs in
        this process; results in order of rank."""
        return self.engine_core.call(
            "collective_rpc", method, timeout, list(args), kwargs or {}
        )

    def shutdown(self) -> None:
        """Stops the core and frees its memory. May be called twice."""
        self._finalizer()
