"""Picks the backend class of one attention layer.

Knows how to put a layer's needs into words. Which backends a device offers, and in
which order, is the platform's knowledge.
"""

from __future__ import annotations

from functools import cache

import torch

from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.platforms import current_platform
from vllm.platforms.interface import AttentionSelectorConfig
from vllm.utils.import_utils import resolve_qualname
from vllm.v1.attention.backend import AttentionBackend, AttentionType
from vllm.v1.attention.backends.registry import (
    AttentionBackendEnum,
    registry_changes,
    requested_backend,
)
from vllm.v1.kv_cache_interface import KVCacheSpecKind
from vllm.v1.kv_formats import by_name

__all__ = [
    "AttentionSelectorConfig",
    "get_attn_backend",
    "get_attn_spec_kind",
]


def get_attn_backend(
    head_size: int,
    dtype: torch.dtype,
    kv_cache_dtype: str | None,
    use_mla: bool = False,
    has_sink: bool = False,
    use_sparse: bool = False,
    use_mm_prefix: bool = False,
    use_per_head_quant_scales: bool = False,
    attn_type: str | None = None,
    num_heads: int | None = None,
    has_sliding_window: bool = False,
) -> type[AttentionBackend]:
    """The backend class for such a layer under the current VllmConfig.

    `head_size` in elements, `dtype` of the model, `kv_cache_dtype` an accepted name.
    Raises ValueError listing every backend tried and its reasons.
    """
    if kv_cache_dtype is not None:
        by_name(kv_cache_dtype)  # an unknown name is an error here, not in a kernel
    attn_type = attn_type or AttentionType.DECODER
    vllm_config = get_current_vllm_config_or_none()
    attention = vllm_config.attention_config if vllm_config else None
    kind = get_attn_spec_kind(use_mla, has_sliding_window, attn_type)
    selector_config = AttentionSelectorConfig(
        head_size=head_size,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        block_size=_fixed_block_size(vllm_config),
        use_mla=use_mla,
        has_sink=has_sink,
        use_sparse=use_sparse,
        use_mm_prefix=use_mm_prefix,
        use_per_head_quant_scales=use_per_head_quant_scales,
        attn_type=attn_type,
        has_sliding_window=has_sliding_window,
        use_non_causal=bool(attention and attention.use_non_causal),
        use_kv_connector=bool(vllm_config and vllm_config.kv_transfer_config),
    )
    backend = requested_backend(attention, kind.value)
    _forget_stale_choices()
    return _cached_get_attn_backend(backend, selector_config, num_heads)


_changes_seen = 0


def _forget_stale_choices() -> None:
    """A choice holds until a class is registered under any name."""
    global _changes_seen
    if _changes_seen != registry_changes():
        _changes_seen = registry_changes()
        _cached_get_attn_backend.cache_clear()


@cache
def _cached_get_attn_backend(
    backend: AttentionBackendEnum | None,
    attn_selector_config: AttentionSelectorConfig,
    num_heads: int | None = None,
) -> type[AttentionBackend]:
    path = current_platform.get_attn_backend_cls(
        backend, attn_selector_config, num_heads
    )
    if not path:
        raise ValueError(
            f"{current_platform.device_name} offers no attention backend for "
            f"{attn_selector_config}"
        )
    return resolve_qualname(path)


def get_attn_spec_kind(
    use_mla: bool, has_sliding_window: bool, attn_type: str
) -> KVCacheSpecKind:
    """The kind of spec that a layer with these properties publishes."""
    if attn_type in (AttentionType.ENCODER, AttentionType.ENCODER_ONLY):
        return KVCacheSpecKind.ENCODER_ONLY_ATTENTION
    if attn_type == AttentionType.ENCODER_DECODER:
        return KVCacheSpecKind.CROSS_ATTENTION
    if use_mla:
        return (
            KVCacheSpecKind.SLIDING_WINDOW_MLA
            if has_sliding_window
            else KVCacheSpecKind.MLA_ATTENTION
        )
    return (
        KVCacheSpecKind.SLIDING_WINDOW
        if has_sliding_window
        else KVCacheSpecKind.FULL_ATTENTION
    )


def _fixed_block_size(vllm_config: VllmConfig | None) -> int | None:
    """The block size if the user fixed it; otherwise the backend chooses later."""
    if vllm_config is None or not vllm_config.cache_config.user_specified_block_size:
        return None
    return vllm_config.cache_config.block_size
