"""The engine core: plans the KV cache, then schedules, computes and reports step by
step.

Knows requests as tokens. Refuses to know text, sockets and callers.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.logger import init_logger
from vllm.utils.gc_utils import collector_paused
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.utils.import_utils import find_setting, resolve_setting
from vllm.utils.mem_utils import format_bytes
from vllm.utils.text_utils import shorten
from vllm.v1.core.kv_cache_report import kv_plan
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_kv_cache_configs,
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.core.sched.interface import SchedulerInterface
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
)
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request, RequestStatus
from vllm.v1.sample.logits_processor import load_custom_logitsprocs
from vllm.v1.structured_output import StructuredOutputManager

logger = init_logger(__name__)

# How long to wait between two looks at transfers: loads, for which requests wait, and
# saves, for which only blocks do.
_WAIT_FOR_LOADS_S = 0.001
_WAIT_FOR_SAVES_S = 0.01
# And how long to wait for saves when the engine ends.
_WAIT_FOR_TRANSFERS_AT_END_S = 10.0


class EngineCore:
    """One model on one set of workers, in this process.

    Construction raises ValueError, in one sentence, for what cannot be served.
    """

    @collector_paused()
    def __init__(
        self,
        vllm_config: VllmConfig,
        executor_class: type[Executor] | None = None,
        log_stats: bool = True,
    ) -> None:
        self.vllm_config = vllm_config
        self.log_stats = log_stats
        started = time.monotonic()
        _begin_auto_fit(vllm_config)
        # What is refused by name is refused before weights are read.
        transfer = vllm_config.kv_transfer_config
        if transfer is not None and vllm_config.kv_transfer_is_on:
            KVConnectorFactory.check_config(transfer)
        cls = scheduler_class(vllm_config)
        self.structured_output_manager = StructuredOutputManager(vllm_config)
        executor_class = executor_class or Executor.get_class(vllm_config)
        self.model_executor = executor_class(vllm_config)
        with ExitStack() as undo:
            undo.callback(self.model_executor.shutdown)
            self.kv_cache_config = self._initialize_kv_caches()
            self.scheduler = self._build_scheduler(cls)
            undo.callback(self.scheduler.shutdown)
            self._exchange_handshakes()
            undo.pop_all()
        self._block_hasher = self._build_block_hasher()
        self._failures: dict[int, list[EngineCoreOutput]] = defaultdict(list)
        logger.info("Engine core is ready after %.1f s", time.monotonic() - started)

    # --- start-up ---------------------------------------------------------------------

    def _initialize_kv_caches(self) -> KVCacheConfig:
        """Prices the layers, divides the memory into blocks and gives it to the
        workers; returns the plan as the scheduler sees it."""
        config, executor = self.vllm_config, self.model_executor
        specs = executor.get_kv_cache_specs()
        has_cache = any(specs)
        available = (
            executor.determine_available_memory() if has_cache else [0] * len(specs)
        )
        max_len = config.model_config.max_model_len
        plans = get_kv_cache_configs(
            config, specs, available, layer_formats=executor.get_layer_formats()
        )
        if config.model_config.max_model_len != max_len:
            executor.collective_rpc(
                "update_max_model_len", args=(config.model_config.max_model_len,)
            )
        scheduler_plan = generate_scheduler_kv_cache_config(plans)
        config.cache_config.num_gpu_blocks = scheduler_plan.num_blocks
        executor.initialize_from_config(plans)
        if has_cache:
            scheduler_plan.kv_cache_layout = executor.get_kv_cache_layout()
            _say_cache(config, plans[0])
        return scheduler_plan

    def _build_scheduler(self, cls: type) -> Any:
        return cls(
            vllm_config=self.vllm_config,
            kv_cache_config=self.kv_cache_config,
            structured_output_manager=self.structured_output_manager,
            block_size=self.vllm_config.cache_config.block_size,
            log_stats=self.log_stats,
        )

    def _exchange_handshakes(self) -> None:
        """Lets the connector's scheduler side know how its workers can be reached."""
        connector = getattr(self.scheduler, "connector", None)
        if connector is None:
            return
        told = self.model_executor.get_kv_connector_handshake_metadata()
        if told:
            connector.set_xfer_handshake_metadata_pp_aware(told)

    def _build_block_hasher(self) -> Callable[[Request], list[Any]] | None:
        """What hashes the full blocks of a request; None when nobody looks them up."""
        cache_config = self.vllm_config.cache_config
        uses_hashes = cache_config.enable_prefix_caching
        if not uses_hashes and not self.vllm_config.kv_transfer_is_on:
            return None
        hash_fn = get_hash_fn_by_name(cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_fn)
        return get_request_block_hasher(self.scheduler.hash_block_size, hash_fn)

    def ready_report(self) -> dict[str, Any]:
        """What start-up decided, for a front-end in another process."""
        cache = self.vllm_config.cache_config
        return {
            "max_model_len": self.vllm_config.model_config.max_model_len,
            "cache": {name: getattr(cache, name) for name in REPORTED_CACHE_FIELDS},
        }

    # --- requests ---------------------------------------------------------------------

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queues a request. One that cannot be built ends with finish reason "error"
        and the message as its stop reason, in the outputs of the next step."""
        try:
            new = Request.from_engine_core_request(request, self._block_hasher)
            if new.use_structured_output:
                self.structured_output_manager.grammar_init(new)
            else:
                self.scheduler.add_request(new)
        except Exception as error:
            self._refuse(request.request_id, request.client_index, error)

    def _refuse(self, request_id: str, client: int, error: BaseException) -> None:
        reason = shorten(str(error)) or type(error).__name__
        logger.warning("request %s refused: %s", request_id, reason)
        self._failures[client].append(
            EngineCoreOutput(
                request_id,
                [],
                finish_reason=FinishReason.ERROR,
                stop_reason=reason,
                refused=isinstance(error, ValueError),
                refused_parameter=getattr(error, "parameter", None),
            )
        )

    def _add_compiled(self) -> None:
        """Queues the requests whose grammars are compiled by now."""
        for request, error in self.structured_output_manager.take_compiled():
            try:
                if error is not None:
                    raise error
                self.scheduler.add_request(request)
            except Exception as refusal:
                self._refuse(request.request_id, request.client_index, refusal)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Ends requests without further outputs; unknown ids are ignored."""
        ids = list(request_ids)
        self.structured_output_manager.abort(ids)
        self.scheduler.finish_requests(ids, RequestStatus.FINISHED_ABORTED)

    def has_work(self) -> bool:
        """Says whether a step would do anything, or soon will."""
        return (
            bool(self._failures)
            or self.scheduler.has_requests()
            or self.structured_output_manager.has_compilations()
        )

    def step(self) -> tuple[dict[int, EngineCoreOutputs], bool]:
        """One step: the news by client, and whether the model ran.

        Any exception means that the core cannot go on.
        """
        outputs: dict[int, EngineCoreOutputs] = {}
        model_ran = False
        if self.structured_output_manager.has_compilations():
            self._add_compiled()
        if self.scheduler.has_requests():
            scheduled = self.scheduler.schedule()
            try:
                computed = self.model_executor.execute_model(scheduled)
            except BaseException:
                self._abandon_step()
                raise
            outputs = self.scheduler.update_from_output(scheduled, computed)
            model_ran = scheduled.total_num_scheduled_tokens > 0
        if self._failures:
            self._add_failures(outputs)
        return outputs, model_ran

    @property
    def transfer_wait_s(self) -> float:
        """Seconds to wait for transfers after a step in which the model did not run."""
        if self.scheduler.get_num_unfinished_requests():
            return _WAIT_FOR_LOADS_S
        return _WAIT_FOR_SAVES_S

    def _abandon_step(self) -> None:
        """Takes back a step that did not end, when Ctrl-C came in between: its blocks
        are known by their hashes already, and hold nothing of what these promise."""
        self.scheduler.reset_prefix_cache(reset_running_requests=True)

    def _add_failures(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        for client, failures in self._failures.items():
            news = outputs.setdefault(client, EngineCoreOutputs(outputs=[]))
            news.outputs = [*news.outputs, *failures]
        self._failures.clear()

    # --- utilities --------------------------------------------------------------------

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forgets cached prefixes; False while blocks are in use."""
        return self.scheduler.reset_prefix_cache(
            reset_running_requests, reset_connector
        )

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Calls a method of every worker, or `method(worker, …)`; results by rank."""
        return self.model_executor.collective_rpc(
            method, timeout=timeout, args=tuple(args), kwargs=dict(kwargs or {})
        )

    def get_supported_tasks(self) -> list[str]:
        return ["generate"]

    def is_sleeping(self) -> bool:
        return False

    def _end_transfers(self) -> None:
        """Lets a connector end what it began, for a while: what it keeps is whole."""
        deadline = time.monotonic() + _WAIT_FOR_TRANSFERS_AT_END_S
        try:
            while (
                self.scheduler.has_requests()
                and not self.scheduler.get_num_unfinished_requests()
                and time.monotonic() < deadline
            ):
                self.step()
                time.sleep(_WAIT_FOR_LOADS_S)
        except Exception as error:
            logger.warning("transfers ended early: %s", error)

    def shutdown(self) -> None:
        """Frees workers, connector and publishers; may be called twice."""
        if self.vllm_config.kv_transfer_is_on:
            self._end_transfers()
        self.structured_output_manager.shutdown()
        self.scheduler.shutdown()
        self.model_executor.shutdown()


# Sizes that start-up decides, and that front-ends report.
REPORTED_CACHE_FIELDS = (
    "block_size",
    "cache_dtype",
    "num_gpu_blocks",
    "kv_cache_size_tokens",
    "kv_cache_max_concurrency",
)

# What a front-end in another process may call by name.
UTILITIES = frozenset(
    {"reset_prefix_cache", "collective_rpc", "get_supported_tasks", "is_sleeping"}
)


def scheduler_class(vllm_config: VllmConfig) -> type:
    """The scheduler of a configuration: a class, or the path of one. ValueError for
    anything else."""
    asked: Any = vllm_config.scheduler_config.scheduler_cls or Scheduler
    found = resolve_setting("scheduler_cls", asked) if isinstance(asked, str) else asked
    if not (isinstance(found, type) and issubclass(found, SchedulerInterface)):
        raise ValueError(
            f"scheduler_cls {asked!r} is {found!r}: expected a subclass of "
            f"{SchedulerInterface.__module__}.SchedulerInterface"
        )
    return found


def check_classes(vllm_config: VllmConfig, executor_class: type | None) -> None:
    """Raises ValueError for a path that leads to no class, in the front-end's process:
    before a core is started. Workers are heavy: only their module is looked for."""
    if executor_class is None:
        Executor.get_class(vllm_config)
    scheduler_class(vllm_config)
    worker = vllm_config.parallel_config.worker_cls
    if worker != "auto":
        find_setting("worker_cls", worker)
    if vllm_config.model_config is not None:
        load_custom_logitsprocs(vllm_config.model_config.logits_processors)


def _begin_auto_fit(vllm_config: VllmConfig) -> None:
    """Gives workers a length to build with where the user asked for what fits (-1)."""
    model_config = vllm_config.model_config
    if model_config.max_model_len == -1:
        model_config.original_max_model_len = -1
        model_config.max_model_len = model_config.derived_max_model_len


def _say_cache(vllm_config: VllmConfig, config: KVCacheConfig) -> None:
    """Tells the user what stores the KV cache, and how large a token and the pool
    are: the figures of `vllm kv-plan`."""
    layers = vllm_config.compilation_config.static_forward_context
    backends = {
        name: layer.attn_backend.get_name()
        for name, layer in layers.items()
        if hasattr(layer, "attn_backend")
    }
    plan = kv_plan(vllm_config, config, backends)
    for group in plan.groups:
        logger.info(
            "KV cache of layers %s: %s on %s, pages of %s bytes for %d tokens",
            group.layers,
            group.format_id or group.kind,
            group.backend or "the workers",
            f"{group.page_bytes:,}",
            group.block_size,
        )
    logger.info(
        "KV cache: %s bytes per token, %.2fx the tokens of bfloat16; %s blocks in %s",
        f"{plan.bytes_per_token:,.0f}",
        plan.saving,
        f"{plan.num_blocks:,}",
        format_bytes(plan.pool_bytes),
    )
