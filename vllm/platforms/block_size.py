"""Block and page sizes of a loaded model, written into its CacheConfig.

Knows which layers a model registered. The arithmetic is `page_planning`'s, and sizes
come from each layer's own backend through its packing hook.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm
from typing import TYPE_CHECKING, Any

import torch

from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    KVCacheSpecKind,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
    get_kv_cache_spec_kind,
)
from vllm.v1.kv_formats import by_name
from vllm.v1.page_planning import LayerPages, align_heterogeneous, align_hybrid

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)


def attention_layers(
    vllm_config: VllmConfig, backend_cls: Any | None = None
) -> list[LayerPages]:
    """Every layer with an attention cache, as registered.

    Before a model is loaded there are none: then one stand-in with the model's heads
    and the engine's KV cache dtype, on `backend_cls`, if that is given.
    """
    dtype = vllm_config.model_config.dtype
    pages = []
    for name, layer, spec in _caching_layers(vllm_config):
        if get_kv_cache_spec_kind(spec) is KVCacheSpecKind.MAMBA:
            continue
        fmt = by_name(layer.kv_cache_dtype).resolve(dtype)
        backend = layer.get_attn_backend()
        pages.append(
            LayerPages(
                layer_name=name,
                backend=backend,
                raw_spec=spec,
                fmt=backend.arranged(fmt, dtype),
                model_dtype=dtype,
            )
        )
    if not pages and backend_cls is not None:
        pages.append(plain_layer(vllm_config, backend_cls))
    return pages


def recurrent_state_bytes(vllm_config: VllmConfig) -> int:
    """The largest recurrent state of a layer in bytes, 0 without such layers."""
    return max(
        (
            spec.unpadded_page_size_bytes
            for _, _, spec in _caching_layers(vllm_config)
            if get_kv_cache_spec_kind(spec) is KVCacheSpecKind.MAMBA
        ),
        default=0,
    )


def choose_block_size(vllm_config: VllmConfig, layers: list[LayerPages]) -> None:
    """Takes a block size that every backend's kernels accept, or checks the user's.

    ValueError names the backend, its sizes and the layer that needs it.
    """
    cache = vllm_config.cache_config
    if not cache.user_specified_block_size:
        default = cache.DEFAULT_BLOCK_SIZE
        wanted = {layer.backend.get_preferred_block_size(default) for layer in layers}
        cache.block_size = max(wanted, default=default)
        if any(not la.backend.supports_block_size(cache.block_size) for la in layers):
            cache.block_size = lcm(*wanted)
    for layer in layers:
        if not layer.backend.supports_block_size(cache.block_size):
            raise ValueError(
                f"block size {cache.block_size} cannot be split into kernel blocks of "
                f"{layer.backend.get_name()} ({layer.layer_name}), which takes "
                f"{layer.backend.block_sizes_in_words()} tokens: set --block-size to a "
                "multiple."
            )


def share_page_with_states(vllm_config: VllmConfig, layers: list[LayerPages]) -> None:
    """Grows attention blocks until a page holds the model's recurrent state."""
    cache = vllm_config.cache_config
    page = align_hybrid(
        layers,
        recurrent_state_bytes(vllm_config),
        cache.block_size,
        mamba_cache_mode=cache.mamba_cache_mode,
        mamba_block_size=cache.mamba_block_size,
    )
    if page is None:
        return
    cache.block_size = page.block_size
    cache.mamba_block_size = page.mamba_block_size
    cache.mamba_page_size_padded = page.mamba_page_size_padded
    logger.info(
        "Block size %d tokens: an attention page of %d bytes holds the recurrent "
        "state, which padding makes %.2f%% larger.",
        page.block_size,
        page.page_bytes,
        page.padding_percent,
    )


def share_page_between_formats(
    vllm_config: VllmConfig, layers: list[LayerPages]
) -> None:
    """Grows blocks until layers of another KV cache dtype fit the same page.

    Layers of one uniform group need not: each has a tensor with pages of its own size.
    Without the hybrid manager all layers are in such a group.
    """
    specs = {layer.layer_name: layer.raw_spec for layer in layers}
    if (
        len({layer.fmt.format_id for layer in layers}) < 2
        or vllm_config.scheduler_config.disable_hybrid_kv_cache_manager
        or UniformTypeKVCacheSpecs.is_uniform_type(specs)
    ):
        return
    cache = vllm_config.cache_config
    state_page = cache.mamba_page_size_padded or 0
    page = align_heterogeneous(layers, cache.block_size, state_page)
    if page is None:
        return
    cache.block_size = page.block_size
    cache.skip_page_size_padded = page.page_bytes
    if cache.mamba_page_size_padded is not None:
        cache.mamba_page_size_padded = page.page_bytes
    logger.info(
        "Block size %d tokens: layers of different KV cache dtypes share pages of %d "
        "bytes.",
        page.block_size,
        page.page_bytes,
    )


def plain_layer(
    vllm_config: VllmConfig,
    backend_cls: Any,
    dtype: torch.dtype | None = None,
    cache_dtype: str | None = None,
) -> LayerPages:
    """A layer with the model's heads on `backend_cls`, for questions before loading."""
    model = vllm_config.model_config
    dtype = dtype or model.dtype
    fmt = by_name(cache_dtype or vllm_config.cache_config.cache_dtype).resolve(dtype)
    spec_cls = MLAAttentionSpec if model.use_mla else FullAttentionSpec
    spec = spec_cls(
        block_size=1,
        num_kv_heads=model.get_num_kv_heads(vllm_config.parallel_config),
        head_size=model.get_head_size(),
        dtype=fmt.storage_dtype(dtype),
        kv_quant_mode=fmt.mode,
    )
    if fmt.opaque:  # its mode does not tell its bytes: published by name
        spec = spec.packed(fmt)
    return LayerPages(
        layer_name="(any layer)",
        backend=backend_cls,
        raw_spec=spec,
        fmt=fmt,
        model_dtype=dtype,
    )


def _caching_layers(
    vllm_config: VllmConfig,
) -> Iterator[tuple[str, Any, KVCacheSpec]]:
    """Name, layer and raw spec of every registered layer that keeps anything."""
    layers = vllm_config.compilation_config.static_forward_context
    for name, layer in layers.items():
        spec = layer.get_kv_cache_spec(vllm_config)
        if spec is not None:
            yield name, layer, spec
