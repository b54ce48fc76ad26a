"""CPU_MLA: facts of latent attention on the host, for dense pages."""

from __future__ import annotations

from typing import ClassVar

import torch

from vllm.v1.attention.backend import CacheDType, MultipleOf
from vllm.v1.attention.backends.mla.common import MLACommonBackend
from vllm.v1.kv_cache_layout import KVCacheLayout


class CPUMLABackend(MLACommonBackend):
    """Dense latents in the model's dtype."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [
        torch.float16,
        torch.bfloat16,
        torch.float32,
    ]
    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = ["auto"]
    supported_kv_cache_layouts = (KVCacheLayout.LBHNC,)
    supported_devices = ("cpu",)

    @staticmethod
    def get_name() -> str:
        return "CPU_MLA"

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int | MultipleOf]:
        return [16]
