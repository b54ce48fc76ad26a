"""What the engine asks of any layer that owns a KV cache."""

from abc import ABC, abstractmethod
from typing import Any

from vllm.config.vllm import VllmConfig
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.kv_cache_interface import KVCacheSpec


class AttentionLayerBase(ABC):
    """A layer listed in `static_forward_context` under its name.

    `kv_cache` is bound by the worker once the pool exists; `impl` computes.
    """

    impl: Any
    kv_cache: Any

    @abstractmethod
    def get_attn_backend(self) -> type[AttentionBackend]:
        """The backend class that reads and writes this layer's pages."""

    @abstractmethod
    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec | None:
        """What the layer stores, before any backend packs it; None for no cache."""
