"""FLASHMLA_SPARSE: facts of FlashMLA's kernels over selected latents."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from vllm.v1.attention.backend import CacheDType, MultipleOf
from vllm.v1.attention.backends.mla.common import MLACommonBackend
from vllm.v1.kv_formats import KVQuantMode, mode_by_name

if TYPE_CHECKING:
    from vllm.platforms.interface import DeviceCapability


class FlashMLASparseBackend(MLACommonBackend):
    """Compute capability 9.x and 10.x; every quantised page is a DeepSeek record."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = [
        "auto",
        "bfloat16",
        "fp8_ds_mla",
        "fp8",
        "nvfp4_ds_mla",
    ]
    kv_cache_dtype_meanings: ClassVar[dict[CacheDType, CacheDType]] = {
        "fp8": "fp8_ds_mla"
    }
    supported_devices = ("cuda",)
    required_packages = ("flash_mla",)

    @staticmethod
    def get_name() -> str:
        return "FLASHMLA_SPARSE"

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int | MultipleOf]:
        return [64]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [512, 576]

    @classmethod
    def is_sparse(cls) -> bool:
        return True

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        return capability[0] in (9, 10)

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: CacheDType | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        device_capability: DeviceCapability | None,
    ) -> str | None:
        if device_capability is None or kv_cache_dtype is None:
            return None
        nvfp4 = mode_by_name(kv_cache_dtype) is KVQuantMode.NVFP4_DS_MLA
        if nvfp4 and device_capability[0] != 10:
            return f"{kv_cache_dtype} needs compute capability 10.x"
        return None
