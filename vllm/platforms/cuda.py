"""NVIDIA devices through torch.cuda. Importing this module initialises no device."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch

from vllm.platforms.interface import (
    AttentionSelectorConfig,
    DeviceCapability,
    Platform,
    PlatformEnum,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# From here on FlashInfer brings kernels for the tensor cores' own instructions.
_FLASHINFER_FIRST = (10, 0)


@cache
def _capability(device_id: int) -> DeviceCapability:
    return DeviceCapability(*torch.cuda.get_device_capability(device_id))


class CudaPlatform(Platform):
    """Triton's kernels serve every format. FlashInfer's, where it is installed, come
    first on the GPUs that it has its own kernels for; REFERENCE serves what is left."""

    _enum = PlatformEnum.CUDA
    device_name: str = "cuda"
    device_type: str = "cuda"
    dispatch_key: str = "CUDA"
    ray_device_key: str = "GPU"
    dist_backend: str = "nccl"
    device_control_env_var: str = "CUDA_VISIBLE_DEVICES"

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return torch.cuda.get_device_name(device_id)

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability | None:
        return _capability(device_id)

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return torch.cuda.get_device_properties(device_id).total_memory

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        torch.cuda.set_device(device)

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        return True

    @classmethod
    def get_current_memory_usage(cls, device: torch.device | None = None) -> float:
        return float(torch.cuda.max_memory_allocated(device))

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        if vllm_config.device_config.device_type == "cpu":
            raise ValueError(
                "device cpu was asked for on a machine with CUDA devices: set "
                "VLLM_TARGET_DEVICE=cpu, or hide them by setting CUDA_VISIBLE_DEVICES "
                "to the empty string."
            )
        if vllm_config.parallel_config.worker_cls == "auto":
            vllm_config.parallel_config.worker_cls = (
                "vllm.v1.worker.gpu_worker.GPUWorker"
            )
        super().check_and_update_config(vllm_config)

    @classmethod
    def check_if_supports_dtype(cls, dtype: torch.dtype) -> None:
        if dtype is torch.bfloat16 and not cls.has_device_capability((8, 0)):
            raise ValueError(
                f"bfloat16 needs compute capability 8.0, but {cls.get_device_name()} "
                "is older: use --dtype float16."
            )

    @classmethod
    def attn_backend_priority(
        cls, attn_selector_config: AttentionSelectorConfig
    ) -> list[AttentionBackendEnum]:
        triton = cls._triton_backends(attn_selector_config)
        if attn_selector_config.use_mla:
            return triton
        own_kernels = cls.has_device_capability(_FLASHINFER_FIRST)
        at = 0 if own_kernels else triton.index(AttentionBackendEnum.REFERENCE)
        return [*triton[:at], AttentionBackendEnum.FLASHINFER, *triton[at:]]

    @classmethod
    def _triton_backends(
        cls, attn_selector_config: AttentionSelectorConfig
    ) -> list[AttentionBackendEnum]:
        if not attn_selector_config.use_mla:
            return [
                AttentionBackendEnum.TRITON_ATTN,
                AttentionBackendEnum.TURBOQUANT,
                AttentionBackendEnum.REFERENCE,
            ]
        if attn_selector_config.use_sparse:
            return [AttentionBackendEnum.FLASHMLA_SPARSE]
        return [AttentionBackendEnum.TRITON_MLA]
