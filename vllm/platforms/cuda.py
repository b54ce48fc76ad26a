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


@cache
def _capability(device_id: int) -> DeviceCapability:
    return DeviceCapability(*torch.cuda.get_device_capability(device_id))


class CudaPlatform(Platform):
    """Backends are tried fastest first; REFERENCE serves what has no kernel."""

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
                "device cpu was asked for on a machine with CUDA devices: hide them by "
                "setting CUDA_VISIBLE_DEVICES to the empty string."
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
        if attn_selector_config.use_mla:
            return [
                AttentionBackendEnum.FLASHMLA_SPARSE
                if attn_selector_config.use_sparse
                else AttentionBackendEnum.TRITON_MLA
            ]
        return [
            AttentionBackendEnum.FLASH_ATTN,
            AttentionBackendEnum.FLASHINFER,
            AttentionBackendEnum.TRITON_ATTN,
            AttentionBackendEnum.TURBOQUANT,
            AttentionBackendEnum.REFERENCE,
        ]
