"""From the specs of all workers to one plan per worker, with equally many blocks.

Knows the order of the steps. Refuses to know dtypes, formats and how a step is done:
grouping, unification, tensors and capacity have modules of their own.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_capacity import (
    auto_fit_max_model_len,
    check_enough_kv_cache_memory,
    memory_of_pool,
    report_kv_cache_config,
    wants_auto_fit,
)
from vllm.v1.core.kv_cache_grouping import get_kv_cache_groups
from vllm.v1.core.kv_cache_tensors import plan_tensors
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    SpecError,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def get_kv_cache_configs(
    vllm_config: VllmConfig,
    kv_cache_specs: Sequence[Mapping[str, KVCacheSpec]],
    available_memory: Sequence[int],
    *,
    layer_formats: Mapping[str, str] | None = None,
    kv_cache_layout: str | None = None,
) -> list[KVCacheConfig]:
    """One plan per worker, all with the same groups and number of blocks.

    `kv_cache_specs` are the packed specs of each worker by layer name and
    `available_memory` its bytes for the cache. `layer_formats` (layer to format id) and
    `kv_cache_layout` (axis order) are recorded in the plans. Sets max_model_len where
    the user asked for the longest that fits, and the capacity in CacheConfig.

    ValueError: a spec class that nobody serves, specs of one layer that differ between
    workers, or too little memory for one request.
    """
    specs = _merged_specs(kv_cache_specs)
    KVCacheSpecRegistry.check_kv_cache_spec_registry(specs)
    groups = get_kv_cache_groups(vllm_config, specs)
    projected = [
        _project_kv_cache_groups_to_worker(groups, worker) for worker in kv_cache_specs
    ]
    memory = [
        memory_of_pool(vllm_config, groups, available)
        for groups, available in zip(projected, available_memory, strict=True)
    ]
    if wants_auto_fit(vllm_config):
        auto_fit_max_model_len(vllm_config, projected, memory)
    configs = []
    for worker_specs, worker_groups, worker_memory in zip(
        kv_cache_specs, projected, memory, strict=True
    ):
        check_enough_kv_cache_memory(vllm_config, worker_groups, worker_memory)
        _check_every_layer_has_a_group(worker_specs, worker_groups)
        configs.append(
            get_kv_cache_config_from_groups(
                vllm_config,
                worker_groups,
                worker_memory,
                layer_formats=layer_formats,
                kv_cache_layout=kv_cache_layout,
            )
        )
    _level_num_blocks(configs)
    if configs:
        report_kv_cache_config(vllm_config, _fullest(configs))
    return configs


def get_kv_cache_config_from_groups(
    vllm_config: VllmConfig,
    kv_cache_groups: list[KVCacheGroupSpec],
    available_memory: int,
    *,
    layer_formats: Mapping[str, str] | None = None,
    kv_cache_layout: str | None = None,
) -> KVCacheConfig:
    """The plan of one worker for `available_memory` bytes."""
    num_blocks, tensors = plan_tensors(vllm_config, kv_cache_groups, available_memory)
    names = {name for group in kv_cache_groups for name in group.layer_names}
    formats = {n: f for n, f in (layer_formats or {}).items() if n in names}
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=tensors,
        kv_cache_groups=kv_cache_groups,
        layer_formats=formats,
        kv_cache_layout=kv_cache_layout,
    )


def generate_scheduler_kv_cache_config(
    kv_cache_configs: Sequence[KVCacheConfig],
) -> KVCacheConfig:
    """The plan as the scheduler sees it: one spec per group, no sizes per layer.

    SpecError if the workers' plans have different numbers of blocks.
    """
    counts = {config.num_blocks for config in kv_cache_configs}
    if len(counts) != 1:
        raise SpecError(f"workers have different numbers of blocks: {sorted(counts)}")
    scheduler_config = copy.deepcopy(kv_cache_configs[0])
    for group_id, group in enumerate(scheduler_config.kv_cache_groups):
        per_worker = [c.kv_cache_groups[group_id] for c in kv_cache_configs]
        filled = next((g for g in per_worker if g.layer_names), group)
        group.kv_cache_spec = _representative(filled.kv_cache_spec)
    return scheduler_config


def _representative(spec: KVCacheSpec) -> KVCacheSpec:
    """The spec by which blocks of a group are managed.

    The first layer's; where layers would have different managers, that of a layer of
    the plain base class, whose manager frees nothing that another layer still needs.
    """
    if not isinstance(spec, UniformTypeKVCacheSpecs) or not spec.kv_cache_specs:
        return spec
    layers = list(spec.kv_cache_specs.values())
    managers = {KVCacheSpecRegistry.get_manager_path(layer) for layer in layers}
    if len(managers) > 1:
        base = KVCacheSpecRegistry.get_uniform_type_base_spec(layers[0])
        return next((layer for layer in layers if type(layer) is base), layers[0])
    return layers[0]


def _merged_specs(
    kv_cache_specs: Sequence[Mapping[str, KVCacheSpec]],
) -> dict[str, KVCacheSpec]:
    merged: dict[str, KVCacheSpec] = {}
    for worker in kv_cache_specs:
        for name, spec in worker.items():
            if merged.setdefault(name, spec) != spec:
                raise SpecError(
                    f"layer {name!r} has different KV cache specs in two workers: "
                    f"{merged[name]} and {spec}"
                )
    return merged


def _project_kv_cache_groups_to_worker(
    groups: Sequence[KVCacheGroupSpec], worker_specs: Mapping[str, KVCacheSpec]
) -> list[KVCacheGroupSpec]:
    """The groups with the layers of one worker; a group may become empty."""
    projected = []
    for group in groups:
        names = [name for name in group.layer_names if name in worker_specs]
        spec = group.kv_cache_spec
        if isinstance(spec, UniformTypeKVCacheSpecs):
            layers = {name: spec.kv_cache_specs[name] for name in names}
            spec = replace(spec, kv_cache_specs=layers)
        projected.append(KVCacheGroupSpec(names, spec, group.is_eagle_group))
    return projected


def _check_every_layer_has_a_group(
    worker_specs: Mapping[str, KVCacheSpec], groups: Sequence[KVCacheGroupSpec]
) -> None:
    grouped = {name for group in groups for name in group.layer_names}
    missing = [name for name in worker_specs if name not in grouped]
    if missing:
        raise SpecError(f"layers {', '.join(missing)} are in no KV cache group")


def _level_num_blocks(configs: Sequence[KVCacheConfig]) -> None:
    """Lowers every plan, in place, to the smallest number of blocks."""
    counts = [config.num_blocks for config in configs if config.kv_cache_tensors]
    if not counts:
        return
    smallest = min(counts)
    for config in configs:
        for tensor in config.kv_cache_tensors:
            per_block, rest = divmod(tensor.size, config.num_blocks)
            if rest:
                raise SpecError(
                    f"a tensor of {tensor.size} bytes is not a whole number of bytes "
                    f"for each of {config.num_blocks} blocks"
                )
            tensor.size = per_block * smallest
        config.num_blocks = smallest


def _fullest(configs: Sequence[KVCacheConfig]) -> KVCacheConfig:
    return max(
        configs, key=lambda c: sum(len(g.layer_names) for g in c.kv_cache_groups)
    )
