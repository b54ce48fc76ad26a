"""TRITON_MLA: facts of the Triton kernels for latent attention."""

from __future__ import annotations

from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.mla.common import MLACommonBackend


class TritonMLABackend(MLACommonBackend):
    """Dense and per-tensor fp8 latents in blocks of any multiple of 16 tokens."""

    supported_devices = ("cuda", "rocm", "xpu")
    required_packages = ("triton",)

    @staticmethod
    def get_name() -> str:
        return "TRITON_MLA"

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @staticmethod
    def get_kv_cache_stride_order(
        include_num_layers_dimension: bool = False,
    ) -> tuple[int, ...]:
        return (1, 0, 2, 3) if include_num_layers_dimension else (0, 1, 2)
