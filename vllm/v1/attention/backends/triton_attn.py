"""TRITON_ATTN: facts of the Triton kernels, and the pages of formats with one scale per
token and head. Publishing imports no triton."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from vllm.v1.attention.backend import AttentionType, CacheDType, MultipleOf
from vllm.v1.attention.backends.optional import OptionalBackend
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.kv_formats import KVQuantMode, by_mode, mode_by_name

if TYPE_CHECKING:
    from vllm.platforms.interface import DeviceCapability


class TritonAttentionBackend(OptionalBackend):
    """Any head size of the format; per-tensor fp8 from compute capability 8.9 on."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [
        torch.float16,
        torch.bfloat16,
        torch.float32,
    ]
    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = [
        "auto",
        "float16",
        "bfloat16",
        "fp8",
        "fp8_e4m3",
        "fp8_e5m2",
        "int4_per_token_head",
        "int8_per_token_head",
        "fp8_per_token_head",
    ]
    supported_attn_types = tuple(AttentionType)
    supported_devices = ("cuda", "rocm", "xpu")
    required_packages = ("triton",)

    @staticmethod
    def get_name() -> str:
        return "TRITON_ATTN"

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        mine = spec.kv_quant_mode.is_per_token_head and not spec.is_packed
        return spec.packed(by_mode(spec.kv_quant_mode)) if mine else spec

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return True

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
        per_tensor = mode_by_name(kv_cache_dtype) is KVQuantMode.FP8_PER_TENSOR
        if per_tensor and device_capability < (8, 9):
            other = "bfloat16" if device_capability >= (8, 0) else "float16"
            return f"{kv_cache_dtype} needs compute capability 8.9; use {other}"
        return None
