"""CPU_ATTN: attention on the host, for every format that stores a K and a V per head.

Dense pages go through the compiled kernels where they are built; everything else, and
a machine without a compiler, takes the REFERENCE path. Knows only which is which.
"""

from __future__ import annotations

import torch

from vllm.v1.attention.backend import (
    AttentionLayer,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
    PagedAttentionMetadata,
)
from vllm.v1.attention.backends.reference import (
    ReferenceAttentionBackend,
    ReferenceAttentionImpl,
)
from vllm.v1.attention.ops import cpu_kernels
from vllm.v1.kv_cache_layout import KVCacheLayout

CPUAttentionMetadata = PagedAttentionMetadata
CPUAttentionMetadataBuilder = AttentionMetadataBuilder


class CPUAttentionBackend(ReferenceAttentionBackend):
    """Publishes what REFERENCE does; pages are head-major in host memory."""

    supported_kv_cache_layouts = (KVCacheLayout.LBHNC,)
    supported_devices = ("cpu",)

    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN"

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        return CPUAttentionBackendImpl

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        return CPUAttentionMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int | MultipleOf]:
        return [MultipleOf(16)]


class CPUAttentionBackendImpl(ReferenceAttentionImpl):
    """Compiled kernels for dense decoder layers, REFERENCE for the rest."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            sinks,
        )
        dense = not (self.format.mode.is_quantized or self.format.opaque)
        self.uses_kernels = (
            dense and attn_type == AttentionType.DECODER and cpu_kernels.available()
        )

    def do_kv_cache_update(
        self,
        layer: AttentionLayer,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        if not self.uses_kernels:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        elif not self.shares_kv_cache:
            tokens = slot_mapping.shape[0]
            cpu_kernels.store_dense(
                kv_cache.view(torch.uint8),
                slot_mapping,
                key[:tokens],
                value[:tokens],
                kv_cache.dtype,
            )

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: PagedAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        per_request = attn_metadata and isinstance(attn_metadata.causal, torch.Tensor)
        if attn_metadata is None or per_request or not self.uses_kernels:
            return super().forward(
                layer,
                query,
                key,
                value,
                kv_cache,
                attn_metadata,
                output,
                output_scale,
                output_block_scale,
            )
        tokens = attn_metadata.num_actual_tokens
        cpu_kernels.paged_attention(
            output[:tokens],
            query[:tokens],
            kv_cache.view(torch.uint8),
            kv_cache.dtype,
            attn_metadata.query_start_loc,
            attn_metadata.seq_lens,
            attn_metadata.block_table,
            self.head_size,
            output.shape[-1],
            self.scale,
            sliding_window=self.sliding_window or -1,
            soft_cap=self.soft_cap,
            sinks=self.sinks,
            causal=attn_metadata.causal,
        )
        return output
