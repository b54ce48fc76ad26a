"""TRITON_ATTN: facts of the Triton kernels, their metadata, and the pages of formats
with one scale per token and head. Publishing imports no triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CacheDType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.optional import OptionalBackend
from vllm.v1.attention.ops.triton_batch import Requests
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.kv_formats import by_mode

if TYPE_CHECKING:
    from vllm.platforms.interface import DeviceCapability

# A program keeps the sums of 16 rows of values of this size in registers.
MAX_HEAD_SIZE = 512
# The oldest NVIDIA GPU that the kernels are compiled for.
OLDEST_CAPABILITY = (8, 0)


@dataclass(kw_only=True)
class TritonAttentionMetadata(AttentionMetadata):
    """The batch as the kernels take it; every tensor lies on the device."""

    num_actual_tokens: int
    requests: Requests
    causal: bool | torch.Tensor


class TritonAttentionMetadataBuilder(AttentionMetadataBuilder[TritonAttentionMetadata]):
    """Passes tensors on. Grids follow from shapes, so any batch can be captured."""

    _cudagraph_support = AttentionCGSupport.ALWAYS

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> TritonAttentionMetadata:
        common = common_attn_metadata
        return TritonAttentionMetadata(
            num_actual_tokens=common.num_actual_tokens,
            requests=requests_of(common),
            causal=common.causal,
        )


def requests_of(common: CommonAttentionMetadata) -> Requests:
    """What the kernels read of a batch."""
    return Requests(
        query_start_loc=common.query_start_loc,
        seq_lens=common.seq_lens,
        block_table=common.block_table_tensor,
        max_query_len=common.max_query_len,
        max_seq_len=common.max_seq_len,
    )


class TritonKernelBackend(OptionalBackend):
    """What the Triton backends of layers with keys and values share: one impl."""

    supported_devices = ("cuda", "rocm", "xpu")
    required_packages = ("triton",)
    impl_path = "vllm.v1.attention.backends.triton_impl:TritonAttentionImpl"

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        return TritonAttentionMetadataBuilder

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size <= MAX_HEAD_SIZE

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        return capability >= OLDEST_CAPABILITY


class TritonAttentionBackend(TritonKernelBackend):
    """Head sizes up to 512 that the format takes, on NVIDIA from capability 8.0 on: fp8
    is decoded by its bits, so no format asks for more."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [
        torch.float16,
        torch.bfloat16,
        torch.float32,
    ]
    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = [
        "auto",
        "float16",
        "bfloat16",
        "float32",
        "fp8",
        "fp8_e4m3",
        "fp8_e5m2",
        "int4_per_token_head",
        "int8_per_token_head",
        "fp8_per_token_head",
    ]

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
