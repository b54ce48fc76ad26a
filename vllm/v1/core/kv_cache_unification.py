"""Makes layers fit one pool: equal page sizes, or window layers kept as full ones.

Knows specs and their pages. Refuses to know groups, memory and configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    replace_as,
)
from vllm.v1.kv_cache_spec_base import SpecMergeError

logger = init_logger(__name__)

# Which full-attention spec keeps every token of a local one. Subclass before base.
_PROMOTIONS: tuple[tuple[type[AttentionSpec], type[FullAttentionSpec]], ...] = (
    (SlidingWindowMLASpec, MLAAttentionSpec),
    (SlidingWindowSpec, FullAttentionSpec),
    (ChunkedLocalAttentionSpec, FullAttentionSpec),
)


class PageUnificationError(NotImplementedError, ValueError):
    """Pages of different sizes cannot share a pool; names the layers and the sizes."""


def is_kv_cache_spec_uniform(kv_cache_spec: Mapping[str, KVCacheSpec]) -> bool:
    """True if the specs of all layers merge into one."""
    specs = list(kv_cache_spec.values())
    if not specs:
        return True
    try:
        specs[0].merge(specs)
    except SpecMergeError:
        return False
    return True


def unify_kv_cache_spec_page_size(
    kv_cache_spec: Mapping[str, KVCacheSpec],
) -> dict[str, KVCacheSpec]:
    """Gives every layer the page size of the largest one.

    A recurrent state is padded. An attention layer gets as many whole blocks as fit the
    page in one, and the rest, less than one block, is padding where its blocks may lie
    further apart than their bytes. PageUnificationError where they may not.
    """
    pages = {name: spec.page_size_bytes for name, spec in kv_cache_spec.items()}
    if len(set(pages.values())) <= 1:
        return dict(kv_cache_spec)
    largest = max(pages, key=lambda name: pages[name])
    unified = {
        name: _with_page(name, spec, largest, pages[largest])
        for name, spec in kv_cache_spec.items()
    }
    _report_growth(kv_cache_spec, unified)
    return unified


def _with_page(name: str, spec: KVCacheSpec, largest: str, target: int) -> KVCacheSpec:
    """`spec` with pages of `target` bytes, the page of layer `largest`."""
    page = spec.page_size_bytes
    if page == target:
        return spec
    if isinstance(spec, MambaSpec):
        return replace(spec, page_size_padded=target)
    grown = _with_blocks_in_one(spec, target // page)
    if grown.page_size_bytes == target:
        return grown
    if isinstance(grown, AttentionSpec) and _may_be_padded(grown):
        padded = replace(grown, page_size_padded=target)
        if padded.page_size_bytes == target:
            return padded
    raise PageUnificationError(
        f"layer {name!r} has pages of {page} bytes, layer {largest!r} of {target}: no "
        f"whole number of blocks of {name!r} fills that page, and its own pages "
        "cannot be padded (its blocks must lie densely: indexes_kv_by_block_stride is "
        "off). Use an attention backend that takes any block stride, another KV cache "
        "dtype or block size, or --disable-hybrid-kv-cache-manager."
    )


def _with_blocks_in_one(spec: KVCacheSpec, count: int) -> KVCacheSpec:
    """`spec` with `count` of its blocks, and of their padding, in one."""
    grown = spec.copy_with_new_block_size(spec.block_size * count)
    padded = getattr(spec, "page_size_padded", None)
    if isinstance(grown, AttentionSpec) and padded and not _alignment(grown):
        return replace(grown, page_size_padded=padded * count)
    return grown


def _may_be_padded(spec: AttentionSpec) -> bool:
    """Blocks that a backend packs, or indexes by stride, need not lie densely."""
    return spec.indexes_kv_by_block_stride or spec.is_packed


def _alignment(spec: AttentionSpec) -> int | None:
    return getattr(spec, "alignment", None)


def _report_growth(
    before: Mapping[str, KVCacheSpec], after: Mapping[str, KVCacheSpec]
) -> None:
    """Says once per kind of layer how its blocks grew and what padding costs."""
    for name, new in after.items():
        old = before[name]
        if new == old:
            continue
        states = new.unpadded_page_size_bytes
        logger.info_once(
            "KV cache: %s pages of %d bytes become %d to share one pool: block %d -> "
            "%d tokens, %.1f%% padding",
            type(new).__name__,
            old.page_size_bytes,
            new.page_size_bytes,
            old.block_size,
            new.block_size,
            100 * (new.page_size_bytes - states) / new.page_size_bytes,
        )


def unify_hybrid_kv_cache_specs(kv_cache_spec: dict[str, KVCacheSpec]) -> None:
    """Turns window and chunk layers into full-attention specs, in place.

    They keep computing within their window but allocate for all tokens. Does nothing if
    the layers already share a group. ValueError if they do not afterwards either.
    """
    if _share_a_group(kv_cache_spec):
        return
    logger.warning(
        "The hybrid KV cache manager is off: sliding-window and chunked layers keep "
        "every token, which takes more memory than they need."
    )
    promote_local_specs(kv_cache_spec)
    if not _share_a_group(kv_cache_spec):
        kinds = sorted({type(s).__name__ for s in kv_cache_spec.values()})
        raise ValueError(
            f"without the hybrid KV cache manager all layers share one group, but "
            f"{', '.join(kinds)} cannot: leave out --disable-hybrid-kv-cache-manager"
        )


def promote_local_specs(kv_cache_spec: dict[str, KVCacheSpec]) -> None:
    """Replaces local specs by full ones, in place, if there are full ones already.

    Every common field is kept. They take the block size of the full layers if that is
    one size; an explicit padding grows with the block.
    """
    specs = kv_cache_spec.values()
    block_sizes = {s.block_size for s in specs if isinstance(s, FullAttentionSpec)}
    if not block_sizes:
        return
    for name, spec in kv_cache_spec.items():
        for local, full in _PROMOTIONS:
            if isinstance(spec, local):
                size = block_sizes.copy().pop() if len(block_sizes) == 1 else None
                kv_cache_spec[name] = _promoted(spec, full, size or spec.block_size)
                break


def _promoted(
    spec: AttentionSpec, target: type[FullAttentionSpec], block_size: int
) -> FullAttentionSpec:
    padded = spec.page_size_padded
    if padded is not None:
        scaled = spec.unpadded_page_size_bytes * block_size // spec.block_size
        padded = max(padded, scaled)
    return replace_as(
        spec,
        target,
        drop=("extra_retained_tokens",),
        block_size=block_size,
        page_size_padded=padded,
    )


def _share_a_group(kv_cache_spec: dict[str, KVCacheSpec]) -> bool:
    return is_kv_cache_spec_uniform(
        kv_cache_spec
    ) or UniformTypeKVCacheSpecs.is_uniform_type(kv_cache_spec)
