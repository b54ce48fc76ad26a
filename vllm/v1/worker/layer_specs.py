"""What the layers of a loaded model store: packed specs, formats, and one axis order.

Knows registered layers, their backends and their formats. Refuses to know blocks.
"""

from collections import Counter
from collections.abc import Mapping

from vllm import envs
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.utils.import_utils import resolve
from vllm.v1.core.kv_cache_capacity import check_memory_before_loading
from vllm.v1.core.kv_cache_grouping import get_kv_cache_groups
from vllm.v1.core.kv_cache_tensors import pool_bytes_per_block
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
)
from vllm.v1.kv_cache_layout import (
    DEFAULT_LAYOUTS,
    KVCacheLayout,
    LayoutDeclaration,
    resolve_kv_cache_layout,
)
from vllm.v1.kv_formats import KVFormat, by_name
from vllm.v1.page_planning import packed_spec, packs_by_itself
from vllm.v1.worker.kv_cache_init import is_recurrent

_CONNECTOR_FACTORY = (
    "vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory"
)


def caching_layers(vllm_config: VllmConfig) -> dict[str, AttentionLayerBase]:
    """Every registered layer that may own or share a KV cache, by name."""
    return {
        name: layer
        for name, layer in vllm_config.compilation_config.static_forward_context.items()
        if isinstance(layer, AttentionLayerBase)
    }


def shared_layers(vllm_config: VllmConfig) -> dict[str, str]:
    """Layers that use another layer's cache, with the name of that layer."""
    targets = {
        name: getattr(layer, "kv_sharing_target_layer_name", None)
        for name, layer in caching_layers(vllm_config).items()
    }
    return {name: target for name, target in targets.items() if target is not None}


def layer_format(layer: AttentionLayerBase, vllm_config: VllmConfig) -> KVFormat:
    """The format of one attention layer, as its backend arranges it."""
    fmt = by_name(layer.kv_cache_dtype)
    model_config = vllm_config.model_config
    dtype = None if model_config is None else model_config.dtype
    if dtype is not None:
        fmt = fmt.resolve(dtype)
    return layer.get_attn_backend().arranged(fmt, dtype)


def get_kv_cache_specs(vllm_config: VllmConfig) -> dict[str, KVCacheSpec]:
    """The packed spec of every layer with a cache of its own.

    Raw specs become packed here, through the hook of each layer's backend.
    """
    model_config = vllm_config.model_config
    specs: dict[str, KVCacheSpec] = {}
    for name, layer in caching_layers(vllm_config).items():
        if getattr(layer, "kv_sharing_target_layer_name", None) is not None:
            continue
        spec = layer.get_kv_cache_spec(vllm_config)
        if spec is None:
            continue
        if not is_recurrent(spec):
            spec = packed_spec(
                layer.get_attn_backend(),
                spec,
                layer_format(layer, vllm_config),
                name,
                None if model_config is None else model_config.dtype,
            )
        specs[name] = spec
    return specs


def get_layer_formats(vllm_config: VllmConfig) -> dict[str, str]:
    """The format id of every attention layer, its arrangement included; with the name
    of its backend where the pages' shape is the backend's own."""
    return {
        name: _format_name(layer, vllm_config)
        for name, layer in caching_layers(vllm_config).items()
        if hasattr(layer, "kv_cache_dtype")
    }


def _format_name(layer: AttentionLayerBase, vllm_config: VllmConfig) -> str:
    fmt, spec = layer_format(layer, vllm_config), layer.get_kv_cache_spec(vllm_config)
    model = vllm_config.model_config
    backend = layer.get_attn_backend()
    dtype = None if model is None else model.dtype
    if spec is None or not packs_by_itself(backend, spec, fmt, dtype):
        return fmt.format_id
    return f"{fmt.format_id} by {'.'.join(backend.full_cls_name())}"


def check_what_was_asked(vllm_config: VllmConfig) -> None:
    """ValueError when the memory that the KV cache was given, as far as that is known
    without a look at the device, does not hold one request, when that of a connector
    holds no block, or when its pages have no place. Needs layers, no weights.
    """
    specs = get_kv_cache_specs(vllm_config)
    if not specs:
        return
    groups = get_kv_cache_groups(vllm_config, specs)
    check_memory_before_loading(vllm_config, groups)
    if vllm_config.kv_transfer_is_on:
        _check_connector(vllm_config, groups)


def _check_connector(vllm_config: VllmConfig, groups: list[KVCacheGroupSpec]) -> None:
    factory, transfer = resolve(_CONNECTOR_FACTORY), vllm_config.kv_transfer_config
    factory.check_config(transfer, pool_bytes_per_block(vllm_config, groups))
    plan = KVCacheConfig(num_blocks=0, kv_cache_tensors=[], kv_cache_groups=groups)
    specs, formats = plan.layer_specs(), get_layer_formats(vllm_config)
    plan.layer_formats = {name: f for name, f in formats.items() if name in specs}
    plan.kv_cache_layout = resolve_layout(vllm_config, specs).name
    factory.check_plan(vllm_config, transfer, plan)


def resolve_layout(
    vllm_config: VllmConfig,
    specs: Mapping[str, KVCacheSpec],
    recorded: str | None = None,
) -> KVCacheLayout:
    """The axis order of this engine's pages.

    From what backends and formats accept, then VLLM_KV_CACHE_LAYOUT, then the KV
    connector's wish. `recorded` is an order that was agreed on before; ValueError when
    it is not possible.
    """
    declarations: dict[str, LayoutDeclaration] = {}
    for name, layer in caching_layers(vllm_config).items():
        declared = layer.get_attn_backend().layout_declaration()
        declarations[declared.owner] = declared
        spec = specs.get(name)
        if spec is None or is_recurrent(spec) or spec.num_heads == 1:
            continue
        fmt = layer_format(layer, vllm_config)
        kept = tuple(o for o in DEFAULT_LAYOUTS if fmt.extent().allows(o.name))
        if len(kept) < len(DEFAULT_LAYOUTS):
            declarations[fmt.format_id] = LayoutDeclaration(
                owner=f"format {fmt.format_id}", layouts=kept
            )
    pages = {spec.page_size_bytes for spec in specs.values()}
    return resolve_kv_cache_layout(
        list(declarations.values()),
        recorded=None if recorded is None else KVCacheLayout.from_name(recorded),
        env=envs.VLLM_KV_CACHE_LAYOUT,
        connector=_connector_layout(vllm_config),
        pages_differ=len(pages) > 1,
    )


def _connector_layout(vllm_config: VllmConfig) -> str | None:
    if not vllm_config.kv_transfer_is_on:
        return None
    factory = resolve(_CONNECTOR_FACTORY)
    connector_cls = factory.get_connector_class(vllm_config.kv_transfer_config)
    return connector_cls.get_required_kvcache_layout(vllm_config)


def describe_formats(layer_formats: Mapping[str, str], skipped: bool) -> str:
    """Formats with their numbers of layers, most layers first: "fp8 x26, bfloat16 x4".

    `skipped` says that kv_cache_dtype_skip_layers kept some layers dense.
    """
    counts = Counter(layer_formats.values()).most_common()
    parts = [f"{format_id} x{count}" for format_id, count in counts]
    if skipped and len(parts) > 1:
        parts[1:] = [f"{part} (skipped layers)" for part in parts[1:]]
    return ", ".join(parts)
