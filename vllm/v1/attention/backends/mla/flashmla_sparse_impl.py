"""The impl of FLASHMLA_SPARSE: queries attend to the states that an indexer selected.

Knows where the selection lies. Refuses to know how it is made.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from vllm.v1.attention.backend import AttentionImplBase, AttentionType
from vllm.v1.attention.backends.mla.reference import (
    MLALayer,
    by_head,
    with_head_axis,
)
from vllm.v1.attention.backends.reference import scales_of
from vllm.v1.attention.backends.triton_attn import TritonAttentionMetadata
from vllm.v1.attention.ops import triton_latent_calls, triton_store
from vllm.v1.kv_formats import KVFormat, by_name


class Indexer(Protocol):
    """Writes `topk_indices_buffer` int32 [most tokens, K] before attention runs: the
    positions in its request that each token of the batch attends to, -1 for none."""

    topk_indices_buffer: torch.Tensor


class SparseMLALayer(MLALayer, Protocol):
    """A layer of latent attention with an indexer."""

    indexer: Indexer | None


class FlashMLASparseImpl(AttentionImplBase[TritonAttentionMetadata]):
    """`query` [T, Hq, nope + rope] moves into the latent space, in prefill as in
    decode; `output` [T, Hq, v]."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        *,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        **_: Any,
    ) -> None:
        refused = {
            "ALiBi slopes": alibi_slopes is not None,
            "a sliding window": sliding_window is not None,
            "a soft cap of logits": bool(logits_soft_cap),
            f"attention type {attn_type}": attn_type != AttentionType.DECODER,
        }
        for what, asked in refused.items():
            if asked:
                raise ValueError(
                    f"{what}: not supported over selected latents; a selection is the "
                    "only mask. Use a backend that is not sparse."
                )
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.sliding_window = None
        self.kv_cache_dtype = kv_cache_dtype
        self.shares_kv_cache = kv_sharing_target_layer_name is not None
        self.kv_lora_rank = kv_lora_rank
        self.qk_nope_head_dim = qk_nope_head_dim
        self.format: KVFormat = by_name(kv_cache_dtype)

    def do_kv_cache_update(
        self,
        layer: SparseMLALayer,
        key: torch.Tensor,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Writes the latents `key` [T, 1, lora + rope]; `value` is ignored."""
        if self.shares_kv_cache:
            return
        fmt = self.format.resolve(kv_cache.dtype)
        pages = with_head_axis(kv_cache)
        triton_store.store(pages, slot_mapping, key, None, fmt, scales_of(layer))

    def forward(
        self,
        layer: SparseMLALayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: TritonAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if output_scale is not None or output_block_scale is not None:
            raise ValueError("This backend writes unquantised outputs only.")
        if attn_metadata is None:  # a profiling run has no cache to read
            return output.zero_()
        if layer.indexer is None:
            raise ValueError(
                f"layer {layer.layer_name} has no indexer, whose topk_indices_buffer "
                "tells FLASHMLA_SPARSE what to attend to: use TRITON_MLA."
            )
        tokens = attn_metadata.num_actual_tokens
        moved = self._moved(query[:tokens], layer)
        attended = moved.new_empty((tokens, self.num_heads, self.kv_lora_rank))
        triton_latent_calls.sparse_attention(
            attended,
            moved,
            with_head_axis(kv_cache).view(torch.uint8),
            self.format.resolve(kv_cache.dtype),
            attn_metadata.requests,
            layer.indexer.topk_indices_buffer[:tokens],
            self.scale,
            layer._k_scale_float,
        ).run()
        output[:tokens] = by_head(attended, layer.W_UV).to(output.dtype)
        return output

    def _moved(self, query: torch.Tensor, layer: SparseMLALayer) -> torch.Tensor:
        """Queries in the latent space: [T, Hq, lora + rope]."""
        nope = query[..., : self.qk_nope_head_dim]
        rope = query[..., self.qk_nope_head_dim :]
        return torch.cat([by_head(nope, layer.W_UK_T), rope], dim=-1)
