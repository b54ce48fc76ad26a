"""How many blocks fit the memory, and which tensors hold their pages.

Knows groups and bytes. Refuses to know models, requests and views. Three plans:
one uniform group has a tensor per layer; packed groups lie over one backing whose
blocks hold every page of a group; otherwise the i-th layers of all groups share one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import (
    KVCacheGroupSpec,
    KVCacheTensor,
    SpecError,
    UniformTypeKVCacheSpecs,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)


def pool_bytes_per_block(
    vllm_config: VllmConfig, kv_cache_groups: list[KVCacheGroupSpec]
) -> int:
    """Bytes that one block id costs in this worker, padding and unused places included.

    0 if the worker has no layer.
    """
    if not any(group.layer_names for group in kv_cache_groups):
        return 0
    if _is_one_uniform_group(kv_cache_groups):
        return kv_cache_groups[0].kv_cache_spec.page_size_bytes
    if _use_packed_kv_cache_config(vllm_config, kv_cache_groups):
        return _get_packed_kv_cache_layout(kv_cache_groups)[0]
    return _shared_page(kv_cache_groups) * _most_layers(kv_cache_groups)


def plan_tensors(
    vllm_config: VllmConfig,
    kv_cache_groups: list[KVCacheGroupSpec],
    available_memory: int,
) -> tuple[int, list[KVCacheTensor]]:
    """Number of blocks and the tensors for `available_memory` bytes.

    Without any layer there is one block (the null block) and no tensor.
    """
    per_block = pool_bytes_per_block(vllm_config, kv_cache_groups)
    if per_block == 0:
        return 1, []
    if _is_one_uniform_group(kv_cache_groups):
        group = kv_cache_groups[0]
        num_blocks = get_num_blocks(vllm_config, available_memory, per_block)
        return num_blocks, [
            KVCacheTensor(
                size=group.layer_spec(name).page_size_bytes * num_blocks,
                shared_by=[name],
            )
            for name in group.layer_names
        ]
    if _use_packed_kv_cache_config(vllm_config, kv_cache_groups):
        return _get_kv_cache_config_packed(
            vllm_config, kv_cache_groups, available_memory
        )
    num_blocks = get_num_blocks(vllm_config, available_memory, per_block)
    size = _shared_page(kv_cache_groups) * num_blocks
    return num_blocks, [
        KVCacheTensor(size=size, shared_by=_layers_at(kv_cache_groups, i))
        for i in range(_most_layers(kv_cache_groups))
    ]


def get_num_blocks(
    vllm_config: VllmConfig, available_memory: int, bytes_per_block: int
) -> int:
    """Blocks that fit, or `num_gpu_blocks_override` if the user set it."""
    num_blocks = max(0, int(available_memory // bytes_per_block))
    override = vllm_config.cache_config.num_gpu_blocks_override
    if override is None:
        return num_blocks
    logger.info_once(
        "KV cache: %d blocks fit, num_gpu_blocks_override makes it %d",
        num_blocks,
        override,
    )
    return override


def _use_packed_kv_cache_config(
    vllm_config: VllmConfig, kv_cache_groups: list[KVCacheGroupSpec]
) -> bool:
    """True if all layers of a block lie in one row of a shared backing.

    So it is where every group has pages of its own sizes, and where a KV connector
    asked for blocks across layers and there is more than one group.
    """
    if not kv_cache_groups:
        return False
    if all(
        isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs)
        for group in kv_cache_groups
    ):
        return True
    transfer = vllm_config.kv_transfer_config
    if transfer is None or len(kv_cache_groups) == 1:
        return False
    extra = transfer.kv_connector_extra_config or {}
    return str(extra.get("enable_cross_layers_blocks", "")).lower() == "true"


def _get_packed_kv_cache_layout(
    kv_cache_groups: list[KVCacheGroupSpec],
) -> tuple[int, dict[int, list[str]]]:
    """Bytes per block of the backing, and the layers whose pages start at each offset.

    Every group fills the same row from its start; a block id belongs to one group, so
    layers of different groups may share an offset.
    """
    block_stride = 0
    by_offset: dict[int, list[str]] = {}
    for group in kv_cache_groups:
        offset = 0
        for name in group.layer_names:
            by_offset.setdefault(offset, []).append(name)
            offset += group.layer_spec(name).page_size_bytes
        block_stride = max(block_stride, offset)
    return block_stride, by_offset


def _get_kv_cache_config_packed(
    vllm_config: VllmConfig,
    kv_cache_groups: list[KVCacheGroupSpec],
    available_memory: int,
) -> tuple[int, list[KVCacheTensor]]:
    """Number of blocks and one tensor per offset; each has the size of the backing."""
    block_stride, by_offset = _get_packed_kv_cache_layout(kv_cache_groups)
    num_blocks = get_num_blocks(vllm_config, available_memory, block_stride)
    return num_blocks, [
        KVCacheTensor(
            size=block_stride * num_blocks,
            shared_by=names,
            offset=offset,
            block_stride=block_stride,
        )
        for offset, names in by_offset.items()
    ]


def _is_one_uniform_group(kv_cache_groups: list[KVCacheGroupSpec]) -> bool:
    return len(kv_cache_groups) == 1 and isinstance(
        kv_cache_groups[0].kv_cache_spec, UniformTypeKVCacheSpecs
    )


def _shared_page(kv_cache_groups: list[KVCacheGroupSpec]) -> int:
    """The page that all groups with layers have. SpecError if they differ."""
    pages = {g.kv_cache_spec.page_size_bytes for g in kv_cache_groups if g.layer_names}
    if len(pages) != 1:
        raise SpecError(
            f"groups of one pool have pages of {sorted(pages)} bytes: unify them first"
        )
    return pages.pop()


def _most_layers(kv_cache_groups: list[KVCacheGroupSpec]) -> int:
    return max(len(group.layer_names) for group in kv_cache_groups)


def _layers_at(kv_cache_groups: list[KVCacheGroupSpec], place: int) -> list[str]:
    return [
        group.layer_names[place]
        for group in kv_cache_groups
        if place < len(group.layer_names)
    ]
