"""Attention layers: they own a KV cache and call a backend."""

from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.attention.chunked_local_attention import (
    ChunkedLocalAttention,
)
from vllm.model_executor.layers.attention.mla_attention import MLAAttention

__all__ = ["Attention", "ChunkedLocalAttention", "MLAAttention"]
