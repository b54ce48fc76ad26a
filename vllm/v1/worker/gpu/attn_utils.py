"""Views over memory that the caller allocated, as `kv_cache_init` makes them."""

from collections.abc import Sequence
from typing import Any

import torch

from vllm.v1.attention.backends.utils import get_kv_cache_layout
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.kv_cache_init import (
    LayerPages,
    backend_view,
    is_recurrent,
    state_views,
)
from vllm.v1.worker.utils import AttentionGroup


def _reshape_kv_cache(
    attn_groups: Sequence[AttentionGroup],
    kv_cache_raw_tensors: dict[str, torch.Tensor],
    cache_dtype: str,
    kernel_block_sizes: list[int],
    shared_kv_cache_layers: dict[str, str],
    kv_cache_config: KVCacheConfig | None = None,
) -> dict[str, Any]:
    """What each layer is bound to, over its raw int8 tensor.

    `kernel_block_sizes` has one entry a KV-cache group. The order of axes is the one
    that was asked for (VLLM_KV_CACHE_LAYOUT). ValueError names a layer whose tensor is
    no whole number of blocks.
    """
    layout = KVCacheLayout.from_name(get_kv_cache_layout())
    tensors = kv_cache_config.kv_cache_tensors if kv_cache_config else []
    places = {name: tensor for tensor in tensors for name in tensor.layer_names}
    views: dict[str, Any] = {}
    for group in attn_groups:
        layers = KVCacheGroupSpec(group.layer_names, group.kv_cache_spec)
        for name in group.layer_names:
            if name in shared_kv_cache_layers:
                continue
            pages = _pages(name, layers, kv_cache_raw_tensors[name], places.get(name))
            if is_recurrent(pages.spec):
                views[name] = state_views(pages)
                continue
            kernel = kernel_block_sizes[group.kv_cache_group_id]
            views[name] = backend_view(
                pages, layout, group.backend, kernel, cache_dtype
            )
    for name, target in shared_kv_cache_layers.items():
        views[name] = views[target]
    return views


def _pages(
    name: str,
    group: KVCacheGroupSpec,
    raw: torch.Tensor,
    tensor: KVCacheTensor | None,
) -> LayerPages:
    spec = group.layer_spec(name)
    tensor = tensor or KVCacheTensor(size=raw.numel(), shared_by=[name])
    stride = tensor.block_stride or spec.page_size_bytes
    num_blocks, rest = divmod(raw.numel(), stride)
    if rest:
        raise ValueError(
            f"layer {name!r}: a tensor of {raw.numel()} bytes is no whole number of "
            f"blocks of {stride} bytes"
        )
    return LayerPages(
        layer_name=name,
        spec=spec,
        tensor=tensor,
        backing=raw,
        place=tensor.layers.index(name) if tensor.layers else 0,
        num_blocks=num_blocks,
    )
