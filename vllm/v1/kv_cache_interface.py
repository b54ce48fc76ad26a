"""The public names of the spec layer: specs, kinds of groups, and the plan.

Knows which kind a spec is and, by name only, which manager serves it. Everything else
is defined in the modules it re-exports.
"""

from __future__ import annotations

from enum import Enum

from vllm.v1.kv_cache_config import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_spec_base import (
    AttentionSpec,
    KVCacheSpec,
    SpecMergeError,
    replace_as,
)
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry, SpecError
from vllm.v1.kv_cache_specs import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_formats.mode import KVQuantMode, mode_by_name

__all__ = [
    "AttentionSpec",
    "ChunkedLocalAttentionSpec",
    "CrossAttentionSpec",
    "EncoderOnlyAttentionSpec",
    "FullAttentionSpec",
    "HiddenStateCacheSpec",
    "KVCacheConfig",
    "KVCacheGroupSpec",
    "KVCacheSpec",
    "KVCacheSpecKind",
    "KVCacheTensor",
    "KVQuantMode",
    "MLAAttentionSpec",
    "MambaSpec",
    "RSWASpec",
    "SinkFullAttentionSpec",
    "SlidingWindowMLASpec",
    "SlidingWindowSpec",
    "SpecError",
    "SpecMergeError",
    "UniformTypeKVCacheSpecs",
    "get_kv_cache_spec_kind",
    "get_kv_cache_spec_sliding_window",
    "get_kv_quant_mode",
    "is_quantized_kv_cache",
    "kv_cache_uses_per_token_head_scales",
    "replace_as",
]


def get_kv_quant_mode(kv_cache_dtype: str) -> KVQuantMode:
    """The mode of a cache-dtype name. ValueError lists the names for an unknown one."""
    return mode_by_name(kv_cache_dtype)


def is_quantized_kv_cache(kv_cache_dtype: str) -> bool:
    """True if states are stored in fewer bits than the model computes with."""
    return get_kv_quant_mode(kv_cache_dtype).is_quantized


def kv_cache_uses_per_token_head_scales(kv_cache_dtype: str) -> bool:
    """True if every (token, head) vector carries its own scale."""
    return get_kv_quant_mode(kv_cache_dtype).is_per_token_head


class KVCacheSpecKind(str, Enum):
    """What a group is, for events and backends."""

    FULL_ATTENTION = "full_attention"
    MLA_ATTENTION = "mla_attention"
    SLIDING_WINDOW = "sliding_window"
    SLIDING_WINDOW_MLA = "sliding_window_mla"
    MAMBA = "mamba"
    CHUNKED_LOCAL_ATTENTION = "chunked_local_attention"
    SINK_FULL_ATTENTION = "sink_full_attention"
    ENCODER_ONLY_ATTENTION = "encoder_only_attention"
    CROSS_ATTENTION = "cross_attention"
    UNKNOWN = "unknown"


# Subclass before base.
_KINDS: tuple[tuple[type[KVCacheSpec], KVCacheSpecKind], ...] = (
    (SlidingWindowMLASpec, KVCacheSpecKind.SLIDING_WINDOW_MLA),
    (MLAAttentionSpec, KVCacheSpecKind.MLA_ATTENTION),
    (SinkFullAttentionSpec, KVCacheSpecKind.SINK_FULL_ATTENTION),
    (FullAttentionSpec, KVCacheSpecKind.FULL_ATTENTION),
    (ChunkedLocalAttentionSpec, KVCacheSpecKind.CHUNKED_LOCAL_ATTENTION),
    (SlidingWindowSpec, KVCacheSpecKind.SLIDING_WINDOW),
    (MambaSpec, KVCacheSpecKind.MAMBA),
    (EncoderOnlyAttentionSpec, KVCacheSpecKind.ENCODER_ONLY_ATTENTION),
    (CrossAttentionSpec, KVCacheSpecKind.CROSS_ATTENTION),
)


def get_kv_cache_spec_kind(kv_cache_spec: KVCacheSpec) -> KVCacheSpecKind:
    """The kind of a layer or of a whole group."""
    if not isinstance(kv_cache_spec, UniformTypeKVCacheSpecs):
        for spec_class, kind in _KINDS:
            if isinstance(kv_cache_spec, spec_class):
                return kind
        return KVCacheSpecKind.UNKNOWN
    specs = kv_cache_spec.kv_cache_specs.values()
    kinds = {get_kv_cache_spec_kind(spec) for spec in specs}
    if len(kinds) == 1:
        return kinds.pop()
    bases = {KVCacheSpecRegistry.get_uniform_type_base_spec(spec) for spec in specs}
    if bases == {FullAttentionSpec}:
        return KVCacheSpecKind.FULL_ATTENTION
    return KVCacheSpecKind.UNKNOWN


def get_kv_cache_spec_sliding_window(kv_cache_spec: KVCacheSpec) -> int | None:
    """The window by which blocks are freed, None if they are not.

    The recorded window of a promoted full-attention spec does not count.
    """
    if isinstance(kv_cache_spec, UniformTypeKVCacheSpecs):
        windows = {
            get_kv_cache_spec_sliding_window(spec)
            for spec in kv_cache_spec.kv_cache_specs.values()
        }
        return windows.pop() if len(windows) == 1 else None
    if isinstance(kv_cache_spec, SlidingWindowSpec):
        return kv_cache_spec.sliding_window
    return None


def _declare_builtins() -> None:
    managers = "vllm.v1.core.single_type_kv_cache_manager"
    rows: tuple[tuple[type[KVCacheSpec], str, type[KVCacheSpec]], ...] = (
        (FullAttentionSpec, "FullAttentionManager", FullAttentionSpec),
        (MLAAttentionSpec, "FullAttentionManager", FullAttentionSpec),
        (HiddenStateCacheSpec, "FullAttentionManager", FullAttentionSpec),
        (RSWASpec, "RSWAManager", FullAttentionSpec),
        (SinkFullAttentionSpec, "SinkFullAttentionManager", FullAttentionSpec),
        (SlidingWindowSpec, "SlidingWindowManager", SlidingWindowSpec),
        (SlidingWindowMLASpec, "SlidingWindowManager", SlidingWindowMLASpec),
        (
            ChunkedLocalAttentionSpec,
            "ChunkedLocalAttentionManager",
            ChunkedLocalAttentionSpec,
        ),
        (MambaSpec, "MambaManager", MambaSpec),
        (CrossAttentionSpec, "CrossAttentionManager", CrossAttentionSpec),
    )
    for spec_class, manager, base in rows:
        KVCacheSpecRegistry.declare_builtin(spec_class, f"{managers}:{manager}", base)


_declare_builtins()
