"""Attention layers: they own a KV cache and call a backend."""

from vllm.model_executor.layers.attention.attention import Attention

__all__ = ["Attention"]
