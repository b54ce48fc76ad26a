"""From the configuration to a KV cache manager. Knows settings; decides block sizes."""

from math import gcd, lcm

from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector
from vllm.v1.kv_cache_interface import KVCacheConfig


def resolve_block_sizes(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    block_size: int,
    hash_block_size: int | None,
) -> tuple[int, int]:
    """The tokens after which blocks of all groups end together, and the tokens of one
    hash: as given, else `prefix_match_unit` for several groups, else what divides all.

    ValueError when hashes do not divide the blocks of a group. `block_size` counts only
    where there is no group.
    """
    ranks = vllm_config.parallel_config.decode_context_parallel_size
    groups = kv_cache_config.kv_cache_groups
    sizes = [group.kv_cache_spec.block_size * ranks for group in groups]
    if not sizes:
        return block_size, hash_block_size or block_size
    if hash_block_size is None:
        unit = vllm_config.cache_config.prefix_match_unit
        hash_block_size = (unit if len(sizes) > 1 else None) or gcd(*sizes)
    if any(size % hash_block_size for size in sizes):
        raise ValueError(
            f"block hashes of {hash_block_size} tokens do not divide blocks of "
            f"{', '.join(map(str, sizes))} tokens: choose another prefix_match_unit"
        )
    return lcm(*sizes), hash_block_size


def build_kv_cache_manager(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    block_size: int,
    hash_block_size: int,
    log_stats: bool,
) -> KVCacheManager:
    """The manager that the configuration asks for, with resolved block sizes."""
    events = vllm_config.kv_events_config
    watch = vllm_config.observability_config
    parallel = vllm_config.parallel_config
    collector = None
    if watch.kv_cache_metrics:
        collector = KVCacheMetricsCollector(watch.kv_cache_metrics_sample)
    return KVCacheManager(
        kv_cache_config=kv_cache_config,
        max_model_len=vllm_config.model_config.max_model_len,
        scheduler_block_size=block_size,
        hash_block_size=hash_block_size,
        max_in_flight_tokens=vllm_config.max_in_flight_tokens,
        enable_caching=vllm_config.cache_config.enable_prefix_caching,
        log_stats=log_stats,
        enable_kv_cache_events=events is not None and events.enable_kv_cache_events,
        dcp_world_size=parallel.decode_context_parallel_size,
        pcp_world_size=parallel.prefill_context_parallel_size,
        metrics_collector=collector,
        watermark=vllm_config.scheduler_config.watermark,
    )
