"""CPU_MLA: latent attention on the host, for every format that can hold a latent."""

from __future__ import annotations

from typing import ClassVar

import torch

from vllm.v1.attention.backend import CacheDType, MultipleOf
from vllm.v1.attention.backends.mla.common import MLACommonBackend
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.kv_formats import all_formats, by_name


class CPUMLABackend(MLACommonBackend):
    """Dense, fp8, per-token-head and DeepSeek's own latents, in any model dtype."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [
        torch.float16,
        torch.bfloat16,
        torch.float32,
    ]
    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = [
        fmt.name for fmt in all_formats() if fmt.latent_capable
    ]
    supported_kv_cache_layouts = (KVCacheLayout.LBHNC,)
    supported_devices = ("cpu",)
    impl_path = "vllm.v1.attention.backends.mla.reference:MLAReferenceImpl"

    @staticmethod
    def get_name() -> str:
        return "CPU_MLA"

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: CacheDType | None) -> bool:
        return kv_cache_dtype is None or by_name(kv_cache_dtype).latent_capable
