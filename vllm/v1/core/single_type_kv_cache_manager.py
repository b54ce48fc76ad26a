"""The public names of the managers, and the choice of one for a group's spec."""

from typing import Any

from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.core.managers.base import SingleTypeKVCacheManager
from vllm.v1.core.managers.full import (
    CrossAttentionManager,
    FullAttentionManager,
    RSWAManager,
    SinkFullAttentionManager,
)
from vllm.v1.core.managers.local import (
    ChunkedLocalAttentionManager,
    SlidingWindowManager,
)
from vllm.v1.core.managers.mamba import MambaManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

__all__ = [
    "ChunkedLocalAttentionManager",
    "CrossAttentionManager",
    "FullAttentionManager",
    "MambaManager",
    "RSWAManager",
    "SingleTypeKVCacheManager",
    "SinkFullAttentionManager",
    "SlidingWindowManager",
    "get_manager_for_kv_cache_spec",
    "register_all_kvcache_specs",
]


def register_all_kvcache_specs(vllm_config: VllmConfig | None) -> None:
    """Makes every built-in spec known, and those that the platform adds. May be called
    again; specs that plugins registered stay."""
    KVCacheSpecRegistry.get_manager_class(FullAttentionSpec)
    if vllm_config is not None:
        current_platform.register_custom_kv_cache_specs(vllm_config)


def get_manager_for_kv_cache_spec(
    kv_cache_spec: KVCacheSpec,
    max_in_flight_tokens: int,
    max_model_len: int,
    **kwargs: Any,
) -> SingleTypeKVCacheManager:
    """The manager of one group.

    A spec that bounds what a request holds at once gets that bound, the same that sized
    the pool. Raises ValueError for a spec class that no manager is registered for.
    """
    manager_class = KVCacheSpecRegistry.get_manager_class(kv_cache_spec)
    if manager_class is None:
        raise ValueError(
            f"no manager serves KV cache specs of type {type(kv_cache_spec).__name__}: "
            "decorate the class with @register_kv_cache_spec(manager_class=...)"
        )
    bound = getattr(kv_cache_spec, "max_admission_blocks_per_request", None)
    cap = None if bound is None else bound(max_in_flight_tokens, max_model_len)
    manager: SingleTypeKVCacheManager = manager_class(
        kv_cache_spec, max_admission_blocks_per_request=cap, **kwargs
    )
    return manager
