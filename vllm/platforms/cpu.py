"""The host's processor as a device: its memory, its backends, its defaults."""

from __future__ import annotations

import math
import platform
from typing import TYPE_CHECKING, ClassVar

import torch

from vllm import envs
from vllm.logger import init_logger
from vllm.platforms.interface import AttentionSelectorConfig, Platform, PlatformEnum
from vllm.utils.mem_constants import GiB_bytes
from vllm.utils.mem_utils import (
    available_memory_bytes,
    format_gib,
    total_memory_bytes,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

_DEFAULT_KV_CACHE_BYTES = 4 * GiB_bytes


class CpuPlatform(Platform):
    """One process on one host; pages live in host memory."""

    _enum = PlatformEnum.CPU
    device_name: str = "cpu"
    device_type: str = "cpu"
    dispatch_key: str = "CPU"
    dist_backend: str = "gloo"
    device_control_env_var: str = "CPU_VISIBLE_MEMORY_NODES"
    supported_quantization: ClassVar[list[str]] = ["gguf"]
    # Prompts are computed as fast in chunks of 256 as of 2,048 tokens (within 2 %), and
    # requests that decode meanwhile wait a quarter as long for the step to end.
    default_step_tokens: ClassVar[int] = 512

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return platform.processor() or platform.machine()

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return total_memory_bytes()

    @classmethod
    def get_current_memory_usage(cls, device: torch.device | None = None) -> float:
        return float(total_memory_bytes() - available_memory_bytes())

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        cache = vllm_config.cache_config
        if vllm_config.parallel_config.worker_cls == "auto":
            vllm_config.parallel_config.worker_cls = (
                "vllm.v1.worker.cpu_worker.CPUWorker"
            )
        super().check_and_update_config(vllm_config)
        if cache.kv_cache_memory_bytes is None:
            cache.kv_cache_memory_bytes = cls.default_kv_cache_bytes()

    @classmethod
    def default_kv_cache_bytes(cls) -> int:
        """Bytes for the KV cache when none were asked for: VLLM_CPU_KVCACHE_SPACE in
        GiB, else 4 GiB or half of the memory that is available, whichever is less."""
        asked = envs.VLLM_CPU_KVCACHE_SPACE
        if not 0 <= asked < math.inf:
            raise ValueError(
                f"VLLM_CPU_KVCACHE_SPACE={asked}: expected a positive number of GiB, "
                "or 0 to have one chosen"
            )
        if asked:
            return int(asked * GiB_bytes)
        size = min(_DEFAULT_KV_CACHE_BYTES, available_memory_bytes() // 2)
        logger.info(
            "KV cache: %s GiB of host memory; set --kv-cache-memory-bytes or "
            "VLLM_CPU_KVCACHE_SPACE (GiB) to change it.",
            format_gib(size),
        )
        return size

    @classmethod
    def attn_backend_priority(
        cls, attn_selector_config: AttentionSelectorConfig
    ) -> list[AttentionBackendEnum]:
        if attn_selector_config.use_mla:
            return [AttentionBackendEnum.CPU_MLA]
        # REFERENCE serves where it is asked for by name, never as a second choice.
        return [AttentionBackendEnum.CPU_ATTN]
