"""What the engine core asks of its workers together."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm.config import VllmConfig
from vllm.utils.import_utils import resolve, resolve_setting
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import ModelRunnerOutput

FailureCallback = Callable[[], None]

# distributed_executor_backend -> class; None stands for one process.
_EXECUTORS: dict[str | None, str] = {
    None: "vllm.v1.executor.uniproc_executor:UniProcExecutor",
    "uni": "vllm.v1.executor.uniproc_executor:UniProcExecutor",
}


class Executor(ABC):
    """All workers of one model as one object; results come in order of rank.

    Construction loads the model on every worker.
    """

    uses_ray: bool = False
    supports_pp: bool = False

    @staticmethod
    def get_class(vllm_config: VllmConfig) -> type["Executor"]:
        """The executor for a configuration: a known name, a class, or "module.Class".

        ValueError for several ranks and for backends that are not there.
        """
        parallel = vllm_config.parallel_config
        if parallel.world_size > 1:
            raise ValueError(
                f"tensor_parallel_size {parallel.tensor_parallel_size} x "
                f"pipeline_parallel_size {parallel.pipeline_parallel_size} needs "
                f"{parallel.world_size} workers, but one process serves a model here: "
                "set both to 1"
            )
        backend = parallel.distributed_executor_backend
        if inspect.isclass(backend):
            return _checked(backend, backend.__qualname__)
        if backend in _EXECUTORS:
            return _checked(resolve(_EXECUTORS[backend]), str(backend))
        if isinstance(backend, str) and "." in backend:
            found = resolve_setting("distributed_executor_backend", backend)
            return _checked(found, backend)
        raise ValueError(
            f"distributed_executor_backend {backend!r} is not supported: expected uni "
            "(one process), or the dotted path of an Executor subclass"
        )

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.vllm_config = vllm_config
        self._init_executor()

    @abstractmethod
    def _init_executor(self) -> None:
        """Starts the workers and loads the model."""

    @abstractmethod
    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Calls a method of every worker, or `method(worker, …)`; one result each."""

    @abstractmethod
    def check_health(self) -> None:
        """Raises if a worker cannot go on."""

    def get_kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        """Packed specs by layer name, of every worker."""
        return self.collective_rpc("get_kv_cache_spec")

    def get_layer_formats(self) -> dict[str, str]:
        """Format ids of all attention layers by name."""
        workers = self.collective_rpc("get_layer_formats")
        return {name: fmt for formats in workers for name, fmt in formats.items()}

    def get_kv_cache_layout(self) -> str | None:
        """The axis order that all workers found for their plans. ValueError when they
        differ."""
        layouts = set(self.collective_rpc("get_kv_cache_layout"))
        if len(layouts) > 1:
            raise ValueError(
                f"workers keep their pages in different orders ({sorted(layouts)}): "
                "set VLLM_KV_CACHE_LAYOUT to one that all of them take"
            )
        return next(iter(layouts), None)

    def get_kv_connector_handshake_metadata(self) -> dict[tuple[int, int], Any]:
        """What the workers' connectors tell peers of other engines, by (pipeline rank,
        tensor rank); empty where they have nothing to tell."""
        workers = self.collective_rpc("get_kv_connector_handshake_metadata")
        return {rank: told for found in workers for rank, told in found.items()}

    def determine_available_memory(self) -> list[int]:
        """Bytes for the KV cache, of every worker."""
        return self.collective_rpc("determine_available_memory")

    def initialize_from_config(self, kv_cache_configs: list[KVCacheConfig]) -> None:
        """Gives every worker its plan, then lets it warm up."""
        self._initialize_workers(kv_cache_configs)
        self.collective_rpc("compile_or_warm_up_model")

    @abstractmethod
    def _initialize_workers(self, kv_cache_configs: list[KVCacheConfig]) -> None:
        """Gives worker i the plan i."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """One step on every worker; the output of the first."""
        return self.collective_rpc("execute_model", args=(scheduler_output,))[0]

    def register_failure_callback(self, callback: FailureCallback) -> None:
        """Called when a worker dies; one in this process cannot."""
        return

    @property
    def max_concurrent_batches(self) -> int:
        """Steps that may be under way at once."""
        return 1

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    @abstractmethod
    def shutdown(self) -> None:
        """Stops the workers. May be called twice."""


def _checked(found: Any, origin: str) -> type[Executor]:
    if not (inspect.isclass(found) and issubclass(found, Executor)):
        raise ValueError(
            f"distributed_executor_backend {origin!r} is {found!r}: expected a "
            f"subclass of {Executor.__module__}.Executor"
        )
    return found
