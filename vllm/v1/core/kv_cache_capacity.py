"""How much a pool holds: requests, tokens, the longest model length, and what is lost.

Knows groups, bytes and the maximum model length. Refuses to know tensors and views. The
memory check, the length estimate and the report use one formula: blocks per request
times bytes per block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.utils.math_utils import cdiv
from vllm.utils.mem_utils import format_gib
from vllm.v1.core.kv_cache_grouping import get_kv_cache_groups
from vllm.v1.core.kv_cache_tensors import pool_bytes_per_block
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

# Percent of a pool lost to padding from which users are told.
_WORTH_SAYING = 0.1


def blocks_per_request(
    vllm_config: VllmConfig, kv_cache_groups: Sequence[KVCacheGroupSpec]
) -> int:
    """Blocks of all groups that one request of the maximum model length holds."""
    blocks = 0
    for group in kv_cache_groups:
        page = group.kv_cache_spec.page_size_bytes
        if page:
            blocks += cdiv(
                group.kv_cache_spec.max_memory_usage_bytes(vllm_config), page
            )
    return blocks


def needed_memory(
    vllm_config: VllmConfig, kv_cache_groups: list[KVCacheGroupSpec]
) -> int:
    """Bytes of pool that one request of the maximum model length occupies."""
    blocks = blocks_per_request(vllm_config, kv_cache_groups)
    return blocks * pool_bytes_per_block(vllm_config, kv_cache_groups)


def get_max_concurrency_for_kv_cache_config(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
) -> float:
    """Requests of the maximum model length that fit the pool at once."""
    blocks = blocks_per_request(vllm_config, kv_cache_config.kv_cache_groups)
    return kv_cache_config.num_blocks / blocks if blocks else 0.0


def get_kv_cache_capacity(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
) -> tuple[int, float]:
    """Tokens that the pool holds and requests of the maximum length at once.

    The first is the second times the maximum model length, on hybrids too.
    """
    concurrency = get_max_concurrency_for_kv_cache_config(vllm_config, kv_cache_config)
    return int(concurrency * vllm_config.model_config.max_model_len), concurrency


@dataclass(frozen=True, kw_only=True)
class PoolUse:
    """Where the bytes of one block of one group go."""

    group_id: int
    spec_name: str
    num_layers: int
    block_size: int
    page_bytes: tuple[int, ...]
    state_bytes: int
    pool_bytes: int

    @property
    def lost_percent(self) -> float:
        """Share of a block that is padding or has no layer, in percent."""
        return 100 * (1 - self.state_bytes / self.pool_bytes) if self.pool_bytes else 0


def pool_use(
    vllm_config: VllmConfig, kv_cache_groups: list[KVCacheGroupSpec]
) -> list[PoolUse]:
    """Bytes per block, with and without padding, of every group."""
    pool = pool_bytes_per_block(vllm_config, kv_cache_groups)
    uses = []
    for group_id, group in enumerate(kv_cache_groups):
        specs = [group.layer_spec(name) for name in group.layer_names]
        uses.append(
            PoolUse(
                group_id=group_id,
                spec_name=type(group.kv_cache_spec).__name__,
                num_layers=len(specs),
                block_size=group.kv_cache_spec.block_size,
                page_bytes=tuple(sorted({s.page_size_bytes for s in specs})),
                state_bytes=sum(s.unpadded_page_size_bytes for s in specs),
                pool_bytes=pool,
            )
        )
    return uses


def report_kv_cache_config(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
) -> None:
    """Logs the capacity and what padding costs; stores the first in CacheConfig."""
    if not kv_cache_config.kv_cache_tensors:
        return
    tokens, concurrency = get_kv_cache_capacity(vllm_config, kv_cache_config)
    vllm_config.cache_config.kv_cache_size_tokens = tokens
    vllm_config.cache_config.kv_cache_max_concurrency = concurrency
    for use in pool_use(vllm_config, kv_cache_config.kv_cache_groups):
        if not use.num_layers:
            continue
        log = logger.info if use.lost_percent >= _WORTH_SAYING else logger.debug
        log(
            "KV cache group %d: %d layers, blocks of %d tokens, pages of %s bytes, "
            "%.1f%% of the pool lost to padding",
            use.group_id,
            use.num_layers,
            use.block_size,
            " and ".join(f"{page:,}" for page in use.page_bytes),
            use.lost_percent,
        )
    logger.info("KV cache size: %s tokens", f"{tokens:,}")
    logger.info(
        "Maximum concurrency for %s tokens per request: %.2fx",
        f"{vllm_config.model_config.max_model_len:,}",
        concurrency,
    )


# --- the memory check and the longest model length ------------------------------------


def estimate_max_model_len(
    vllm_config: VllmConfig,
    kv_cache_spec: Mapping[str, KVCacheSpec],
    available_memory: int,
) -> int:
    """The longest model length, up to the configured one, that fits; 0 if none does."""
    groups = get_kv_cache_groups(vllm_config, kv_cache_spec)
    return _estimate_max_model_len_from_groups(vllm_config, groups, available_memory)


def _estimate_max_model_len_from_groups(
    vllm_config: VllmConfig,
    kv_cache_groups: list[KVCacheGroupSpec],
    available_memory: int,
) -> int:
    """As `estimate_max_model_len`, for layers that have been grouped."""

    def fits(length: int) -> bool:
        with _assuming_max_model_len(vllm_config, length):
            return needed_memory(vllm_config, kv_cache_groups) <= available_memory

    return _largest_true(fits, vllm_config.model_config.max_model_len)


def memory_of_pool(
    vllm_config: VllmConfig,
    kv_cache_groups: list[KVCacheGroupSpec],
    available_memory: int,
) -> int:
    """Bytes of the blocks that the user asked for by number, else what is available."""
    override = vllm_config.cache_config.num_gpu_blocks_override
    if override is None:
        return available_memory
    return override * pool_bytes_per_block(vllm_config, kv_cache_groups)


def check_memory_before_loading(
    vllm_config: VllmConfig, kv_cache_groups: list[KVCacheGroupSpec]
) -> None:
    """As `check_enough_kv_cache_memory`, for the memory that the user asked for; where
    a device is to be asked first, nothing is checked. With a length to be chosen, one
    token has to fit."""
    asked = vllm_config.cache_config.kv_cache_memory_bytes
    if asked is None and vllm_config.cache_config.num_gpu_blocks_override is None:
        return
    memory = memory_of_pool(vllm_config, kv_cache_groups, asked or 0)
    if wants_auto_fit(vllm_config):
        _check_one_token_fits(vllm_config, kv_cache_groups, memory)
    else:
        check_enough_kv_cache_memory(vllm_config, kv_cache_groups, memory)


def check_enough_kv_cache_memory(
    vllm_config: VllmConfig,
    kv_cache_groups: list[KVCacheGroupSpec],
    available_memory: int,
) -> None:
    """Raises ValueError unless one request of the maximum model length fits.

    The message gives both amounts, the longest length that fits, and ways out.
    """
    if pool_bytes_per_block(vllm_config, kv_cache_groups) == 0:
        return
    if available_memory <= 0:
        utilization = vllm_config.cache_config.gpu_memory_utilization
        raise ValueError(
            f"No memory is available for KV cache blocks ({available_memory} bytes). "
            f"Raise gpu_memory_utilization (now {utilization}; it also bounds what the "
            "CPU backend reserves) or set kv_cache_memory_bytes."
        )
    needed = needed_memory(vllm_config, kv_cache_groups)
    if needed <= available_memory:
        return
    max_len = vllm_config.model_config.max_model_len
    fitting = _estimate_max_model_len_from_groups(
        vllm_config, kv_cache_groups, available_memory
    )
    estimate = (
        f"The estimated maximum model length that fits is {fitting}. "
        if fitting
        else "Not even one token fits. "
    )
    blocks = blocks_per_request(vllm_config, kv_cache_groups)
    override = vllm_config.cache_config.num_gpu_blocks_override
    if override is not None:
        raise ValueError(
            f"--num-gpu-blocks-override {override} is too few: one request of "
            f"max_model_len {max_len} needs {blocks} blocks. {estimate}Expected "
            f"{blocks} blocks or more, or a lower --max-model-len."
        )
    raise ValueError(
        f"One request of max_model_len {max_len} needs {format_gib(needed)} GiB of KV "
        f"cache ({needed:,} bytes), but {format_gib(available_memory)} GiB "
        f"({available_memory:,} bytes) are available. {estimate}Lower max_model_len, "
        f"raise {_what_bounds_the_pool(vllm_config)}, or choose a smaller "
        "--kv-cache-dtype."
    )


def _what_bounds_the_pool(vllm_config: VllmConfig) -> str:
    cache = vllm_config.cache_config
    if cache.kv_cache_memory_bytes is not None:
        return f"kv_cache_memory_bytes (now {cache.kv_cache_memory_bytes:,})"
    return (
        f"gpu_memory_utilization (now {cache.gpu_memory_utilization}) or set "
        "kv_cache_memory_bytes"
    )


def wants_auto_fit(vllm_config: VllmConfig) -> bool:
    """True if the user asked for the longest model length that fits (-1)."""
    model = vllm_config.model_config
    return getattr(model, "original_max_model_len", model.max_model_len) == -1


def auto_fit_max_model_len(
    vllm_config: VllmConfig,
    groups_per_worker: Sequence[list[KVCacheGroupSpec]],
    available_memory: Sequence[int],
) -> None:
    """Sets max_model_len to the largest value that fits every worker.

    ValueError if nothing fits.
    """
    model = vllm_config.model_config
    if model.max_model_len == -1:
        model.max_model_len = model.derived_max_model_len
    upper = model.max_model_len
    lengths = [
        _estimate_max_model_len_from_groups(vllm_config, groups, memory)
        for groups, memory in zip(groups_per_worker, available_memory, strict=True)
    ]
    fitting = min(lengths, default=upper)
    if fitting == 0:
        worker = lengths.index(0)
        _check_one_token_fits(
            vllm_config, groups_per_worker[worker], available_memory[worker]
        )
    limit = available_memory[lengths.index(fitting)] if lengths else 0
    model.max_model_len = fitting
    if fitting < upper:
        logger.info(
            "max_model_len is %d instead of %d, which %s GiB of KV cache hold",
            fitting,
            upper,
            format_gib(limit),
        )


def _check_one_token_fits(
    vllm_config: VllmConfig,
    kv_cache_groups: list[KVCacheGroupSpec],
    available_memory: int,
) -> None:
    with _assuming_max_model_len(vllm_config, 1):
        needed = needed_memory(vllm_config, kv_cache_groups)
        blocks = blocks_per_request(vllm_config, kv_cache_groups)
    if needed <= available_memory:
        return
    override = vllm_config.cache_config.num_gpu_blocks_override
    if override is not None:
        raise ValueError(
            f"Cannot choose max_model_len: one token needs {blocks} blocks, and "
            f"--num-gpu-blocks-override {override} is fewer: expected {blocks} or more."
        )
    raise ValueError(
        "Cannot choose max_model_len: the memory available for the KV cache "
        f"({format_gib(available_memory)} GiB) does not hold one token "
        f"({needed:,} bytes). Raise {_what_bounds_the_pool(vllm_config)}."
    )


@contextmanager
def _assuming_max_model_len(vllm_config: VllmConfig, length: int) -> Iterator[None]:
    model = vllm_config.model_config
    before = model.max_model_len
    model.max_model_len = length
    try:
        yield
    finally:
        model.max_model_len = before


def _largest_true(test: Callable[[int], bool], upper: int) -> int:
    """The largest n in 1..upper for which a monotonic test holds, 0 if none."""
    low, high = 0, upper
    while low < high:
        middle = (low + high + 1) // 2
        if test(middle):
            low = middle
        else:
            high = middle - 1
    return low
