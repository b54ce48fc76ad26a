"""Layers that keep a recurrent state instead of keys and values."""

from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

__all__ = ["MambaMixer2"]
