"""The manager over all groups: hits, slots, limits and what comes free again."""

from typing import Any

import pytest

from tests.v1.core.utils import (
    chunked,
    full,
    make_kv_cache_config,
    make_request,
    make_vllm_config,
    mamba,
    window,
)
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_setup import resolve_block_sizes
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.request import Request, RequestStatus


def make_manager(
    *specs: KVCacheSpec, num_blocks: int = 11, **kwargs: Any
) -> KVCacheManager:
    settings = {"max_model_len": 256, "hash_block_size": 4, "log_stats": True, **kwargs}
    config = make_kv_cache_config(num_blocks, *(specs or (full(),)))
    return KVCacheManager(config, scheduler_block_size=4, **settings)


def allocate(manager: KVCacheManager, request: Request) -> int:
    """Gives slots to all of a request's tokens; returns how many were cached."""
    computed, num_cached, _ = manager.get_computed_blocks(request)
    blocks = manager.allocate_slots(
        request, request.num_tokens - num_cached, num_cached, computed
    )
    assert blocks is not None
    request.num_computed_tokens = request.num_tokens
    return num_cached


def free_ids(manager: KVCacheManager) -> list[int]:
    queue = manager.block_pool.free_block_queue
    return [block.block_id for block in queue.get_all_free_blocks()]


def test_prefix_is_shared_and_tails_come_free_first() -> None:
    manager = make_manager()
    first = make_request("a", [*range(12), 90])
    second = make_request("b", [*range(12), 91, 92])
    assert allocate(manager, first) == 0
    assert manager.get_block_ids("a") == ([1, 2, 3, 4],)
    assert allocate(manager, second) == 12
    assert manager.get_block_ids("b") == ([1, 2, 3, 5],)
    assert [b.ref_cnt for b in manager.block_pool.blocks[1:6]] == [2, 2, 2, 1, 1]
    manager.free(first)
    manager.free(second)
    # Blocks without content first, then the cached ones: the tail before the head.
    assert free_ids(manager) == [5, 4, 6, 7, 8, 9, 10, 3, 2, 1]
    assert manager.usage == 0.0
    assert allocate(manager, make_request("c", [*range(12), 93])) == 12


@pytest.mark.parametrize("num_tokens", [4, 5, 8, 9, 11, 12, 13])
def test_last_token_is_never_hit(num_tokens: int) -> None:
    manager = make_manager()
    allocate(manager, make_request("a", list(range(num_tokens))))
    again = make_request("b", list(range(num_tokens)))
    assert allocate(manager, again) == (num_tokens - 1) // 4 * 4


@pytest.mark.parametrize("field", ["prompt_logprobs", "skip_reading_prefix_cache"])
def test_requests_may_decline_to_read_but_still_write(field: str) -> None:
    manager = make_manager(num_blocks=20)
    tokens = list(range(13))
    declining = {field: 1 if field == "prompt_logprobs" else True}
    assert allocate(manager, make_request("a", tokens, **declining)) == 0
    assert allocate(manager, make_request("b", tokens, **declining)) == 0
    assert allocate(manager, make_request("c", tokens)) == 12
    assert manager.estimate_cached_tokens(make_request("d", tokens)) == 12
    assert manager.estimate_cached_tokens(make_request("e", tokens, **declining)) == 0


def test_salted_requests_share_with_their_own_salt_only() -> None:
    manager = make_manager(num_blocks=40)
    tokens = list(range(13))
    hits = [
        allocate(manager, make_request(str(i), tokens, cache_salt=salt))
        for i, salt in enumerate([None, "a", "b", "a", None, "b"])
    ]
    assert hits == [0, 0, 0, 12, 12, 12]


def test_evicted_prefix_is_hit_up_to_the_eviction() -> None:
    manager = make_manager()
    first = make_request("a", list(range(16)))
    allocate(manager, first)
    manager.free(first)
    other = make_request("b", [50] * 28)
    allocate(manager, other)  # 7 of 10 blocks: the tail of `a` had to go
    manager.free(other)
    assert allocate(manager, make_request("c", list(range(17)))) == 12


def test_no_slots_when_blocks_are_short_and_nothing_changes() -> None:
    manager = make_manager()
    holder = make_request("a", [1] * 28)
    allocate(manager, holder)
    manager.free(holder)
    again = make_request("b", [1] * 48)
    computed, num_cached, _ = manager.get_computed_blocks(again)
    assert num_cached == 28
    before = free_ids(manager)
    # 5 blocks to compute and 7 cached ones that are free: 12 of 10.
    assert manager.allocate_slots(again, 20, num_cached, computed) is None
    assert free_ids(manager) == before
    assert manager.get_block_ids("b") == ([],)
    assert manager.allocate_slots(again, 12, num_cached, computed) is not None


def test_asking_for_no_slots_is_an_error() -> None:
    with pytest.raises(ValueError, match="no slots"):
        make_manager().allocate_slots(make_request("a", [1]), 0)


def test_slots_end_at_the_models_length() -> None:
    manager = make_manager(max_model_len=10)
    request = make_request("a", list(range(9)))
    manager.allocate_slots(request, 9, num_lookahead_tokens=9)
    assert manager.get_block_ids("a") == ([1, 2, 3],)


def test_lookahead_and_unknown_tokens_get_slots_but_no_hash() -> None:
    manager = make_manager()
    request = make_request("a", list(range(6)))
    manager.allocate_slots(request, 8, num_lookahead_tokens=4)
    assert len(manager.get_block_ids("a")[0]) == 3
    assert len(manager.block_pool.cached_block_hash_to_block) == 1


def test_delayed_blocks_are_cached_on_demand() -> None:
    manager = make_manager()
    request = make_request("a", list(range(9)))
    manager.allocate_slots(
        request, 0, num_external_computed_tokens=8, delay_cache_blocks=True
    )
    assert manager.estimate_cached_tokens(make_request("b", list(range(9)))) == 0
    manager.cache_blocks(request, 8)
    assert manager.estimate_cached_tokens(make_request("b", list(range(9)))) == 8


def test_watermark_holds_for_admission_beside_others_only() -> None:
    manager = make_manager(watermark=0.3)
    request = make_request("a", [1] * 32)  # 8 of 10 blocks, 3 kept back
    assert manager.allocate_slots(request, 32) is None
    assert manager.allocate_slots(request, 28) is not None
    manager.free(request)
    assert manager.allocate_slots(request, 32, has_scheduled_reqs=False) is not None
    manager.free(request)
    request.status = RequestStatus.RUNNING
    assert manager.allocate_slots(request, 32) is not None


def test_reserved_blocks_are_left_alone() -> None:
    manager = make_manager()
    request = make_request("a", [1] * 32)
    assert manager.allocate_slots(request, 32, reserved_blocks=3) is None
    assert manager.allocate_slots(request, 32, reserved_blocks=2) is not None


def test_whole_sequences_must_fit_when_asked() -> None:
    manager = make_manager()
    request = make_request("a", [1] * 44)
    assert manager.allocate_slots(request, 4, full_sequence_must_fit=True) is None
    assert manager.allocate_slots(request, 4) is not None
    assert manager.num_blocks_short_of(request, request.num_tokens) == 10


def test_windows_fit_whole_sequences_in_what_they_hold_at_once() -> None:
    manager = make_manager(window(8), max_in_flight_tokens=8)
    request = make_request("a", list(range(200)))
    computed = 0
    while computed < 200:
        blocks = manager.allocate_slots(request, 8, full_sequence_must_fit=True)
        assert blocks is not None
        request.num_computed_tokens = computed = computed + 8
    manager.free(request)
    assert len(free_ids(manager)) == 10


def test_windows_behind_tokens_under_way_are_kept() -> None:
    manager = make_manager(window(4))
    request = make_request("a", list(range(16)))
    manager.allocate_slots(request, 16)
    request.num_computed_tokens = 17
    request.num_output_placeholders = 2  # 15 are certain: token 12 may be read again
    manager.allocate_slots(request, 1)
    assert [i == 0 for i in manager.get_block_ids("a")[0]] == [
        True,
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize("num_external", [1, 4, 9, 12, 13])
def test_loads_of_everything_keep_what_the_last_token_reads(num_external: int) -> None:
    manager = make_manager(full(), window(5), num_blocks=40)
    request = make_request("a", list(range(num_external)))
    manager.allocate_slots(
        request, 0, num_external_computed_tokens=num_external, delay_cache_blocks=True
    )
    blocks = manager.get_block_ids("a")
    assert [len(group) for group in blocks] == [-(-num_external // 4)] * 2
    first_read = max(num_external - 1 - 4, 0) // 4
    assert all(block_id > 0 for block_id in blocks[1][first_read:])
    assert all(block_id == 0 for block_id in blocks[1][:first_read])


def test_cached_blocks_are_held_before_any_group_takes_new_ones() -> None:
    # Two groups of 4 blocks each: what the second hit must not go to the first.
    manager = make_manager(full(), full(8), num_blocks=9, hash_block_size=4)
    request = make_request("a", list(range(16)))
    allocate(manager, request)
    manager.free(request)
    again = make_request("b", [*range(16), 7])
    computed, num_cached, _ = manager.get_computed_blocks(again)
    assert num_cached == 16
    assert manager.allocate_slots(again, 1, num_cached, computed) is not None
    held = [block_id for group in manager.get_block_ids("b") for block_id in group]
    assert len(held) == len(set(held)) == 8


def test_statistics_count_each_look_up_in_tokens() -> None:
    manager = make_manager(num_blocks=20)
    allocate(manager, make_request("a", list(range(9))))
    second = make_request("b", list(range(10)))
    allocate(manager, second)
    preempted = make_request("c", list(range(9)))
    preempted.num_preemptions = 1
    manager.get_computed_blocks(preempted)
    manager.discard_lookup(preempted, 8)
    manager.get_computed_blocks(preempted)
    waiting = make_request("d", list(range(9)))
    manager.get_computed_blocks(waiting)
    manager.discard_lookup(waiting, 8)
    stats = manager.make_prefix_cache_stats()
    assert stats is not None
    assert (stats.requests, stats.queries, stats.hits) == (2, 19, 8)
    assert stats.preempted_requests == 1
    assert (stats.preempted_queries, stats.preempted_hits) == (9, 8)
    again = manager.make_prefix_cache_stats()
    assert again is not None and again.requests == 0


def test_statistics_may_be_off() -> None:
    manager = make_manager(log_stats=False)
    allocate(manager, make_request("a", list(range(9))))
    assert manager.make_prefix_cache_stats() is None


def test_reset_marks_the_statistics() -> None:
    manager = make_manager()
    request = make_request("a", list(range(9)))
    allocate(manager, request)
    assert not manager.reset_prefix_cache()
    manager.free(request)
    assert manager.reset_prefix_cache()
    stats = manager.make_prefix_cache_stats()
    assert stats is not None and stats.reset
    assert manager.estimate_cached_tokens(make_request("b", list(range(9)))) == 0


def test_without_caching_nothing_is_hashed_or_hit() -> None:
    manager = make_manager(full(), mamba("none", 256), enable_caching=False)
    request = make_request("a", list(range(9)))
    assert allocate(manager, request) == 0
    assert len(manager.block_pool.cached_block_hash_to_block) == 0
    assert manager.get_computed_blocks(make_request("b", list(range(9))))[1] == 0
    manager.free(request)
    manager.free(request)
    assert len(free_ids(manager)) == 10


def test_models_without_a_cache_are_served() -> None:
    manager = KVCacheManager(make_kv_cache_config(1), 256, 4, 4)
    request = make_request("a", list(range(9)))
    assert manager.allocate_slots(request, 9) == KVCacheBlocks(())
    assert manager.get_block_ids("a") == ()
    manager.free(request)


@pytest.mark.parametrize(
    "specs",
    [(full(),), (full(), window(6)), (full(8), chunked(8)), (full(), mamba("align"))],
)
def test_popped_blocks_are_freed_by_the_caller(specs: tuple[KVCacheSpec, ...]) -> None:
    manager = make_manager(*specs, num_blocks=40)
    request = make_request("a", list(range(20)))
    allocate(manager, request)
    blocks = manager.pop_blocks_for_free(request)
    assert len(free_ids(manager)) < 39
    assert manager.get_block_ids("a") == tuple([] for _ in specs)
    manager.block_pool.free_blocks(blocks)
    assert len(free_ids(manager)) == 39


def test_blocks_by_group() -> None:
    manager = make_manager(full(), full(8))
    request = make_request("a", list(range(9)))
    manager.allocate_slots(request, 9)
    blocks = manager.get_blocks("a")
    assert blocks.get_block_ids() == ([1, 2, 3], [4, 5])
    assert (blocks + blocks).get_block_ids() == ([1, 2, 3, 1, 2, 3], [4, 5, 4, 5])
    assert blocks.new_empty().get_block_ids() == ([], [])
    assert blocks.new_empty().get_block_ids(allow_none=True) is None
    with pytest.raises(ValueError, match="one KV cache group"):
        blocks.get_unhashed_block_ids()
    single = make_manager()
    single.allocate_slots(request, 9)
    assert single.get_blocks("a").get_unhashed_block_ids() == [3]


def test_hits_are_cut_where_blocks_of_all_groups_end() -> None:
    manager = make_manager(full(), full(8), num_blocks=40)
    request = make_request("a", list(range(20)))
    manager.allocate_slots(request, 20)
    blocks = manager.get_blocks("a")
    assert manager.truncate_computed_blocks(blocks, 8).get_block_ids() == ([1, 2], [6])
    assert not any(manager.truncate_computed_blocks(blocks, 0).blocks)
    with pytest.raises(ValueError, match=r"after 12 tokens: blocks of group 1 hold 8"):
        manager.truncate_computed_blocks(blocks, 12)


@pytest.mark.parametrize("mode", ["none", "all", "align"])
def test_steps_within_held_blocks_take_nothing_even_from_an_empty_pool(
    mode: str,
) -> None:
    specs = (full(), window(6), chunked(8), mamba(mode))
    manager = make_manager(*specs, num_blocks=40)
    request = make_request("a", list(range(5)), max_tokens=20)
    manager.allocate_slots(request, 5)
    request.num_computed_tokens = 5
    request.status = RequestStatus.RUNNING
    taken = manager.block_pool.get_new_blocks(manager.block_pool.get_num_free_blocks())
    for token in range(3):  # 8 tokens fill two blocks
        request.append_output_token_ids(token)
        blocks = manager.allocate_slots(request, 1)
        assert blocks is not None and not any(blocks.blocks)
        request.num_computed_tokens += 1
    request.append_output_token_ids(9)
    assert manager.allocate_slots(request, 1) is None
    manager.block_pool.free_blocks(taken)
    assert manager.allocate_slots(request, 1) is not None


@pytest.mark.parametrize(
    ("sizes", "given", "unit", "expected"),
    [
        ([], None, None, (16, 16)),
        ([16], None, 4, (16, 16)),
        ([16], 4, None, (16, 4)),
        ([16, 24], None, None, (48, 8)),
        ([16, 24], None, 4, (48, 4)),
    ],
)
def test_block_sizes(
    sizes: list[int],
    given: int | None,
    unit: int | None,
    expected: tuple[int, int],
) -> None:
    config = make_vllm_config()
    config.cache_config.prefix_match_unit = unit
    groups = make_kv_cache_config(9, *(full(size) for size in sizes))
    assert resolve_block_sizes(config, groups, 16, given) == expected


def test_hash_sizes_that_do_not_divide_are_refused() -> None:
    groups = make_kv_cache_config(9, full(16), full(8))
    with pytest.raises(ValueError, match="12"):
        resolve_block_sizes(make_vllm_config(), groups, 16, 12)
