"""A GPU as a device: its memory, what of it the KV cache gets, and captured decodes."""

import torch

from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.utils.mem_utils import format_gib
from vllm.v1.worker.device import CudaDevice, MemoryReading, RunnerDevice
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.worker_base import WorkerBase

logger = init_logger(__name__)


class GPUWorker(WorkerBase):
    """One process and one GPU. Its runner is the CPU's; the `RunnerDevice` differs."""

    def init_device(self) -> None:
        self.device = torch.device(current_platform.device_type, self.local_rank)
        current_platform.set_device(self.device)
        current_platform.check_if_supports_dtype(self.model_config.dtype)
        current_platform.seed_everything(self.model_config.seed)
        self.runner_device = self.make_device()
        self.runner_device.forget_peak()
        self.before = self.runner_device.memory()
        wanted = self._budget(self.before)
        if self.before.free < wanted:
            free, total = format_gib(self.before.free), format_gib(self.before.total)
            raise ValueError(
                f"{current_platform.get_device_name(self.local_rank)} has "
                f"{free} of {total} GiB free, but --gpu-memory-utilization "
                f"{self.cache_config.gpu_memory_utilization} asks for "
                f"{format_gib(wanted)} GiB: lower it, or end what else runs there"
            )
        self.model_runner = GPUModelRunner(self.vllm_config, self.device)

    def make_device(self) -> RunnerDevice:
        """What the runner captures graphs and reads memory with."""
        return CudaDevice(self.device)

    def determine_available_memory(self) -> int:
        """`kv_cache_memory_bytes`, or what the share of memory that the engine may use
        leaves beside weights, activations and graphs.

        Runs the largest step there may be. ValueError when nothing is left.
        """
        asked = self.cache_config.kv_cache_memory_bytes
        device = self.runner_device
        device.forget_peak()
        self.model_runner.profile_run()
        device.synchronize()
        now = device.memory()
        if asked is not None:
            return asked
        weights = device_bytes(self.get_model())
        graphs = self._graph_bytes(max(0, now.peak - weights))
        left = kv_cache_bytes(self._budget(now), now, graphs)
        logger.info(
            "KV cache: %s GiB of %s GiB (weights %s, peak of a step %s, outside of "
            "torch %s, graphs %s)",
            *map(
                format_gib,
                (left, now.total, weights, now.peak, now.outside_torch, graphs),
            ),
        )
        return left

    def _budget(self, memory: MemoryReading) -> int:
        return int(memory.total * self.cache_config.gpu_memory_utilization)

    def _graph_bytes(self, activations: int) -> int:
        """What the activations of the largest captured batch take of `activations`,
        those of the largest step: graphs keep theirs in a pool of their own."""
        sizes = self.model_runner.graph_sizes(self.runner_device)
        if not sizes:
            return 0
        return activations * sizes[-1] // self.model_runner.max_num_tokens

    def compile_or_warm_up_model(self) -> None:
        super().compile_or_warm_up_model()
        self.model_runner.capture_graphs(self.runner_device)


def device_bytes(model: torch.nn.Module) -> int:
    """Bytes of the model's parameters and buffers, each storage once."""
    tensors = [*model.parameters(), *model.buffers()]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def kv_cache_bytes(budget: int, memory: MemoryReading, graphs: int) -> int:
    """What of `budget` is left for the KV cache after a profiled step.

    ValueError says what takes the memory, and the ways out.
    """
    left = budget - memory.peak - memory.outside_torch - graphs
    if left <= 0:
        raise ValueError(
            f"no memory is left for the KV cache: the engine may use "
            f"{format_gib(budget)} GiB, its weights and largest step take "
            f"{format_gib(memory.peak)} GiB, graphs {format_gib(graphs)} GiB, and "
            f"{format_gib(memory.outside_torch)} GiB are taken outside of torch. Raise "
            "--gpu-memory-utilization, or lower --max-num-batched-tokens"
        )
    return left
