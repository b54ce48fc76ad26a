"""What backends of latent attention share: one head, one latent per token, and the
pages of its formats. Knows no model's projections."""

from __future__ import annotations

from typing import ClassVar

import torch

from vllm.v1.attention.backend import (
    AttentionMetadataBuilder,
    CacheDType,
    PagedAttentionMetadata,
)
from vllm.v1.attention.backends.optional import OptionalBackend
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.kv_formats import KVQuantMode, by_mode, by_name

MLACommonMetadata = PagedAttentionMetadata
MLACommonMetadataBuilder = AttentionMetadataBuilder


class MLACommonBackend(OptionalBackend):
    """Publishes formats with one scale per token. Records that share a mode with a
    plain format (see `KVFormat.opaque`) are published by the layer, by name."""

    accept_output_buffer = True
    forward_includes_kv_cache_update = False
    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = [
        "auto",
        "float16",
        "bfloat16",
        "fp8",
        "fp8_e4m3",
    ]
    min_block_alignment: ClassVar[int] = 128
    fallback = "a model without latent attention"

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        mode = spec.kv_quant_mode
        mine = mode.is_per_token_head or mode is KVQuantMode.NVFP4_DS_MLA
        return spec.packed(by_mode(mode)) if mine and not spec.is_packed else spec

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: CacheDType = "auto",
    ) -> tuple[int, ...]:
        """[B, N, C] in elements of the storage dtype: the single head has no axis."""
        fmt, dtype = by_name(cache_dtype_str), torch.bfloat16
        packing = fmt.packing(1, head_size, 0, dtype)
        itemsize = fmt.storage_dtype(dtype).itemsize
        return num_blocks, block_size, packing.state_bytes // itemsize

    @staticmethod
    def get_kv_cache_stride_order(
        include_num_layers_dimension: bool = False,
    ) -> tuple[int, ...]:
        return (0, 1, 2, 3) if include_num_layers_dimension else (0, 1, 2)

    @classmethod
    def is_mla(cls) -> bool:
        return True
