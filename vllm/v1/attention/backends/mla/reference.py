"""Latent attention in plain torch over any format's `store` and `load`.

Knows the two forms of the same sum: absorbed (queries move into the latent space) and
expanded (latents become keys and values of every head). Both attend to what is stored,
so that a cached prefix and a computed one give the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from vllm.v1.attention.backend import AttentionLayer, PagedAttentionMetadata
from vllm.v1.attention.backends.reference import Chunk, ReferenceAttentionImpl
from vllm.v1.attention.ops.online_softmax import OnlineSoftmax
from vllm.v1.kv_formats import KVScales

# Keys and values of all heads that may be expanded at once, in float32 bytes.
_MAX_EXPANDED_BYTES = 64 << 20


class MLALayer(AttentionLayer, Protocol):
    """What an impl of latent attention may read from its layer, besides scales.

    `W_KV` [Hq, nope + v, lora] turns a latent into a head's key part and value.
    `W_UK_T` [Hq, nope, lora] and `W_UV` [Hq, lora, v] are views of its two parts.
    """

    W_KV: torch.Tensor
    W_UK_T: torch.Tensor
    W_UV: torch.Tensor


class MLAReferenceImpl(ReferenceAttentionImpl):
    """`query` [T, Hq, nope + rope], `key` the latent with its rotary part
    [T, 1, lora + rope], no `value`; `output` [T, Hq, v]. One state per token."""

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
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        *,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        **_: Any,
    ) -> None:
        super().__init__(
            num_heads,
            head_size,
            scale,
            1,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
        )
        self.kv_lora_rank = kv_lora_rank
        self.qk_nope_head_dim = qk_nope_head_dim
        self.qk_rope_head_dim = qk_rope_head_dim
        self.v_head_dim = v_head_dim
        self.absorb_up_to = self._longest_absorbed_query()

    def _longest_absorbed_query(self) -> int:
        """Queries per request up to which the absorbed form multiplies less.

        A query and a state cost 2 lora + rope absorbed and nope + rope + v expanded;
        expanding a state costs lora (nope + v) once. At least 1: decode is absorbed.
        """
        expanded = self.qk_nope_head_dim + self.v_head_dim
        saved = 2 * self.kv_lora_rank - expanded
        if saved <= 0:
            return 1 << 30
        return max(1, self.kv_lora_rank * expanded // saved)

    def do_kv_cache_update(
        self,
        layer: AttentionLayer,
        key: torch.Tensor,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Writes the latents `key` [T, 1, lora + rope]; `value` is ignored."""
        if self.shares_kv_cache:
            return
        self.format.resolve(kv_cache.dtype).store(
            with_head_axis(kv_cache).view(torch.uint8),
            slot_mapping,
            key[: slot_mapping.shape[0]],
            None,
            KVScales(k=layer._k_scale_float, v=layer._v_scale_float),
        )

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: PagedAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return super().forward(
            layer,
            query,
            key,
            value,
            with_head_axis(kv_cache),
            attn_metadata,
            output,
            output_scale,
            output_block_scale,
        )

    def _value_size(self, output: torch.Tensor) -> int:
        return 0

    def _max_chunk_states(self, query_len: int) -> int:
        states = super()._max_chunk_states(query_len)
        if query_len <= self.absorb_up_to:
            return states
        sizes = self.qk_nope_head_dim + self.qk_rope_head_dim + self.v_head_dim
        state_bytes = self.num_heads * sizes * torch.float32.itemsize
        return min(states, _MAX_EXPANDED_BYTES // state_bytes)

    def _attend(
        self,
        query: torch.Tensor,
        chunks: Iterator[Chunk],
        layer: MLALayer,
        output: torch.Tensor,
    ) -> torch.Tensor:
        absorbed = query.shape[1] <= self.absorb_up_to
        form = self._attend_absorbed if absorbed else self._attend_expanded
        return form(query, _latents(chunks), layer).to(output.dtype)

    def _attend_absorbed(
        self, query: torch.Tensor, latents: Iterator[Chunk], layer: MLALayer
    ) -> torch.Tensor:
        """One head of latents for all query heads: keys are whole states, values
        their latent part."""
        moved = self._moved(query, layer)
        attended = OnlineSoftmax(moved, 1, self.kv_lora_rank, self.scale, self.soft_cap)
        for latent, _, mask in latents:
            attended.add(latent, latent[..., : self.kv_lora_rank], mask)
        return by_head(attended.result().to(layer.W_UV.dtype), layer.W_UV)

    def _moved(self, query: torch.Tensor, layer: MLALayer) -> torch.Tensor:
        """Queries [..., Hq, nope + rope] in the latent space [..., Hq, lora + rope]."""
        nope = query[..., : self.qk_nope_head_dim]
        rope = query[..., self.qk_nope_head_dim :]
        return torch.cat([by_head(nope, layer.W_UK_T), rope], dim=-1)

    def _attend_expanded(
        self, query: torch.Tensor, latents: Iterator[Chunk], layer: MLALayer
    ) -> torch.Tensor:
        """Keys and values of every head, made chunk by chunk from the latents."""
        heads, nope = self.num_heads, self.qk_nope_head_dim
        weight = layer.W_KV.flatten(0, 1)
        attended = OnlineSoftmax(
            query, heads, self.v_head_dim, self.scale, self.soft_cap
        )
        for latent, _, mask in latents:
            compressed = latent[..., 0, : self.kv_lora_rank].to(weight.dtype)
            both = F.linear(compressed, weight).unflatten(-1, (heads, -1)).float()
            rope = latent[..., self.kv_lora_rank :].expand(-1, -1, heads, -1)
            key = torch.cat([both[..., :nope], rope], dim=-1)
            attended.add(key, both[..., nope:], mask)
        return attended.result()


def with_head_axis(kv_cache: torch.Tensor) -> torch.Tensor:
    """Pages [B, N, C] or [B, 1, N, C] as [B, 1, N, C]."""
    return kv_cache.unsqueeze(1) if kv_cache.dim() == 3 else kv_cache


def _latents(chunks: Iterator[Chunk]) -> Iterator[Chunk]:
    """Chunks with zeros where no query sees a state: it may hold anything, and a
    latent is a value too."""
    for latent, value, mask in chunks:
        unseen = ~mask.any(1)[..., None, None]
        yield latent.masked_fill(unseen, 0.0), value, mask


def by_head(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [..., Hq, a] times each head's weight [Hq, a, b]: [..., Hq, b]."""
    rows = x.flatten(0, -3).transpose(0, 1).to(weight.dtype)
    return torch.bmm(rows, weight).transpose(0, 1).view(*x.shape[:-1], -1)
