"""Turns bytes into views: the only code that lays pages over memory.

Knows the plan (tensors, strides, blocks), the axis order and the specs. Refuses to
know formats' bytes, models and schedules. A view is [B, H, N, C]: blocks, head slots,
states, bytes of a state; a layer sees it in the spec's dtype.
"""

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from vllm.utils.math_utils import round_up
from vllm.v1.attention.backend import AttentionBackend, checked_kv_cache_shape
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    KVCacheSpecKind,
    KVCacheTensor,
    get_kv_cache_spec_kind,
)
from vllm.v1.kv_cache_layout import B, KVCacheLayout, L, compute_layout_strides

_HUGE_PAGE_BYTES = 1 << 21
# Stands for the number of blocks when a backend is asked which axis counts them.
BLOCKS_PROBE = 1_000_003


@dataclass(frozen=True, kw_only=True)
class LayerPages:
    """Where one layer's pages lie: `tensor` describes a part of `backing` (int8, 1-D).

    `place` is the layer's index in `tensor.layers`, 0 where that is not used.
    """

    layer_name: str
    spec: KVCacheSpec
    tensor: KVCacheTensor
    backing: torch.Tensor
    place: int
    num_blocks: int

    @property
    def block_stride(self) -> int:
        """Bytes from one block of this layer to the next."""
        return self.tensor.block_stride or self.spec.page_size_bytes

    @property
    def start(self) -> int:
        """Byte of the backing at which the layer's first block starts."""
        return self.tensor.offset + self.place * self.tensor.layer_stride


# --- bytes --------------------------------------------------------------------------


def zeroed_bytes(size: int, device: torch.device) -> torch.Tensor:
    """An int8 tensor of `size` zero bytes.

    On the host: fresh pages from the kernel, which cost nothing until they are touched,
    in huge pages where the system grants them.
    """
    if device.type != "cpu" or size == 0:
        return torch.zeros(size, dtype=torch.int8, device=device)
    memory = mmap.mmap(-1, round_up(size, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE)
    if size >= _HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.int8, count=size)


def allocate_pages(
    config: KVCacheConfig, device: torch.device
) -> dict[str, LayerPages]:
    """Memory for every tensor of the plan, and the place of every layer in it.

    Tensors with a block stride are parts of one backing. ValueError names the layer
    when the plan leaves a layer out, gives two layers of a group the same pages, or has
    a size that does not fit its blocks.
    """
    specs = config.layer_specs()
    group_of = {
        name: group_id
        for group_id, group in enumerate(config.kv_cache_groups)
        for name in group.layer_names
    }
    shared_backing: torch.Tensor | None = None
    pages: dict[str, LayerPages] = {}
    for tensor in config.kv_cache_tensors:
        if tensor.block_stride == 0:
            backing = zeroed_bytes(tensor.size, device)
        else:
            if shared_backing is None:
                shared_backing = zeroed_bytes(tensor.size, device)
            backing = shared_backing
            _check_backing(tensor, backing)
        _check_users(tensor, group_of)
        for place, name in enumerate(tensor.layer_names):
            pages[name] = LayerPages(
                layer_name=name,
                spec=specs[name],
                tensor=tensor,
                backing=backing,
                place=place if tensor.layers else 0,
                num_blocks=config.num_blocks,
            )
            _check_size(pages[name])
    if missing := specs.keys() - pages.keys():
        raise ValueError(
            f"layers {', '.join(sorted(missing))} have a KV cache spec, but no tensor "
            "of the plan holds their pages"
        )
    return pages


def _check_backing(tensor: KVCacheTensor, backing: torch.Tensor) -> None:
    if tensor.size != backing.numel():
        raise ValueError(
            f"tensors with a block stride share one backing, but have "
            f"{backing.numel()} and {tensor.size} bytes"
        )


def _check_users(tensor: KVCacheTensor, group_of: Mapping[str, int]) -> None:
    for name in tensor.layer_names:
        if name not in group_of:
            raise ValueError(
                f"a KV cache tensor is for layer {name!r}, which is in no group"
            )
    groups = [group_of[name] for name in tensor.shared_by]
    if not tensor.layers and len(set(groups)) != len(groups):
        raise ValueError(
            f"layers {', '.join(tensor.shared_by)} share the pages of one tensor, but "
            "some are in one group and would overwrite each other's blocks"
        )


def _check_size(pages: LayerPages) -> None:
    tensor, spec = pages.tensor, pages.spec
    if tensor.block_stride == 0:
        expected = spec.page_size_bytes * pages.num_blocks
        if tensor.size != expected:
            raise ValueError(
                f"layer {pages.layer_name!r}: a tensor of {tensor.size} bytes does not "
                f"hold {pages.num_blocks} blocks of {spec.page_size_bytes} bytes "
                f"({expected})"
            )
    elif not tensor.layers and tensor.offset + spec.page_size_bytes > (
        tensor.block_stride
    ):
        raise ValueError(
            f"layer {pages.layer_name!r}: a page of {spec.page_size_bytes} bytes at "
            f"offset {tensor.offset} does not fit a block of {tensor.block_stride}"
        )


# --- views --------------------------------------------------------------------------


def byte_view(pages: LayerPages, layout: KVCacheLayout) -> torch.Tensor:
    """The layer's pages as bytes: uint8 [num_blocks, H, N, C], manager blocks.

    ValueError when the view would leave the backing.
    """
    spec = _attention(pages)
    cell = (spec.num_heads, spec.num_states, spec.state_content_size_bytes)
    tensor = pages.tensor
    if tensor.block_stride:
        padded, fixed = None, {B: tensor.block_stride}
        if tensor.layers:
            fixed[L] = tensor.layer_stride
    else:
        padded, fixed = spec.page_size_padded, {}
    num_layers = max(1, len(tensor.layers))
    shape = (pages.num_blocks, *cell)
    strides = compute_layout_strides(
        layout, (num_layers, *shape), page_size_padded=padded, fixed=fixed
    )[1:]
    _check_inside(pages, layout, shape, strides)
    return pages.backing.view(torch.uint8).as_strided(shape, strides, pages.start)


def _attention(pages: LayerPages) -> AttentionSpec:
    return pages.spec  # type: ignore[return-value]  # the caller asked for its kind


def _check_inside(
    pages: LayerPages,
    layout: KVCacheLayout,
    shape: Sequence[int],
    strides: Sequence[int],
) -> None:
    last = sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if n)
    end = pages.start + last + 1
    if prod(shape) and end > pages.backing.numel():
        raise ValueError(
            f"layer {pages.layer_name!r} in layout {layout.name}: pages {tuple(shape)} "
            f"with byte strides {tuple(strides)} from byte {pages.start} end at {end}, "
            f"outside of the backing of {pages.backing.numel()} bytes"
        )


def kernel_byte_view(
    pages: LayerPages, layout: KVCacheLayout, kernel_block_size: int
) -> torch.Tensor:
    """The same pages in blocks of `kernel_block_size` tokens: uint8 [B*r, H, N/r, C].

    A manager block splits into r kernel blocks only where it is one dense page.
    ValueError names the layout, the sizes and the way out otherwise.
    """
    spec = _attention(pages)
    view = byte_view(pages, layout)
    ratio, rest = divmod(spec.block_size, kernel_block_size)
    if ratio == 1 and rest == 0:
        return view
    page, stride = spec.unpadded_page_size_bytes, view.stride(0)
    if rest or spec.num_states % ratio or stride != page:
        raise ValueError(
            f"layer {pages.layer_name!r}: blocks of {spec.block_size} tokens cannot "
            f"split into kernel blocks of {kernel_block_size} tokens (ratio {ratio}) "
            f"in layout {layout.name}: a block starts every {stride} bytes, its dense "
            f"page has {page} bytes and {spec.num_states} states. Set --block-size to "
            f"{kernel_block_size}, or VLLM_KV_CACHE_LAYOUT to a layout whose layers "
            "are compact (LBHNC, LBNHC)."
        )
    shape = (
        pages.num_blocks * ratio,
        spec.num_heads,
        spec.num_states // ratio,
        spec.state_content_size_bytes,
    )
    strides = compute_layout_strides(layout, (1, *shape))[1:]
    return view.as_strided(shape, strides, view.storage_offset())


def typed_view(view: torch.Tensor, dtype: torch.dtype, layer_name: str) -> torch.Tensor:
    """Bytes [..., C] as elements [..., C / itemsize].

    ValueError when a state does not start or end on an element.
    """
    size = dtype.itemsize
    places = (view.storage_offset(), view.shape[-1], *view.stride()[:-1])
    if any(place % size for place in places):
        raise ValueError(
            f"layer {layer_name!r}: pages cannot be read as {dtype}: offset, state and "
            f"strides {places} (bytes) are not all multiples of {size}"
        )
    return view.view(dtype)


def backend_view(
    pages: LayerPages,
    layout: KVCacheLayout,
    backend: type[AttentionBackend],
    kernel_block_size: int,
    cache_dtype: str,
) -> torch.Tensor:
    """What a layer is bound to: kernel blocks in the spec's dtype, [B, H, N, C].

    A backend with a shape of its own gets that shape: [B, N, C] is the same view
    without the axis of a single head slot; any other lies in the backend's stride order
    over the same bytes. Pages with padding need blocks outermost in that order.
    """
    spec = _attention(pages)
    name = pages.layer_name
    if backend.get_kv_cache_shape is AttentionBackend.get_kv_cache_shape:
        kernel_view = kernel_byte_view(pages, layout, kernel_block_size)
        return typed_view(kernel_view, spec.dtype, name)
    num_kernel_blocks = pages.num_blocks * (spec.block_size // kernel_block_size)
    shape = checked_kv_cache_shape(
        backend, spec, num_kernel_blocks, kernel_block_size, cache_dtype
    )
    order = backend.get_kv_cache_stride_order()
    if len(order) != len(shape):
        raise ValueError(
            f"{backend.get_name()} publishes shape {shape} with stride order {order}: "
            "expected one entry for each axis"
        )
    if spec.num_heads == 1 and len(shape) == 3 and order == (0, 1, 2):
        kernel_view = kernel_byte_view(pages, layout, kernel_block_size)
        return typed_view(kernel_view, spec.dtype, name).squeeze(1)
    probe = checked_kv_cache_shape(
        backend, spec, BLOCKS_PROBE, kernel_block_size, cache_dtype
    )
    blocks_are_outermost = order[0] == probe.index(BLOCKS_PROBE)
    page, stride = spec.unpadded_page_size_bytes, pages.block_stride
    if stride != page and not (
        blocks_are_outermost and num_kernel_blocks == pages.num_blocks
    ):
        raise ValueError(
            f"layer {name!r}: {backend.get_name()} has a cache shape of its own, which "
            f"needs dense pages of {page} bytes, or whole blocks outermost: here they "
            f"start every {stride} bytes. Use a KV cache dtype or block size that "
            "needs no padding, or drop get_kv_cache_shape from the backend."
        )
    return _shaped_view(pages, shape, order)


def _shaped_view(
    pages: LayerPages, shape: Sequence[int], order: Sequence[int]
) -> torch.Tensor:
    """Pages in a backend's own shape and stride order; padding follows each block."""
    spec, name = _attention(pages), pages.layer_name
    page, stride = spec.unpadded_page_size_bytes, pages.block_stride
    size = stride * (pages.num_blocks - 1) + page
    flat = pages.backing[pages.start : pages.start + size].view(torch.uint8)
    typed = typed_view(flat, spec.dtype, name)
    physical = [shape[axis] for axis in order]
    strides = [prod(physical[place + 1 :]) for place in range(len(physical))]
    if stride != page:
        if stride % spec.dtype.itemsize:
            raise ValueError(
                f"layer {name!r}: blocks start every {stride} bytes, which is no whole "
                f"number of {spec.dtype} elements"
            )
        strides[0] = stride // spec.dtype.itemsize
    view = typed.as_strided(physical, strides)
    return view.permute([order.index(axis) for axis in range(len(order))])


def state_views(pages: LayerPages) -> list[torch.Tensor]:
    """Recurrent states: one tensor [num_blocks, *shape] each, one after another from
    the start of every block's page."""
    spec: Any = pages.spec
    views, offset = [], pages.start
    for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True):
        size = prod(shape) * dtype.itemsize
        flat = pages.backing.as_strided(
            (pages.num_blocks, size), (pages.block_stride, 1), offset
        )
        typed = typed_view(flat, dtype, pages.layer_name)
        views.append(typed.unflatten(1, shape) if shape else typed.squeeze(1))
        offset += size
    return views


def is_recurrent(spec: KVCacheSpec) -> bool:
    """True for layers that keep a state instead of tokens."""
    return get_kv_cache_spec_kind(spec) is KVCacheSpecKind.MAMBA


# --- layers -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class BoundLayer:
    """How a layer is bound: its backend, its kernel blocks, its cache dtype's name."""

    backend: type[AttentionBackend]
    kernel_block_size: int
    cache_dtype: str = "auto"


def create_kv_caches(
    config: KVCacheConfig,
    layout: KVCacheLayout,
    layers: Mapping[str, BoundLayer],
    device: torch.device,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Allocates the plan and makes its views.

    Returns, by layer, what the layer computes with (kernel blocks, or its states) and
    what connectors move: whole manager blocks [num_blocks, H, N, C / itemsize], or the
    states.
    """
    bound: dict[str, Any] = {}
    managed: dict[str, Any] = {}
    for name, pages in allocate_pages(config, device).items():
        if is_recurrent(pages.spec):
            bound[name] = managed[name] = state_views(pages)
            continue
        layer = layers[name]
        bound[name] = backend_view(
            pages, layout, layer.backend, layer.kernel_block_size, layer.cache_dtype
        )
        managed[name] = typed_view(
            byte_view(pages, layout), _attention(pages).dtype, name
        )
    return bound, managed


def bind_kv_caches(
    kv_caches: Mapping[str, Any],
    forward_context: Mapping[str, Any],
    shared_kv_cache_layers: Mapping[str, str],
) -> None:
    """Gives every layer its view; a sharing layer gets its target's.

    ValueError when a layer is unknown or stays without a cache.
    """
    for name, cache in kv_caches.items():
        if name not in forward_context:
            raise ValueError(f"the plan has layer {name!r}, which the model has not")
        forward_context[name].kv_cache = cache
    for name, target in shared_kv_cache_layers.items():
        if target not in kv_caches:
            raise ValueError(
                f"layer {name!r} shares the KV cache of {target!r}, which has none"
            )
        forward_context[name].kv_cache = kv_caches[target]
