"""FLASHINFER: facts of the FlashInfer kernels, and the pages of NVFP4. Publishing
imports no flashinfer."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from vllm.v1.attention.backend import CacheDType, MultipleOf
from vllm.v1.attention.backends.optional import OptionalBackend
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.kv_formats import by_mode, mode_by_name

if TYPE_CHECKING:
    from vllm.platforms.interface import DeviceCapability


class FlashInferBackend(OptionalBackend):
    """Compute capability 7.5 to 12.1; NVFP4 pages on 10.x only."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = [
        "auto",
        "float16",
        "bfloat16",
        "fp8",
        "fp8_e4m3",
        "fp8_e5m2",
        "nvfp4",
        "nvfp4_4over6",
    ]
    supported_devices = ("cuda",)
    required_packages = ("flashinfer",)

    @staticmethod
    def get_name() -> str:
        return "FLASHINFER"

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        mine = spec.kv_quant_mode.is_nvfp4 and not spec.is_packed
        return spec.packed(by_mode(spec.kv_quant_mode)) if mine else spec

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int | MultipleOf]:
        return [16, 32, 64]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [64, 128, 256, 512]

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        return (7, 5) <= capability <= (12, 1)

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
        if mode_by_name(kv_cache_dtype).is_nvfp4 and device_capability[0] != 10:
            return f"{kv_cache_dtype} needs compute capability 10.x"
        return None
