"""The public names of hashing, blocks and planning, defined in modules of their own."""

from typing import Any

from vllm.v1.core import block_hash
from vllm.v1.core.block_hash import (
    BlockHash,
    BlockHashListWithBlockSize,
    BlockHashWithGroupId,
    FreeKVCacheBlockQueue,
    KVCacheBlock,
    KVCacheBlockCopy,
    generate_block_hash_extra_keys,
    get_block_hash,
    get_group_id,
    get_request_block_hasher,
    hash_block_tokens,
    init_none_hash,
    make_block_hash_with_group_id,
    tensor_data,
)
from vllm.v1.core.kv_cache_capacity import (
    blocks_per_request,
    check_enough_kv_cache_memory,
    estimate_max_model_len,
    get_kv_cache_capacity,
    get_max_concurrency_for_kv_cache_config,
    needed_memory,
    pool_use,
    report_kv_cache_config,
)
from vllm.v1.core.kv_cache_grouping import (
    _approximate_gcd,
    _get_kv_cache_groups_uniform_groups,
    _get_kv_cache_groups_uniform_page_size,
    get_kv_cache_groups,
    group_and_unify_kv_cache_specs,
)
from vllm.v1.core.kv_cache_planning import (
    generate_scheduler_kv_cache_config,
    get_kv_cache_config_from_groups,
    get_kv_cache_configs,
)
from vllm.v1.core.kv_cache_tensors import (
    _get_kv_cache_config_packed,
    _get_packed_kv_cache_layout,
    _use_packed_kv_cache_config,
    get_num_blocks,
    pool_bytes_per_block,
)
from vllm.v1.core.kv_cache_unification import (
    is_kv_cache_spec_uniform,
    unify_hybrid_kv_cache_specs,
    unify_kv_cache_spec_page_size,
)

__all__ = [
    "BlockHash",
    "BlockHashListWithBlockSize",
    "BlockHashWithGroupId",
    "FreeKVCacheBlockQueue",
    "KVCacheBlock",
    "KVCacheBlockCopy",
    "_approximate_gcd",
    "_get_kv_cache_config_packed",
    "_get_kv_cache_groups_uniform_groups",
    "_get_kv_cache_groups_uniform_page_size",
    "_get_packed_kv_cache_layout",
    "_use_packed_kv_cache_config",
    "blocks_per_request",
    "check_enough_kv_cache_memory",
    "estimate_max_model_len",
    "generate_block_hash_extra_keys",
    "generate_scheduler_kv_cache_config",
    "get_block_hash",
    "get_group_id",
    "get_kv_cache_capacity",
    "get_kv_cache_config_from_groups",
    "get_kv_cache_configs",
    "get_kv_cache_groups",
    "get_max_concurrency_for_kv_cache_config",
    "get_num_blocks",
    "get_request_block_hasher",
    "group_and_unify_kv_cache_specs",
    "hash_block_tokens",
    "init_none_hash",
    "is_kv_cache_spec_uniform",
    "make_block_hash_with_group_id",
    "needed_memory",
    "pool_bytes_per_block",
    "pool_use",
    "report_kv_cache_config",
    "tensor_data",
    "unify_hybrid_kv_cache_specs",
    "unify_kv_cache_spec_page_size",
]


def __getattr__(name: str) -> Any:
    # `init_none_hash` sets it anew, so it cannot be bound here once.
    if name == "NONE_HASH":
        return block_hash.NONE_HASH
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
