"""The pool hands out each block once and keeps what is worth keeping longest."""

import random
from unittest.mock import patch

import pytest

from tests.v1.core.utils import make_request
from vllm.v1.core.block_hash import (
    BlockHash,
    KVCacheBlock,
    KVCacheInvariantError,
    make_block_hash_with_group_id,
)
from vllm.v1.core.block_pool import BlockHashToBlockMap, BlockPool
from vllm.v1.core.kv_cache_metrics import BlockMetricsState, KVCacheMetricsCollector


def make_pool(n: int = 11, **kwargs: object) -> BlockPool:
    return BlockPool(n, enable_caching=True, hash_block_size=4, **kwargs)


def cache(pool: BlockPool, name: str, tokens: list[int]) -> list[KVCacheBlock]:
    """Blocks that hold these tokens, cached."""
    request = make_request(name, tokens)
    blocks = pool.get_new_blocks(len(tokens) // 4)
    pool.cache_full_blocks(request, blocks, 0, len(blocks), 4, 0)
    return blocks


def free_ids(pool: BlockPool) -> list[int]:
    return [b.block_id for b in pool.free_block_queue.get_all_free_blocks()]


def test_block_zero_is_null_and_never_handed_out() -> None:
    pool = make_pool(5)
    assert pool.null_block is pool.blocks[0]
    assert pool.null_block.is_null
    assert [b.block_id for b in pool.get_new_blocks(4)] == [1, 2, 3, 4]
    assert pool.get_usage() == 1.0
    with pytest.raises(ValueError, match="Cannot get 1 free blocks"):
        pool.get_new_blocks(1)
    pool.free_blocks([pool.null_block])
    assert pool.get_num_free_blocks() == 0


def test_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 block"):
        make_pool(0)


def test_uncached_blocks_are_reused_before_cached_ones() -> None:
    pool = make_pool(7)
    cached = cache(pool, "a", list(range(8)))
    (uncached,) = pool.get_new_blocks(1)
    pool.free_blocks(reversed([*cached, uncached]))
    assert free_ids(pool) == [3, 4, 5, 6, 2, 1]


def test_least_recently_freed_content_is_evicted_first() -> None:
    pool = make_pool(5)
    old, new = cache(pool, "a", [1] * 8), cache(pool, "b", [2] * 8)
    pool.free_blocks(reversed(new))
    pool.free_blocks(reversed(old))
    assert pool.get_new_blocks(4) == [new[1], new[0], old[1], old[0]]
    assert len(pool.cached_block_hash_to_block) == 0


def test_touched_blocks_leave_the_queue_and_return_to_it() -> None:
    pool = make_pool(5)
    blocks = cache(pool, "a", [1] * 8)
    pool.touch(blocks)
    assert [b.ref_cnt for b in blocks] == [2, 2]
    pool.free_blocks(blocks)
    assert pool.get_num_free_blocks() == 2
    pool.free_blocks(blocks)
    assert pool.get_num_free_blocks() == 4
    pool.touch([*blocks, pool.null_block])
    assert pool.get_num_free_blocks() == 2
    assert pool.null_block.ref_cnt == 0


def test_double_free_is_loud() -> None:
    pool = make_pool()
    blocks = pool.get_new_blocks(2)
    pool.free_blocks(blocks)
    with pytest.raises(KVCacheInvariantError, match="twice"):
        pool.free_blocks(blocks[:1])
    assert pool.get_num_free_blocks() == 10


def test_hits_need_a_block_in_every_group() -> None:
    pool = make_pool()
    request = make_request("a", [1] * 4)
    (first,), (second,) = pool.get_new_blocks(1), pool.get_new_blocks(1)
    pool.cache_full_blocks(request, [first], 0, 1, 4, kv_cache_group_id=0)
    name = request.block_hashes[0]
    assert pool.get_cached_block(name, [0]) == [first]
    assert pool.get_cached_block(name, [0, 1]) is None
    pool.cache_full_blocks(request, [second], 0, 1, 4, kv_cache_group_id=1)
    assert pool.get_cached_block(name, [1, 0]) == [second, first]


def test_null_and_masked_blocks_are_not_cached() -> None:
    pool = make_pool()
    request = make_request("a", list(range(16)))
    blocks = [pool.null_block, *pool.get_new_blocks(3)]
    pool.cache_full_blocks(request, blocks, 0, 4, 4, 0, [True, True, False, True])
    cached = [pool.get_cached_block(h, [0]) for h in request.block_hashes]
    assert cached == [None, [blocks[1]], None, [blocks[3]]]


def test_caching_unhashed_tokens_is_loud() -> None:
    pool = make_pool()
    request = make_request("a", [1] * 6)
    with pytest.raises(KVCacheInvariantError, match="1 hashes"):
        pool.cache_full_blocks(request, pool.get_new_blocks(2), 0, 2, 4, 0)


def test_evicting_forgets_content_but_not_holders() -> None:
    pool = make_pool()
    blocks = cache(pool, "a", [1] * 8)
    pool.evict_blocks({blocks[0].block_id})
    assert blocks[0].block_hash is None
    assert blocks[0].ref_cnt == 1
    assert len(pool.cached_block_hash_to_block) == 1
    with pytest.raises(ValueError, match="99"):
        pool.evict_blocks({99})


def test_reset_is_refused_while_blocks_are_held() -> None:
    pool = make_pool()
    blocks = cache(pool, "a", [1] * 8)
    assert not pool.reset_prefix_cache()
    pool.free_blocks(blocks)
    assert pool.reset_prefix_cache()
    assert all(block.block_hash is None for block in pool.blocks)
    assert len(pool.cached_block_hash_to_block) == 0


def test_after_a_reset_blocks_that_were_used_are_used_first() -> None:
    pool = make_pool()
    pool.reserve_blocks(2)
    used = cache(pool, "a", [1] * 8)
    ids = [block.block_id for block in used]
    pool.free_blocks(used)
    assert pool.reset_prefix_cache()
    free = pool.get_num_free_blocks()
    assert [block.block_id for block in pool.get_new_blocks(len(ids))] == ids
    pool.get_new_blocks(free - len(ids))
    assert pool.get_num_free_blocks() == 0


def test_reserved_blocks_count_as_nobodys() -> None:
    pool = make_pool(11)
    pool.reserve_blocks(3)
    assert pool.num_usable_blocks == pool.get_num_free_blocks() == 7
    assert pool.get_usage() == 0.0
    assert pool.reset_prefix_cache()


def test_map_keeps_duplicates_apart() -> None:
    cached = BlockHashToBlockMap()
    key = make_block_hash_with_group_id(BlockHash(b"h"), 0)
    blocks = [KVCacheBlock(i) for i in range(3)]
    assert cached.get_one_block(key) is None
    assert cached.pop(key, 0) is None
    for block in blocks:
        cached.insert(key, block)
    assert len(cached) == 1
    assert cached.pop(key, 7) is None
    assert cached.pop(key, 0) is blocks[0]
    assert cached.get_one_block(key) in blocks[1:]
    assert cached.pop(key, 1) is blocks[1]
    assert cached.get_one_block(key) is blocks[2]
    assert cached.pop(key, 1) is None
    assert cached.pop(key, 2) is blocks[2]
    assert key not in cached


def test_pool_equals_counts_kept_by_hand() -> None:
    rng = random.Random(0)
    pool = make_pool(30)
    holders: list[list[KVCacheBlock]] = []
    for i in range(2000):
        act = rng.randrange(3)
        if act == 0 and pool.get_num_free_blocks() >= 4:
            stem = [rng.randrange(4)] * 4
            holders.append(cache(pool, str(i), stem * rng.randrange(1, 5)))
        elif act == 1:
            tokens = [rng.randrange(4)] * 16
            hashes = make_request("probe", tokens).block_hashes
            found = [pool.get_cached_block(h, [0]) for h in hashes]
            hit = [blocks[0] for blocks in found if blocks is not None]
            pool.touch(hit)
            holders.append(hit)
        elif holders:
            pool.free_blocks(reversed(holders.pop(rng.randrange(len(holders)))))
        counts = [0] * 30
        for blocks in holders:
            for block in blocks:
                counts[block.block_id] += 1
        assert [block.ref_cnt for block in pool.blocks] == counts
        assert sorted(free_ids(pool)) == [i for i in range(1, 30) if counts[i] == 0]


# --- metrics -------------------------------------------------------------------------


def at(seconds: float):
    return patch("time.monotonic_ns", return_value=int(seconds * 1e9))


def test_block_life_is_measured() -> None:
    with at(1):
        state = BlockMetricsState()
    for second in range(2, 7):
        with at(second):
            state.record_access()
    with at(8.5):
        assert state.get_lifetime_seconds() == pytest.approx(7.5)
        assert state.get_idle_time_seconds() == pytest.approx(2.5)
    assert state.get_reuse_gaps_seconds() == pytest.approx([1.0, 1.0, 1.0])


def test_collector_follows_blocks_through_the_pool() -> None:
    collector = KVCacheMetricsCollector(sample_rate=1.0)
    pool = make_pool(3, metrics_collector=collector)
    with at(1):
        blocks = cache(pool, "a", [1] * 8)
        pool.free_blocks(blocks)
    with at(3):
        pool.touch(blocks)
        pool.free_blocks(blocks)
    with at(6):
        pool.get_new_blocks(2)
    events = collector.drain_events()
    assert [e.lifetime_seconds for e in events] == pytest.approx([5.0, 5.0])
    assert [e.idle_seconds for e in events] == pytest.approx([3.0, 3.0])
    assert collector.drain_events() == []


@pytest.mark.parametrize("rate", [0.0, -0.5, 1.5])
def test_sample_rate_is_a_share(rate: float) -> None:
    with pytest.raises(ValueError, match=r"sample_rate must be in \(0, 1.0\]"):
        KVCacheMetricsCollector(rate)
