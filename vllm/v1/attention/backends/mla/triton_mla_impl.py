"""The impl of TRITON_MLA: latents are written and read by Triton kernels.

Decode and short queries move into the latent space; long ones attend to keys and values
expanded from the stored latents in torch, which then multiplies less.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from vllm.v1.attention.backend import PagedAttentionMetadata
from vllm.v1.attention.backends.mla.reference import (
    MLALayer,
    MLAReferenceImpl,
    by_head,
    with_head_axis,
)
from vllm.v1.attention.backends.mla.triton_mla import TritonMLAMetadata
from vllm.v1.attention.backends.reference import RequestGroup, scales_of
from vllm.v1.attention.ops import triton_latent_calls, triton_store
from vllm.v1.attention.ops.triton_batch import Masks


class TritonMLAImpl(MLAReferenceImpl):
    """The absorbed form and the stores in Triton, the rest as the reference has it."""

    def do_kv_cache_update(
        self,
        layer: MLALayer,
        key: torch.Tensor,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        fmt = self.format.resolve(kv_cache.dtype)
        if not self.shares_kv_cache:
            pages = with_head_axis(kv_cache)
            triton_store.store(pages, slot_mapping, key, None, fmt, scales_of(layer))

    def forward(
        self,
        layer: MLALayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: TritonMLAMetadata | None,
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
        )
        if attn_metadata is not None and self._uses_kernels(kv_cache, attn_metadata):
            self._attend_short_queries(layer, query, kv_cache, attn_metadata, output)
        return output

    def _uses_kernels(
        self, kv_cache: torch.Tensor, metadata: PagedAttentionMetadata
    ) -> bool:
        fmt = self.format.resolve(kv_cache.dtype)
        per_request = isinstance(metadata.causal, torch.Tensor)
        return not per_request and triton_latent_calls.serves(
            fmt, self.head_size, self.kv_lora_rank
        )

    def _request_groups(
        self, metadata: PagedAttentionMetadata, kv_cache: torch.Tensor
    ) -> Iterator[RequestGroup]:
        """What is left for the reference."""
        kernels = self._uses_kernels(kv_cache, metadata)
        if kernels and metadata.max_query_len <= self.absorb_up_to:
            return
        for group in super()._request_groups(metadata, kv_cache):
            if not (kernels and group.query_len <= self.absorb_up_to):
                yield group

    def _attend_short_queries(
        self,
        layer: MLALayer,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: TritonMLAMetadata,
        output: torch.Tensor,
    ) -> None:
        short = metadata.short(self.absorb_up_to)
        if short is None:
            return
        tokens: slice | torch.Tensor = slice(0, metadata.num_actual_tokens)
        if short.tokens is not None:
            tokens = short.tokens
        moved = self._moved(query[tokens], layer)
        attended = moved.new_empty((*moved.shape[:2], self.kv_lora_rank))
        triton_latent_calls.latent_attention(
            attended,
            moved,
            with_head_axis(kv_cache).view(torch.uint8),
            self.format.resolve(kv_cache.dtype),
            short.requests,
            self.scale,
            Masks(
                causal=metadata.causal,
                sliding_window=self.sliding_window,
                soft_cap=self.soft_cap,
            ),
            layer._k_scale_float,
        ).run()
        output[tokens] = by_head(attended, layer.W_UV).to(output.dtype)
