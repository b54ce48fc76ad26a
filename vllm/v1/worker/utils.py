"""Groups of layers that share a backend, their kernel blocks, and blocks made zero.

Knows which layers compute alike. Refuses to know formats and how views are made.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from vllm.config import VllmConfig
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionMetadataBuilder,
    MultipleOf,
)
from vllm.v1.attention.ops.blocks import block_zeroer
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheSpecKind,
    get_kv_cache_spec_kind,
)
from vllm.v1.worker.block_table import BlockTable
from vllm.v1.worker.kv_cache_init import BLOCKS_PROBE, is_recurrent


@dataclass
class AttentionGroup:
    """Layers of a KV-cache group with one backend and one spec: they share metadata."""

    backend: type[AttentionBackend]
    layer_names: list[str]
    kv_cache_spec: KVCacheSpec
    kv_cache_group_id: int
    metadata_builders: list[AttentionMetadataBuilder] = field(
        default_factory=lambda: []
    )

    def create_metadata_builders(
        self,
        vllm_config: VllmConfig,
        device: torch.device,
        kernel_block_size: int | None = None,
        num_metadata_builders: int = 1,
    ) -> None:
        """Makes the builders; they see the spec in kernel blocks."""
        spec = self.kv_cache_spec
        if kernel_block_size is not None and kernel_block_size != spec.block_size:
            spec = spec.copy_with_new_block_size(kernel_block_size)
        builder_cls = self.backend.get_builder_cls()
        self.metadata_builders = [
            builder_cls(spec, self.layer_names, vllm_config, device)
            for _ in range(num_metadata_builders)
        ]

    def get_metadata_builder(self, ubatch_id: int = 0) -> AttentionMetadataBuilder:
        return self.metadata_builders[ubatch_id]


def make_attention_groups(
    config: KVCacheConfig, forward_context: Mapping[str, Any]
) -> list[list[AttentionGroup]]:
    """The attention groups of every KV-cache group, in the order of its layers."""
    groups = []
    for group_id, kv_group in enumerate(config.kv_cache_groups):
        members: dict[tuple[Any, KVCacheSpec], list[str]] = defaultdict(list)
        backends: dict[Any, type[AttentionBackend]] = {}
        for name in kv_group.layer_names:
            backend = forward_context[name].get_attn_backend()
            key = backend.full_cls_name()
            backends[key] = backend
            members[key, _spec_of(kv_group, name, forward_context)].append(name)
        groups.append(
            [
                AttentionGroup(backends[key], names, spec, group_id)
                for (key, spec), names in members.items()
            ]
        )
    return groups


def _spec_of(
    kv_group: KVCacheGroupSpec, name: str, forward_context: Mapping[str, Any]
) -> KVCacheSpec:
    """The spec of a layer; a layer that shares a cache has its target's."""
    target = getattr(forward_context[name], "kv_sharing_target_layer_name", None)
    return kv_group.layer_spec(target or name)


def add_kv_sharing_layers_to_kv_cache_groups(
    shared_kv_cache_layers: dict[str, str],
    kv_cache_groups: list[KVCacheGroupSpec],
    runner_only_attn_layers: set[str] | None = None,
) -> None:
    """Adds layers that use another layer's cache to that layer's group, in place.

    `shared_kv_cache_layers` maps a sharing layer to its target. The added names are put
    into `runner_only_attn_layers`: they have no pages of their own. ValueError for a
    target in no group.
    """
    group_of = {name: g for g in kv_cache_groups for name in g.layer_names}
    for layer, target in shared_kv_cache_layers.items():
        if target not in group_of:
            raise ValueError(
                f"layer {layer!r} shares the KV cache of {target!r}, which is in no "
                "KV cache group"
            )
        group_of[target].layer_names.append(layer)
        group_of[layer] = group_of[target]
        if runner_only_attn_layers is not None:
            runner_only_attn_layers.add(layer)


# --- kernel blocks ------------------------------------------------------------------


def select_common_block_size(
    kv_manager_block_size: int, backends: Sequence[type[AttentionBackend]]
) -> int:
    """Tokens per kernel block that all backends of a group take.

    The manager's size if they accept it whole; else the largest plain size that divides
    it and that all accept. ValueError names the manager's size and every backend.
    """

    def accepted_by_all(size: int) -> bool:
        return all(
            any(
                size % entry.base == 0
                if isinstance(entry, MultipleOf)
                else size == entry
                for entry in backend.get_supported_kernel_block_sizes()
            )
            for backend in backends
        )

    if accepted_by_all(kv_manager_block_size):
        return kv_manager_block_size
    candidates = {
        entry
        for backend in backends
        for entry in backend.get_supported_kernel_block_sizes()
        if isinstance(entry, int) and kv_manager_block_size % entry == 0
    }
    for size in sorted(candidates, reverse=True):
        if accepted_by_all(size):
            return size
    sizes = "; ".join(
        f"{backend.get_name()} takes {backend.get_supported_kernel_block_sizes()}"
        for backend in backends
    )
    raise ValueError(
        f"no kernel block size divides blocks of {kv_manager_block_size} tokens and "
        f"suits every backend: {sizes}. Set --block-size to a common multiple."
    )


def prepare_kernel_block_sizes(
    config: KVCacheConfig, attn_groups: Sequence[Sequence[AttentionGroup]]
) -> list[int]:
    """Kernel block size of every KV-cache group that has blocks, in tokens.

    Recurrent states and states that stand for several tokens are never split.
    """
    sizes = []
    for kv_group, groups in zip(config.kv_cache_groups, attn_groups, strict=True):
        block_size = kv_group.kv_cache_spec.block_size
        specs = [group.kv_cache_spec for group in groups]
        if any(
            get_kv_cache_spec_kind(spec) is KVCacheSpecKind.ENCODER_ONLY_ATTENTION
            for spec in specs
        ):
            continue
        whole = any(
            is_recurrent(spec) or spec.storage_block_size != spec.block_size
            for spec in specs
        )
        backends = list({g.backend.full_cls_name(): g.backend for g in groups}.values())
        sizes.append(
            block_size if whole else select_common_block_size(block_size, backends)
        )
    return sizes


# --- zeroing ------------------------------------------------------------------------


class KVBlockZeroer:
    """Zeroes the states of manager blocks in every attention layer, and nothing else.

    Padding between pages and the pages of neighbours stay as they are. Recurrent states
    are left to their layers. `cache_dtype` is the engine's cache dtype, for backends
    with a cache shape of their own.
    """

    def __init__(
        self,
        device: torch.device,
        attn_groups_iter: Iterable[AttentionGroup],
        kernel_block_sizes: list[int],
        cache_dtype: str,
        static_forward_context: dict[str, Any],
        runner_only_attn_layers: set[str] | None = None,
    ) -> None:
        self.device = device
        skipped = runner_only_attn_layers or set()
        # Byte views, blocks first, by kernel blocks per manager block; layers that lie
        # over the same bytes appear once.
        views: dict[int, dict[Any, torch.Tensor]] = {}
        for group in attn_groups_iter:
            spec = group.kv_cache_spec
            if is_recurrent(spec) or group.kv_cache_group_id >= len(kernel_block_sizes):
                continue
            kernel = kernel_block_sizes[group.kv_cache_group_id]
            axis = _block_axis(group, kernel, cache_dtype)
            for name in group.layer_names:
                if name in skipped:
                    continue
                view = static_forward_context[name].kv_cache.view(torch.uint8)
                key = (view.data_ptr(), view.shape, view.stride())
                of_ratio = views.setdefault(spec.block_size // kernel, {})
                of_ratio[key] = view.movedim(axis, 0)
        self._zeroers = {
            ratio: block_zeroer(_without_covered(of_ratio.values()))
            for ratio, of_ratio in views.items()
        }

    def zero_block_ids(self, block_ids: list[int]) -> None:
        """Zeroes these manager blocks."""
        if not block_ids:
            return
        ids = np.asarray(block_ids, dtype=np.int64)
        for ratio, zeroer in self._zeroers.items():
            rows = torch.from_numpy(BlockTable.map_to_kernel_blocks(ids, ratio))
            zeroer.zero(rows.to(self.device))

    def warmup(self, num_kv_blocks: int) -> None:
        """Runs once on the null block, so that the first real call is as fast."""
        if num_kv_blocks > 0:
            self.zero_block_ids([0])


def _without_covered(views: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The byte views [num_blocks, ...] but those that begin where a larger one does:
    groups of different formats lie over the same pages."""
    widest: dict[Any, torch.Tensor] = {}
    others = []
    for view in sorted(views, key=torch.numel, reverse=True):
        if view[0].is_contiguous():
            widest.setdefault((view.data_ptr(), len(view), view.stride(0)), view)
        else:
            others.append(view)
    return [*widest.values(), *others]


def _block_axis(group: AttentionGroup, kernel_block_size: int, cache_dtype: str) -> int:
    """Which axis of the layers' views counts blocks: 0, unless the backend shapes its
    caches itself."""
    shape_of = getattr(group.backend, "get_kv_cache_shape", None)
    if shape_of is None or shape_of is AttentionBackend.get_kv_cache_shape:
        return 0
    spec: Any = group.kv_cache_spec
    shape = shape_of(
        BLOCKS_PROBE, kernel_block_size, spec.num_kv_heads, spec.head_size, cache_dtype
    )
    return shape.index(BLOCKS_PROBE)
