"""What an executor asks of a worker: one device and the model on it."""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import nn

from vllm.config import VllmConfig
from vllm.utils.import_utils import resolve
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

_KV_TRANSFER_STATE = "vllm.distributed.kv_transfer.kv_transfer_state"


class WorkerBase(ABC):
    """Start-up in this order: `init_device`, `load_model`, `get_kv_cache_spec`,
    `determine_available_memory`, `initialize_from_config`, `compile_or_warm_up_model`.
    """

    device: torch.device
    model_runner: GPUModelRunner

    def __init__(
        self,
        vllm_config: VllmConfig,
        local_rank: int = 0,
        rank: int = 0,
        distributed_init_method: str = "",
        is_driver_worker: bool = True,
    ) -> None:
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.cache_config = vllm_config.cache_config
        self.parallel_config = vllm_config.parallel_config
        self.local_rank = local_rank
        self.rank = rank
        self.distributed_init_method = distributed_init_method
        self.is_driver_worker = is_driver_worker

    @abstractmethod
    def init_device(self) -> None:
        """Takes the device, makes the model runner. ValueError if it cannot serve."""

    @abstractmethod
    def determine_available_memory(self) -> int:
        """Bytes that the KV cache may take."""

    def load_model(self) -> None:
        self.model_runner.load_model()

    def get_model(self) -> nn.Module:
        return self.model_runner.get_model()

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        return self.model_runner.get_kv_cache_spec()

    def get_layer_formats(self) -> dict[str, str]:
        return self.model_runner.get_layer_formats()

    def get_kv_cache_layout(self) -> str | None:
        """The axis order of this worker's pages; it has its plan."""
        return self.model_runner.kv_cache_config.kv_cache_layout

    def get_kv_connector_handshake_metadata(self) -> dict[tuple[int, int], Any]:
        """What this worker's connector tells peers, by (pipeline rank, tensor rank);
        empty where it has nothing to tell, and without a connector."""
        told = self.model_runner.get_kv_connector_handshake_metadata()
        num_ranks = self.parallel_config.tensor_parallel_size
        return {} if told is None else {divmod(self.rank, num_ranks): told}

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocates the planned caches, and gives them to the connector, if any."""
        if not self.vllm_config.kv_transfer_is_on:
            self.model_runner.initialize_kv_cache(kv_cache_config)
            return
        # The connector comes first: it may say from which memory the caches are taken.
        start = resolve(f"{_KV_TRANSFER_STATE}:ensure_kv_transfer_initialized")
        start(self.vllm_config, kv_cache_config)
        connector = resolve(f"{_KV_TRANSFER_STATE}:get_kv_transfer_group")()
        with connector.get_mem_pool_context():
            self.model_runner.initialize_kv_cache(kv_cache_config)
        self.model_runner.set_kv_connector(connector)

    def compile_or_warm_up_model(self) -> None:
        """Runs once what is slow the first time."""
        self.model_runner.profile_run(num_tokens=1)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        return self.model_runner.execute_model(scheduler_output)

    def update_max_model_len(self, max_model_len: int) -> None:
        self.model_runner.update_max_model_len(max_model_len)

    def check_health(self) -> None:
        """Returns if the worker works."""
        return

    def apply_model(self, func: Any) -> Any:
        """`func(model)`, for tools that look into the model."""
        return func(self.get_model())

    def shutdown(self) -> None:
        self.model_runner.shutdown()
