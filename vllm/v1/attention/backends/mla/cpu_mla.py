"""CPU_MLA: latent attention on the host, for every format that can hold a latent.

Decode and short queries go through the compiled kernels where they are built; long
queries are expanded in torch, which then multiplies less.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch

from vllm.v1.attention.backend import (
    CacheDType,
    MultipleOf,
    PagedAttentionMetadata,
)
from vllm.v1.attention.backends.mla.common import MLACommonBackend
from vllm.v1.attention.backends.mla.reference import (
    MLALayer,
    MLAReferenceImpl,
    by_head,
    with_head_axis,
)
from vllm.v1.attention.backends.reference import RequestGroup
from vllm.v1.attention.ops import cpu_latent
from vllm.v1.attention.ops.cpu_latent import LatentArgs
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
    impl_path = "vllm.v1.attention.backends.mla.cpu_mla:CPUMLAImpl"

    @staticmethod
    def get_name() -> str:
        return "CPU_MLA"

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: CacheDType | None) -> bool:
        return kv_cache_dtype is None or by_name(kv_cache_dtype).latent_capable


class CPUMLAImpl(MLAReferenceImpl):
    """The absorbed form in C++, everything else as the reference has it."""

    def forward(
        self,
        layer: MLALayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: PagedAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        super().forward(
            layer,
            query,
            key,
            value,
            kv_cache,
            attn_metadata,
            output,
            output_scale,
            output_block_scale,
        )  # but for what `_request_groups` leaves out
        if attn_metadata is not None and self._uses_kernels(kv_cache, attn_metadata):
            self._attend_short_queries(layer, query, kv_cache, attn_metadata, output)
        return output

    def do_kv_cache_update(
        self,
        layer: MLALayer,
        key: torch.Tensor,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        fmt = self.format.resolve(kv_cache.dtype)
        if not cpu_latent.serves(fmt, self.head_size, self.kv_lora_rank):
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        elif not self.shares_kv_cache:
            pages = with_head_axis(kv_cache).view(torch.uint8)
            cpu_latent.store_latents(
                pages, slot_mapping, key, fmt, layer._k_scale_float
            )

    def attend_long_queries(
        self,
        layer: MLALayer,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: PagedAttentionMetadata,
        output: torch.Tensor,
    ) -> None:
        """`forward` for queries of more than `absorb_up_to` tokens; rows of others are
        left alone. Only where the kernels serve."""
        super().forward(layer, query, query, None, kv_cache, attn_metadata, output)

    def step_args(
        self, layer: MLALayer, kv_cache: torch.Tensor, size_v: int
    ) -> LatentArgs | None:
        """What a step plan calls the kernels with; None where they do not serve."""
        fmt = self.format.resolve(kv_cache.dtype)
        if not cpu_latent.serves(fmt, self.head_size, size_v):
            return None
        return cpu_latent.latent_args(
            with_head_axis(kv_cache).view(torch.uint8),
            fmt,
            self.head_size,
            self.scale,
            layer._k_scale_float,
            self.sliding_window or -1,
            self.soft_cap,
            stores=not self.shares_kv_cache,
        )

    def _uses_kernels(
        self, kv_cache: torch.Tensor, metadata: PagedAttentionMetadata
    ) -> bool:
        fmt = self.format.resolve(kv_cache.dtype)
        per_request = isinstance(metadata.causal, torch.Tensor)
        return not per_request and cpu_latent.serves(
            fmt, self.head_size, self.kv_lora_rank
        )

    def _request_groups(
        self, metadata: PagedAttentionMetadata, kv_cache: torch.Tensor
    ) -> Iterator[RequestGroup]:
        """What is left for the reference."""
        kernels = self._uses_kernels(kv_cache, metadata)
        for group in super()._request_groups(metadata, kv_cache):
            if not (kernels and group.query_len <= self.absorb_up_to):
                yield group

    def _attend_short_queries(
        self,
        layer: MLALayer,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: PagedAttentionMetadata,
        output: torch.Tensor,
    ) -> None:
        lengths = metadata.query_lens
        rows = [i for i, n in enumerate(lengths) if 0 < n <= self.absorb_up_to]
        if not rows:
            return
        starts, lens = metadata.query_start_loc, metadata.seq_lens
        table, tokens = metadata.block_table, slice(0, metadata.num_actual_tokens)
        if len(rows) < len(lengths):
            kept = torch.tensor(rows)
            ranges = [torch.arange(starts[r], starts[r + 1]) for r in rows]
            tokens = torch.cat(ranges)
            lens, table = lens[kept], table[kept]
            starts = starts.diff()[kept].cumsum(0, dtype=torch.int32)
            starts = torch.nn.functional.pad(starts, (1, 0))
        moved = self._moved(query[tokens], layer)
        attended = moved.new_empty((*moved.shape[:2], self.kv_lora_rank))
        cpu_latent.latent_attention(
            attended,
            moved,
            with_head_axis(kv_cache).view(torch.uint8),
            self.format.resolve(kv_cache.dtype),
            starts,
            lens,
            table,
            self.scale,
            layer._k_scale_float,
            self.sliding_window or -1,
            self.soft_cap,
            metadata.causal,
        )
        output[tokens] = by_head(attended, layer.W_UV).to(output.dtype)
