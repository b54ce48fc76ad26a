"""Layers of the model by name, and compilation settings accepted for compatibility."""

from dataclasses import field
from typing import Any

from vllm.config.utils import config


@config
class CompilationConfig:
    """`static_forward_context` maps names to the layers that own a KV cache."""

    mode: Any = None
    level: int | None = None
    cudagraph_mode: Any = None
    cudagraph_capture_sizes: list[int] | None = None
    custom_ops: list[str] = field(default_factory=list)
    static_forward_context: dict[str, Any] = field(default_factory=dict, init=False)
