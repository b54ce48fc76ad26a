"""AMD devices: torch reaches them through torch.cuda. Only Triton kernels run there."""

from __future__ import annotations

from vllm.platforms.cuda import CudaPlatform
from vllm.platforms.interface import (
    AttentionSelectorConfig,
    DeviceCapability,
    PlatformEnum,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum


class RocmPlatform(CudaPlatform):
    """`device_type` is torch's word; backends know the device as "rocm". There are no
    compute capabilities: what a kernel needs, Triton's compiler decides."""

    _enum = PlatformEnum.ROCM
    device_name: str = "rocm"
    device_control_env_var: str = "HIP_VISIBLE_DEVICES"

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability | None:
        return None

    @classmethod
    def attn_backend_priority(
        cls, attn_selector_config: AttentionSelectorConfig
    ) -> list[AttentionBackendEnum]:
        return cls._triton_backends(attn_selector_config)
