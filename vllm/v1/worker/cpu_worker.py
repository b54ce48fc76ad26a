"""The host as a device: its threads, its memory, the KV space it was given."""

import torch

from vllm import envs
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.platforms.cpu_threads import allowed_cpus, place
from vllm.utils.mem_utils import available_memory_bytes, format_gib
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.worker_base import WorkerBase

logger = init_logger(__name__)


class CPUWorker(WorkerBase):
    """One process, torch's threads, pages in host memory."""

    def init_device(self) -> None:
        self.device = torch.device("cpu")
        self._place_threads()
        dtype = self.model_config.dtype
        if dtype not in current_platform.supported_dtypes:
            names = [
                str(d).removeprefix("torch.") for d in current_platform.supported_dtypes
            ]
            raise ValueError(
                f"dtype {dtype} does not run on a CPU: expected one of "
                f"{', '.join(names)} (--dtype)"
            )
        self.determine_available_memory()  # what never fits is said before loading
        current_platform.seed_everything(self.model_config.seed)
        self.model_runner = GPUModelRunner(self.vllm_config, self.device)

    def _place_threads(self) -> None:
        """Keeps to the CPUs of VLLM_CPU_OMP_THREADS_BIND, one thread each."""
        place(envs.VLLM_CPU_OMP_THREADS_BIND, self.local_rank)
        logger.info(
            "CPU worker: %d threads on %d CPUs",
            torch.get_num_threads(),
            len(allowed_cpus()),
        )

    def determine_available_memory(self) -> int:
        """`kv_cache_memory_bytes`, which the platform has filled in where nobody asked.

        ValueError when the host does not have that much.
        """
        asked = self.cache_config.kv_cache_memory_bytes
        if asked is None:
            asked = current_platform.default_kv_cache_bytes()
        free = available_memory_bytes()
        if asked > free:
            raise ValueError(
                f"the KV cache should take {format_gib(asked)} GiB, but the host has "
                f"{format_gib(free)} GiB left: lower --kv-cache-memory-bytes or "
                "VLLM_CPU_KVCACHE_SPACE"
            )
        return asked
