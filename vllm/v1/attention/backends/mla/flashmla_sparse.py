"""FLASHMLA_SPARSE: facts of the kernels over selected latents. Publishing imports no
triton."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from vllm.v1.attention.backend import (
    AttentionMetadataBuilder,
    CacheDType,
    MultipleOf,
)
from vllm.v1.attention.backends.mla.common import MLACommonBackend
from vllm.v1.attention.backends.triton_attn import (
    OLDEST_CAPABILITY,
    TritonAttentionMetadataBuilder,
)

if TYPE_CHECKING:
    from vllm.platforms.interface import DeviceCapability


class FlashMLASparseBackend(MLACommonBackend):
    """Every quantised page is a DeepSeek record. The kernels are Triton's, so they run
    wherever it does."""

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
    supported_devices = ("cuda", "rocm", "xpu")
    required_packages = ("triton",)
    impl_path = "vllm.v1.attention.backends.mla.flashmla_sparse_impl:FlashMLASparseImpl"

    @staticmethod
    def get_name() -> str:
        return "FLASHMLA_SPARSE"

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        return TritonAttentionMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int | MultipleOf]:
        return [64]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [576]

    @classmethod
    def is_sparse(cls) -> bool:
        return True

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        return capability >= OLDEST_CAPABILITY
