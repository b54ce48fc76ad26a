"""CPU_ATTN: attention on the host, for every format that stores a K and a V per head.

Formats with compiled kernels go through them where they are built; everything else, and
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
    scales_of,
)
from vllm.v1.attention.ops import cpu_cells, cpu_kernels
from vllm.v1.attention.ops.cpu_step import LayerArgs, layer_args
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.kv_formats import KVFormat
from vllm.v1.kv_formats.base import TILE16

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

    @classmethod
    def arranged(
        cls, fmt: KVFormat, model_dtype: torch.dtype | None = None
    ) -> KVFormat:
        """Tiles of 16 states where there are kernels for them: bfloat16 on AVX-512."""
        tiled = cpu_kernels.reads_tiles(fmt, model_dtype)
        return fmt.arranged(TILE16) if tiled else super().arranged(fmt, model_dtype)


class CPUAttentionBackendImpl(ReferenceAttentionImpl):
    """Compiled kernels for decoder layers, REFERENCE for what has none."""

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
        self.uses_kernels = (
            attn_type == AttentionType.DECODER and cpu_kernels.available()
        )
        # What the kernels read: known from the first cache on, None without kernels.
        self._served: dict[tuple[torch.dtype, int], KVFormat | None] = {}

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """The model's dtype decides how states are arranged."""
        if self.attn_type == AttentionType.DECODER:
            self.format = CPUAttentionBackend.arranged(self.format, act_dtype)
            self._served.clear()

    def _served_format(self, kv_cache: torch.Tensor, size_v: int) -> KVFormat | None:
        if not self.uses_kernels:
            return None
        key = kv_cache.dtype, size_v
        if key not in self._served:
            fmt = self.format.resolve(kv_cache.dtype)
            served = cpu_cells.serves(fmt, self.head_size, size_v)
            self._served[key] = fmt if served else None
        return self._served[key]

    def do_kv_cache_update(
        self,
        layer: AttentionLayer,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        fmt = self._served_format(kv_cache, value.shape[-1])
        if fmt is None:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        elif not self.shares_kv_cache:
            cpu_kernels.store(
                kv_cache.view(torch.uint8),
                slot_mapping,
                key,
                value,
                fmt,
                scales_of(layer),
            )

    def step_args(
        self, layer: AttentionLayer, kv_cache: torch.Tensor, size_v: int
    ) -> LayerArgs | None:
        """What a step plan calls the kernels with; None where they do not serve."""
        fmt = self._served_format(kv_cache, size_v)
        if fmt is None:
            return None
        return layer_args(
            kv_cache.view(torch.uint8),
            fmt,
            self.head_size,
            size_v,
            self.scale,
            self.sliding_window or -1,
            self.soft_cap,
            self.sinks,
            scales_of(layer),
            stores=not self.shares_kv_cache,
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
        fmt = self._served_format(kv_cache, output.shape[-1])
        if attn_metadata is None or per_request or fmt is None:
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
            fmt,
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
            scales=scales_of(layer),
        )
        return output
