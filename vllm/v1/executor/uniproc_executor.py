"""One worker, in this process: calls are plain calls."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_setting
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.worker_base import WorkerBase


class UniProcExecutor(Executor):
    """The worker class is `parallel_config.worker_cls`, which the platform fills in."""

    driver_worker: WorkerBase | None = None

    def _init_executor(self) -> None:
        path = self.vllm_config.parallel_config.worker_cls
        if path == "auto":
            raise ValueError(
                "worker_cls is 'auto': the platform "
                f"{current_platform.device_name} names no worker; set worker_cls to "
                "the dotted path of a WorkerBase subclass"
            )
        self.driver_worker = resolve_setting("worker_cls", path)(self.vllm_config)
        self.driver_worker.init_device()
        self.driver_worker.load_model()
        # Workers settle it as soon as they have built the model; a worker of another
        # package may leave it to us.
        if not self.vllm_config.cache_config._block_size_resolved:
            current_platform.update_block_size_for_backend(self.vllm_config)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        worker = self._worker()
        if callable(method):
            return [method(worker, *args, **(kwargs or {}))]
        target = getattr(worker, method, None)
        if target is None:
            raise AttributeError(f"{type(worker).__name__} has no method {method!r}")
        return [target(*args, **(kwargs or {}))]

    def _worker(self) -> WorkerBase:
        if self.driver_worker is None:
            raise RuntimeError("the executor was shut down")
        return self.driver_worker

    def _initialize_workers(self, kv_cache_configs: list[KVCacheConfig]) -> None:
        (config,) = kv_cache_configs
        self._worker().initialize_from_config(config)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        return self._worker().execute_model(scheduler_output)

    def check_health(self) -> None:
        self._worker().check_health()

    def shutdown(self) -> None:
        if self.driver_worker is not None:
            self.driver_worker.shutdown()
            self.driver_worker = None
