"""TURBOQUANT: facts of the TurboQuant kernels, and the pages of its four presets.
Publishing imports no triton."""

from __future__ import annotations

from typing import ClassVar

import torch

from vllm.v1.attention.backend import AttentionBackend, CacheDType, MultipleOf
from vllm.v1.attention.backends.triton_attn import TritonKernelBackend
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.kv_formats import by_mode, mode_by_name


class TurboQuantAttentionBackend(TritonKernelBackend):
    """Decoder attention in half precision over rotated, codebook-quantised keys."""

    accept_output_buffer = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = [
        "turboquant_k8v4",
        "turboquant_4bit_nc",
        "turboquant_k3v4_nc",
        "turboquant_3bit_nc",
    ]

    @staticmethod
    def get_name() -> str:
        return "TURBOQUANT"

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        mine = spec.kv_quant_mode.is_turboquant and not spec.is_packed
        return spec.packed(by_mode(spec.kv_quant_mode)) if mine else spec

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: CacheDType = "turboquant_4bit_nc",
    ) -> tuple[int, ...]:
        """[B, H, N, C], as by default, but for one of this backend's own formats."""
        return AttentionBackend.get_kv_cache_shape(
            num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str
        )

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int | MultipleOf]:
        return [16, 32, 64, 128]

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: CacheDType | None) -> bool:
        return kv_cache_dtype is not None and mode_by_name(kv_cache_dtype).is_turboquant
