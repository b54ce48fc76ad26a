"""The impl of TRITON_ATTN and TURBOQUANT: Triton kernels write and read the states.

Knows which kernel does what. Refuses to know formats' bytes and devices.
"""

from __future__ import annotations

import torch

from vllm.v1.attention.backend import AttentionImpl, AttentionLayer, AttentionType
from vllm.v1.attention.backends.reference import scales_of
from vllm.v1.attention.backends.triton_attn import TritonAttentionMetadata
from vllm.v1.attention.ops import triton_paged, triton_store
from vllm.v1.attention.ops.triton_batch import Masks
from vllm.v1.kv_formats import KVFormat, by_name


class TritonAttentionImpl(AttentionImpl[TritonAttentionMetadata]):
    """Attends to the stored bytes, in prefill as in decode."""

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
        sinks: torch.Tensor | None = None,
    ) -> None:
        if alibi_slopes is not None:
            raise ValueError(
                "ALiBi slopes are not supported by the Triton kernels: use a model "
                "with rotary or learned positions."
            )
        if attn_type != AttentionType.DECODER:
            raise ValueError(
                f"Attention type {attn_type} is not supported by the Triton kernels: "
                "expected decoder; choose REFERENCE."
            )
        if sinks is not None and sinks.shape != (num_heads,):
            raise ValueError(
                f"sinks has shape {tuple(sinks.shape)}, expected one logit for each of "
                f"{num_heads} heads"
            )
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.sliding_window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self.soft_cap = float(logits_soft_cap or 0.0)
        self.attn_type = attn_type
        self.shares_kv_cache = kv_sharing_target_layer_name is not None
        self.sinks = sinks
        self.format: KVFormat = by_name(kv_cache_dtype)
        if not triton_paged.serves(self.format):
            raise ValueError(
                f"KV cache dtype {kv_cache_dtype} has no Triton attention kernel: "
                "choose another --kv-cache-dtype or backend"
            )

    def do_kv_cache_update(
        self,
        layer: AttentionLayer,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        if self.shares_kv_cache:
            return
        fmt = self.format.resolve(kv_cache.dtype)
        scales = scales_of(layer)
        triton_store.store(kv_cache, slot_mapping, key, value, fmt, scales)

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
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
        tokens = attn_metadata.num_actual_tokens
        triton_paged.paged_attention(
            output[:tokens],
            query[:tokens],
            kv_cache.view(torch.uint8),
            self.format.resolve(kv_cache.dtype),
            attn_metadata.requests,
            self.scale,
            Masks(
                causal=attn_metadata.causal,
                sliding_window=self.sliding_window,
                soft_cap=self.soft_cap,
                sinks=self.sinks,
            ),
            scales_of(layer),
        )
        return output
