"""Which layers share block ids: groups of layers with one block table each.

Knows specs and how many layers there are of each. Refuses to know memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from math import gcd
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.utils.math_utils import cdiv, round_up
from vllm.v1.core.kv_cache_unification import (
    PageUnificationError,
    is_kv_cache_spec_uniform,
    promote_local_specs,
    unify_hybrid_kv_cache_specs,
    unify_kv_cache_spec_page_size,
)
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    SpecError,
    SpecMergeError,
    UniformTypeKVCacheSpecs,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

# Buckets whose sizes differ by less than this factor are padded to the larger one.
_MAX_GROUP_RATIO = 1.5


def get_kv_cache_groups(
    vllm_config: VllmConfig, kv_cache_spec: Mapping[str, KVCacheSpec]
) -> list[KVCacheGroupSpec]:
    """Groups the layers of a model; a spec may come back with another block size.

    In order of preference: one group of one spec; one group of layers of one kind whose
    pages differ (a quantised model with dense layers); packed groups; groups of equally
    many layers with equal pages. PageUnificationError names layers that fit none.
    """
    specs = dict(kv_cache_spec)
    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        unify_hybrid_kv_cache_specs(specs)
    if not specs:
        return []
    shared = _one_group(specs)
    if shared is not None:
        return [shared]
    packed = group_and_unify_kv_cache_specs(specs)
    if packed is not None:
        return _get_kv_cache_groups_uniform_groups(packed)
    hidden = {n: s for n, s in specs.items() if isinstance(s, HiddenStateCacheSpec)}
    others = {n: s for n, s in specs.items() if n not in hidden}
    if not others:
        others, hidden = dict(hidden), {}
    try:
        unified = unify_kv_cache_spec_page_size(others)
    except PageUnificationError:
        fallback = _keep_every_token(specs)
        if fallback is None:
            raise
        return [fallback]
    groups = _get_kv_cache_groups_uniform_page_size(unified)
    return _add_hidden_state_groups(groups, hidden) if hidden else groups


def _one_group(specs: dict[str, KVCacheSpec]) -> KVCacheGroupSpec | None:
    names = list(specs)
    if is_kv_cache_spec_uniform(specs):
        layers = list(specs.values())
        return KVCacheGroupSpec(names, layers[0].merge(layers))
    uniform = UniformTypeKVCacheSpecs.from_specs(specs)
    return None if uniform is None else KVCacheGroupSpec(names, uniform)


def _keep_every_token(specs: Mapping[str, KVCacheSpec]) -> KVCacheGroupSpec | None:
    """One group of latent layers and of window layers that free nothing, or None."""
    kinds = {type(spec) for spec in specs.values()}
    barred = (HiddenStateCacheSpec, SlidingWindowMLASpec, ChunkedLocalAttentionSpec)
    if any(issubclass(kind, barred) for kind in kinds):
        return None
    if not all(
        any(issubclass(kind, wanted) for kind in kinds)
        for wanted in (MLAAttentionSpec, SlidingWindowSpec)
    ):
        return None
    promoted = dict(specs)
    promote_local_specs(promoted)
    group = _one_group(promoted)
    if group is not None:
        logger.warning(
            "Pages of latent and sliding-window layers cannot share a pool: the window "
            "layers keep every token, which takes more memory than they need."
        )
    return group


# --- groups of equally many layers with equal pages -----------------------------------


def _get_kv_cache_groups_uniform_page_size(
    specs: Mapping[str, KVCacheSpec],
) -> list[KVCacheGroupSpec]:
    """Groups of at most n layers each, where every spec's layers are spread evenly.

    n is the fewest layers of a spec, or the most where that is nearly as many. Layers
    are dealt out in turn, so that pipeline stages hold similar numbers of each group.
    """
    buckets = _merged_buckets(specs)
    fewest = min(len(names) for names, _ in buckets)
    most = max(len(names) for names, _ in buckets)
    size = most if most < fewest * _MAX_GROUP_RATIO else fewest
    groups = []
    for names, spec in buckets:
        missing = -len(names) % size
        if missing:
            logger.warning_once(
                "KV cache groups have %d layers, %s has %d: %d empty places, up to "
                "%.1f%% of its cache stays unused",
                size,
                type(spec).__name__,
                len(names),
                missing,
                100 * missing / len(names),
            )
        count = cdiv(len(names), size)
        groups += [KVCacheGroupSpec(names[i::count], spec) for i in range(count)]
    return groups


def _merged_buckets(
    specs: Mapping[str, KVCacheSpec],
) -> list[tuple[list[str], KVCacheSpec]]:
    """Layers by merged spec, in order of first appearance."""
    by_spec: dict[KVCacheSpec, list[str]] = defaultdict(list)
    for name, spec in specs.items():
        by_spec[spec].append(name)
    buckets: list[tuple[list[str], KVCacheSpec]] = []
    for spec, names in by_spec.items():
        for index, (others, merged) in enumerate(buckets):
            try:
                both = merged.merge([merged, spec])
            except SpecMergeError:
                continue
            buckets[index] = (others + names, both)
            break
        else:
            buckets.append((names, spec))
    return buckets


def _add_hidden_state_groups(
    groups: list[KVCacheGroupSpec], hidden: Mapping[str, HiddenStateCacheSpec]
) -> list[KVCacheGroupSpec]:
    """Adds groups of hidden-state layers, whose pages take the size of the others'.

    A block of theirs divides every other block. If one token does not fit a page, the
    blocks of all groups grow first. An alignment of their own gives way to the page.
    """
    per_token = max(
        replace(
            spec, block_size=spec.compress_ratio, page_size_padded=None, alignment=None
        ).unpadded_page_size_bytes
        for spec in hidden.values()
    )
    page = groups[0].kv_cache_spec.page_size_bytes
    growth = cdiv(per_token, page)
    if growth > 1:
        groups = [_with_larger_blocks(group, growth) for group in groups]
        page *= growth
    common = reduce(gcd, (group.kv_cache_spec.block_size for group in groups))
    fitting = max(page // per_token, 1)
    block = max(d for d in range(1, min(common, fitting) + 1) if common % d == 0)
    logger.info_once(
        "KV cache: hidden states take %d of %d bytes per page (%.1f%% padding), in "
        "blocks of %d tokens",
        per_token * block,
        page,
        100 * (page - per_token * block) / page,
        block,
    )
    resized: dict[str, KVCacheSpec] = {
        name: replace(spec, block_size=block, page_size_padded=page, alignment=None)
        for name, spec in hidden.items()
    }
    size = max(len(group.layer_names) for group in groups)
    for names, spec in _merged_buckets(resized):
        count = cdiv(len(names), size)
        groups += [KVCacheGroupSpec(names[i::count], spec) for i in range(count)]
    return groups


def _with_larger_blocks(group: KVCacheGroupSpec, growth: int) -> KVCacheGroupSpec:
    spec = group.kv_cache_spec
    larger = spec.copy_with_new_block_size(spec.block_size * growth)
    page = spec.page_size_bytes * growth
    if larger.page_size_bytes != page:
        larger = replace(larger, page_size_padded=page)  # type: ignore[call-arg]
    return KVCacheGroupSpec(group.layer_names, larger, group.is_eagle_group)


# --- packed groups: latent layers with windows and pages of several sizes -------------


def group_and_unify_kv_cache_specs(
    kv_cache_spec: Mapping[str, KVCacheSpec],
) -> list[UniformTypeKVCacheSpecs] | None:
    """Uniform groups of a model of latent layers, some of them with a window.

    The latent layers first, then the window layers by (block size, window). None unless
    there are window layers and pages of several sizes. SpecError if the layers of a
    group are not of one type.
    """
    windowed: dict[tuple[int, int], dict[str, KVCacheSpec]] = defaultdict(dict)
    latent: dict[str, KVCacheSpec] = {}
    for name, spec in kv_cache_spec.items():
        if isinstance(spec, SlidingWindowMLASpec):
            windowed[spec.block_size, spec.sliding_window][name] = spec
        elif isinstance(spec, MLAAttentionSpec):
            latent[name] = spec
        else:
            return None
    pages = {spec.page_size_bytes for spec in kv_cache_spec.values()}
    if not windowed or len(pages) <= 1:
        return None
    grouped = []
    for bucket in ([latent] if latent else []) + list(windowed.values()):
        uniform = UniformTypeKVCacheSpecs.from_specs(bucket)
        if uniform is None:
            raise SpecError(
                f"layers {', '.join(bucket)} have different block sizes or types and "
                "cannot share a group"
            )
        grouped.append(uniform)
    return grouped


def _get_kv_cache_groups_uniform_groups(
    grouped_specs: list[UniformTypeKVCacheSpecs],
) -> list[KVCacheGroupSpec]:
    """Splits the window groups so that all groups have about as many layer tuples.

    A tuple is one layer of each page size of its group. The first group stays whole.
    """
    counts = [group.get_num_layer_tuples() for group in grouped_specs]
    tuples = _approximate_gcd(counts, lower_bound=counts[0])
    first = grouped_specs[0]
    groups = [KVCacheGroupSpec(list(first.kv_cache_specs), first)]
    for group, count in zip(grouped_specs[1:], counts[1:], strict=True):
        by_page: dict[int, list[str]] = defaultdict(list)
        for name, spec in group.kv_cache_specs.items():
            by_page[spec.page_size_bytes].append(name)
        if any(len(names) != count for names in by_page.values()):
            found = "; ".join(f"{p} bytes: {', '.join(n)}" for p, n in by_page.items())
            raise SpecError(
                "latent layers with one window need equally many layers of each page "
                f"size, but have {found}. Give them one KV cache dtype: change "
                "--kv-cache-dtype-skip-layers"
            )
        columns = list(zip(*by_page.values(), strict=True))
        splits = cdiv(count, tuples)
        for i in range(splits):
            names = [name for column in columns[i::splits] for name in column]
            specs = {name: group.kv_cache_specs[name] for name in names}
            part = replace(group, kv_cache_specs=specs)
            groups.append(KVCacheGroupSpec(names, part))
    return groups


def _approximate_gcd(values: Sequence[int], lower_bound: int) -> int:
    """The divisor from `lower_bound` up that rounds `values` up the least.

    The largest of equally good ones.
    """
    candidates = range(lower_bound, max(values) + 1)
    return min(candidates, key=lambda d: (sum(round_up(v, d) - v for v in values), -d))
