"""Managers of one group: which blocks a request needs, gives back and can hit."""

from typing import Any

import pytest
import torch

from tests.v1.core.utils import (
    HEADS,
    chunked,
    full,
    make_kv_cache_config,
    make_request,
    mamba,
    window,
)
from vllm.v1.core.block_hash import (
    BlockHash,
    KVCacheBlock,
    KVCacheInvariantError,
    make_block_hash_with_group_id,
)
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_coordinator import get_kv_cache_coordinator
from vllm.v1.core.single_type_kv_cache_manager import (
    ChunkedLocalAttentionManager,
    CrossAttentionManager,
    FullAttentionManager,
    MambaManager,
    RSWAManager,
    SingleTypeKVCacheManager,
    SinkFullAttentionManager,
    SlidingWindowManager,
    get_manager_for_kv_cache_spec,
    register_all_kvcache_specs,
)
from vllm.v1.kv_cache_interface import (
    CrossAttentionSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
)
from vllm.v1.kv_cache_spec_registry import register_kv_cache_spec

HASHES = [BlockHash(str(i).encode()) for i in range(40)]


def make_manager(
    spec: KVCacheSpec, num_blocks: int = 100, **kwargs: Any
) -> SingleTypeKVCacheManager:
    return get_manager_for_kv_cache_spec(
        spec,
        max_in_flight_tokens=64,
        max_model_len=256,
        **{
            "block_pool": BlockPool(num_blocks, True, spec.block_size),
            "enable_caching": True,
            "kv_cache_group_id": 0,
            "scheduler_block_size": spec.block_size,
            **kwargs,
        },
    )


def cache_at(manager: SingleTypeKVCacheManager, indices: list[int]) -> None:
    """Makes blocks 50 + i hold the content of block i of HASHES."""
    for index in indices:
        key = make_block_hash_with_group_id(HASHES[index], 0)
        block = manager.block_pool.blocks[50 + index]
        manager.block_pool.cached_block_hash_to_block.insert(key, block)


def find(
    manager: SingleTypeKVCacheManager, max_length: int, alignment: int | None = None
) -> list[int]:
    """Indices of the hit's blocks; -1 for a null block."""
    size = manager.block_size
    (blocks,), length = manager.find_longest_cache_hit(
        block_hashes=HASHES[: max_length // size],
        max_length=max_length,
        kv_cache_group_ids=[0],
        block_pool=manager.block_pool,
        kv_cache_spec=manager.kv_cache_spec,
        drop_eagle_block=False,
        alignment_tokens=alignment or size,
    )
    assert length == len(blocks) * size
    return [-1 if block.is_null else block.block_id - 50 for block in blocks]


@pytest.mark.parametrize(
    ("spec", "manager_class"),
    [
        (full(), FullAttentionManager),
        (MLAAttentionSpec(block_size=4, **HEADS), FullAttentionManager),
        (RSWASpec(block_size=4, rswa_window=8, **HEADS), RSWAManager),
        (
            SinkFullAttentionSpec(block_size=4, sink_len=8, **HEADS),
            SinkFullAttentionManager,
        ),
        (window(8), SlidingWindowManager),
        (
            SlidingWindowMLASpec(block_size=4, sliding_window=8, **HEADS),
            SlidingWindowManager,
        ),
        (chunked(8), ChunkedLocalAttentionManager),
        (mamba("none"), MambaManager),
        (CrossAttentionSpec(block_size=4, **HEADS), CrossAttentionManager),
    ],
)
def test_every_spec_has_its_manager(spec: KVCacheSpec, manager_class: type) -> None:
    register_all_kvcache_specs(None)
    assert type(make_manager(spec)) is manager_class


def test_unknown_spec_is_refused_and_registered_ones_are_served() -> None:
    class Unknown(KVCacheSpec):
        pass

    with pytest.raises(ValueError, match="Unknown"):
        make_manager(Unknown(4))
    register_kv_cache_spec(manager_class=FullAttentionManager)(Unknown)
    assert type(make_manager(Unknown(4))) is FullAttentionManager


# --- hits ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cached", "alignment", "expected"),
    [
        ([], 2, []),
        ([0, 1, 3], 2, [0, 1]),
        ([1, 2], 2, []),
        ([0, 1, 2], 4, [0, 1]),
        ([0, 1, 2, 3, 4], 8, [0, 1, 2, 3]),
    ],
)
def test_full_attention_hits_from_the_left(
    cached: list[int], alignment: int, expected: list[int]
) -> None:
    manager = make_manager(full(2))
    cache_at(manager, cached)
    assert find(manager, 20, alignment) == expected


@pytest.mark.parametrize(
    ("cached", "num_blocks", "expected"),
    [
        ([], 10, []),
        ([0], 1, [0]),
        ([0], 2, [0]),
        ([0, 1], 3, [0, 1]),
        ([0, 1, 2], 3, [-1, 1, 2]),
        ([1], 3, []),
        ([1, 2], 3, [-1, 1, 2]),
        ([0, 1, 3, 6, 7, 9, 10, 11], 12, [-1] * 10 + [10, 11]),
        ([0, 1, 3, 6, 7], 11, [-1] * 6 + [6, 7]),
        ([0, 1, 3, 6, 7, 11], 12, [-1] * 6 + [6, 7]),
        ([0, 2, 4, 6], 8, [0]),
    ],
)
def test_window_hits_end_with_a_whole_window(
    cached: list[int], num_blocks: int, expected: list[int]
) -> None:
    # A window of 4 tokens reads 3 back: two blocks of 2.
    manager = make_manager(window(4, 2))
    cache_at(manager, cached)
    assert find(manager, num_blocks * 2) == expected


def test_window_hits_end_at_aligned_positions() -> None:
    manager = make_manager(window(4, 2))
    cache_at(manager, [2, 3, 4, 7, 8])
    assert find(manager, 18, alignment=2) == [-1] * 7 + [7, 8]
    assert find(manager, 18, alignment=4) == [-1, -1, 2, 3]
    assert find(manager, 18, alignment=12) == []


@pytest.mark.parametrize(
    ("cached", "max_length", "expected"),
    [
        ([0], 2, [0]),
        ([0], 4, [-1, -1]),  # at 4 a new chunk starts: nothing before is read
        ([], 4, [-1, -1]),
        ([0, 1, 2], 6, [-1, -1, 2]),
        ([0, 1], 6, [-1, -1]),
        ([], 17, [-1] * 8),
        ([8], 19, [-1] * 8 + [8]),
        ([9], 21, [-1] * 10),
        ([9], 20, [-1] * 10),
        ([], 3, []),
    ],
)
def test_chunk_hits_need_blocks_of_the_last_chunk_only(
    cached: list[int], max_length: int, expected: list[int]
) -> None:
    manager = make_manager(chunked(4, 2))
    cache_at(manager, cached)
    assert find(manager, max_length) == expected


def test_chunk_hits_moved_by_alignment_have_the_blocks_they_need() -> None:
    # Aligned to 6 tokens, a hit within 16 ends at 12, within the chunk 8..15.
    manager = make_manager(chunked(8, 2))
    assert find(manager, 16, alignment=6) == []
    cache_at(manager, [4, 5])
    assert find(manager, 16, alignment=6) == [-1] * 4 + [4, 5]
    cache_at(manager, [0, 1, 2])
    assert find(manager, 10, alignment=6) == [0, 1, 2]


@pytest.mark.parametrize("mode", ["all", "align"])
def test_state_hits_are_the_last_state_alone(mode: str) -> None:
    manager = make_manager(mamba(mode, 2))
    cache_at(manager, [1, 4, 6])
    assert find(manager, 20) == [-1] * 6 + [6]
    assert find(manager, 20, alignment=10) == [-1] * 4 + [4]
    assert find(manager, 9) == [-1, 1]
    assert find(manager, 3) == []


def test_hits_drop_the_last_block_for_draft_models() -> None:
    for spec, cached in ((full(2), [0, 1, 2]), (window(4, 2), [4, 5, 6])):
        manager = make_manager(spec)
        cache_at(manager, cached)
        (blocks,), length = manager.find_longest_cache_hit(
            HASHES[:7], 14, [0], manager.block_pool, spec, True, 2
        )
        assert length == (len(cached) - 1 if cached[0] == 0 else 6) * 2
        assert [b.block_id - 50 for b in blocks if not b.is_null] == cached[:-1]


# --- giving back ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        # blocks of 2 given back once so many tokens are computed
        (full(2), {20: 0}),
        (window(4, 2), {0: 0, 4: 0, 5: 1, 6: 1, 7: 2, 11: 4}),
        (window(1, 2), {1: 0, 2: 1, 3: 1, 4: 2}),
        (chunked(4, 2), {3: 0, 4: 2, 7: 2, 8: 4}),
        (mamba("all", 2), {1: 0, 2: 0, 3: 1, 5: 2}),
        (mamba("none", 2), {20: 0}),
    ],
)
def test_blocks_behind_the_window_are_given_back(
    spec: KVCacheSpec, expected: dict[int, int]
) -> None:
    manager = make_manager(spec)
    manager.add_local_computed_blocks("r", [], 0, 0)
    blocks = manager.req_to_blocks["r"]
    blocks.extend(manager.block_pool.get_new_blocks(10))
    before = manager.block_pool.get_num_free_blocks()
    for num_computed, num_given_back in expected.items():
        manager.remove_skipped_blocks("r", num_computed)
        assert [b.is_null for b in blocks].count(True) == num_given_back
        assert all(b.is_null for b in blocks[:num_given_back])
        assert manager.block_pool.get_num_free_blocks() == before + num_given_back
    manager.free("r")
    assert manager.block_pool.get_num_free_blocks() == 99
    manager.remove_skipped_blocks("r", 100)
    assert not manager.req_to_blocks


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (full(), False),
        (window(4), True),
        (chunked(8), True),
        (mamba("align"), True),
        (RSWASpec(block_size=4, rswa_window=4, **HEADS), True),
        (CrossAttentionSpec(block_size=4, **HEADS), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_managers_that_keep_everything_are_not_asked_for_blocks(
    spec: KVCacheSpec, expected: bool
) -> None:
    assert make_manager(spec).gives_back_early == expected


def test_retained_prompt_window_gives_back_generated_tokens_only() -> None:
    manager = make_manager(RSWASpec(block_size=2, rswa_window=4, **HEADS))
    manager.allocate_new_blocks("r", 20, 20)
    manager.remove_skipped_blocks("r", 20)
    manager.remove_skipped_blocks("r", 20, num_prompt_tokens=5)
    nulls = [block.is_null for block in manager.req_to_blocks["r"]]
    assert nulls == [False] * 3 + [True] * 5 + [False] * 2


def test_retained_prompt_window_caches_prompts_only() -> None:
    manager = make_manager(RSWASpec(block_size=4, rswa_window=4, **HEADS))
    request = make_request("r", list(range(8)))
    request.append_output_token_ids(list(range(8)))
    manager.allocate_new_blocks("r", 16, 16)
    manager.cache_blocks(request, 16)
    assert len(manager.block_pool.cached_block_hash_to_block) == 2


def test_tail_is_freed_before_the_head() -> None:
    manager = make_manager(full())
    blocks = manager.allocate_new_blocks("r", 12, 12)
    assert manager.pop_blocks_for_free("r") == blocks[::-1]
    assert manager.pop_blocks_for_free("r") == []


def test_sinks_are_set_aside_once() -> None:
    pool = BlockPool(20, True, 4)
    spec = SinkFullAttentionSpec(block_size=4, sink_len=8, **HEADS)
    manager = make_manager(spec, block_pool=pool)
    assert [b.block_id for b in manager.sink_blocks] == [1, 2]
    assert pool.num_usable_blocks == 17
    with pytest.raises(ValueError, match="6"):
        make_manager(SinkFullAttentionSpec(block_size=4, sink_len=6, **HEADS))


def test_cross_attention_blocks_are_not_shared() -> None:
    manager = make_manager(CrossAttentionSpec(block_size=4, **HEADS))
    assert manager.counts_encoder_tokens
    with pytest.raises(ValueError, match="never shared"):
        manager.add_local_computed_blocks("r", [KVCacheBlock(1)], 4, 0)
    with pytest.raises(ValueError, match="not cached"):
        manager.cache_blocks(make_request("r", [1]), 1)
    with pytest.raises(NotImplementedError):
        find(manager, 8)


# --- counting ------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [full(2), window(8, 2), chunked(8, 2)])
def test_cached_blocks_that_nobody_holds_count_as_needed(spec: KVCacheSpec) -> None:
    manager = make_manager(spec)
    pool = manager.block_pool

    def needed(computed: list[KVCacheBlock]) -> int:
        return manager.get_num_blocks_to_allocate("r", 40, computed, 0, 0, 40)

    idle = pool.blocks[1:11]
    assert needed(idle) == 20
    assert needed([pool.null_block] * 5 + idle[:5]) == 15
    pool.touch(idle)
    assert needed(idle) == 10


@pytest.mark.parametrize(
    "spec", [full(4), window(7, 4), chunked(8, 4), mamba("align", 4), mamba("all", 4)]
)
@pytest.mark.parametrize("num_hit_blocks", [0, 1, 4, 7])
@pytest.mark.parametrize("num_external", [0, 5, 8])
def test_what_is_counted_is_what_is_taken(
    spec: KVCacheSpec, num_hit_blocks: int, num_external: int
) -> None:
    manager = make_manager(spec)
    pool = manager.block_pool
    cache_at(manager, list(range(num_hit_blocks)))
    hit = []
    if num_hit_blocks:
        (hit,), _ = manager.find_longest_cache_hit(
            HASHES, num_hit_blocks * 4, [0], pool, spec, False, 4
        )
    local = len(hit) * 4
    total = local + num_external
    for num_new in (1, 4, 30):
        before = pool.get_num_free_blocks()
        counted = manager.get_num_blocks_to_allocate(
            "r", total + num_new, hit, total, local, total + num_new
        )
        manager.add_local_computed_blocks("r", hit, local, num_external)
        manager.allocate_new_blocks("r", total + num_new, total + num_new)
        assert before - pool.get_num_free_blocks() == counted
        more = manager.get_num_blocks_to_allocate(
            "r", total + 2 * num_new, [], total, total, total + 2 * num_new
        )
        before = pool.get_num_free_blocks()
        manager.allocate_new_blocks("r", total + 2 * num_new, total + 2 * num_new)
        assert before - pool.get_num_free_blocks() == more
        manager.free("r")


def test_admission_cap_bounds_what_a_window_holds() -> None:
    spec = window(8, 4)
    manager = make_manager(spec)
    cap = spec.max_admission_blocks_per_request(64, 256)
    assert manager.max_admission_blocks_per_request == cap

    def needed(apply_admission_cap: bool) -> int:
        return manager.get_num_blocks_to_allocate(
            "r", 256, [], 0, 0, 256, apply_admission_cap
        )

    assert needed(False) == 64
    assert needed(True) == cap < 64


def test_cached_blocks_for_a_request_that_holds_some_are_refused() -> None:
    manager = make_manager(full())
    manager.add_local_computed_blocks("r", [], 0, 0)
    with pytest.raises(KVCacheInvariantError):
        manager.add_local_computed_blocks("r", [manager.block_pool.blocks[1]], 4, 0)


def test_new_blocks_are_reported_for_zeroing_where_it_matters() -> None:
    for spec, expected in ((full(), [1, 2]), (mamba("all"), [])):
        manager = make_manager(spec, needs_kv_cache_zeroing=True)
        manager.allocate_new_blocks("r", 8, 8)
        assert manager.take_new_block_ids() == expected
        assert manager.take_new_block_ids() == []
    manager = make_manager(full())
    manager.allocate_new_blocks("r", 8, 8)
    assert manager.take_new_block_ids() == []


# --- recurrent states ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "backed"),
    [("none", [[0], [0], [0]]), ("all", [[0], [0, 1, 2], [0, 1, 2, 3]])],
)
def test_states_of_a_request(mode: str, backed: list[list[int]]) -> None:
    manager = make_manager(mamba(mode, 4))
    for num_tokens, expected in zip((3, 12, 13), backed, strict=True):
        manager.allocate_new_blocks("r", num_tokens, num_tokens)
        blocks = manager.req_to_blocks["r"]
        assert [i for i, b in enumerate(blocks) if not b.is_null] == expected


def test_align_mode_backs_the_ends_of_steps() -> None:
    manager = make_manager(mamba("align", 4))
    manager.add_local_computed_blocks("r", [], 0, 0)
    backed = []
    for start, end in ((0, 12), (12, 20), (20, 21), (21, 24), (24, 25)):
        manager.remove_skipped_blocks("r", start)
        manager.allocate_new_blocks("r", end, end)
        blocks = manager.req_to_blocks["r"]
        assert len(blocks) == -(-end // 4)
        backed.append([i for i, b in enumerate(blocks) if not b.is_null])
    assert backed == [[2], [2, 4], [4, 5], [5], [5, 6]]


def test_states_are_hit_from_the_next_step_on() -> None:
    manager = make_manager(mamba("align", 4))
    request = make_request("r", list(range(8)))
    manager.add_local_computed_blocks("r", [], 0, 0)
    manager.allocate_new_blocks("r", 8, 8)
    manager.cache_blocks(request, 8)
    cached = manager.block_pool.cached_block_hash_to_block
    assert len(cached) == 0
    manager.new_step_starts()
    assert len(cached) == 1
    assert manager.block_pool.get_cached_block(request.block_hashes[1], [0])


def test_states_between_block_ends_are_not_cached() -> None:
    manager = make_manager(mamba("align", 4))
    request = make_request("r", list(range(16)))
    manager.add_local_computed_blocks("r", [], 0, 0)
    for end in (6, 10, 16):
        manager.allocate_new_blocks("r", end, end)
        manager.cache_blocks(request, end)
        manager.new_step_starts()
    pool = manager.block_pool
    found = [pool.get_cached_block(h, [0]) for h in request.block_hashes]
    assert [blocks is not None for blocks in found] == [False, False, False, True]


def test_states_of_a_request_that_ends_are_still_cached() -> None:
    manager = make_manager(mamba("align", 4))
    request = make_request("r", list(range(8)))
    manager.add_local_computed_blocks("r", [], 0, 0)
    manager.allocate_new_blocks("r", 8, 8)
    manager.cache_blocks(request, 8)
    manager.free("r")
    assert len(manager.block_pool.cached_block_hash_to_block) == 1
    manager.new_step_starts()
    assert manager.block_pool.get_num_free_blocks() == 99


def test_bad_state_modes_are_refused() -> None:
    with pytest.raises(ValueError, match="sometimes"):
        make_manager(mamba("sometimes"))


# --- several groups ------------------------------------------------------------------


def make_coordinator(*specs: KVCacheSpec, hash_block_size: int = 2) -> Any:
    return get_kv_cache_coordinator(
        kv_cache_config=make_kv_cache_config(100, *specs),
        enable_caching=True,
        max_model_len=256,
        max_in_flight_tokens=64,
        use_eagle=False,
        enable_kv_cache_events=False,
        dcp_world_size=1,
        pcp_world_size=1,
        scheduler_block_size=8,
        hash_block_size=hash_block_size,
    )


def cache_group(coordinator: Any, group: int, indices: list[int]) -> None:
    """Caches blocks of one group, by their index in its own block size."""
    size = coordinator.single_type_managers[group].block_size // 2
    pool = coordinator.block_pool
    for index in indices:
        name = HASHES[(index + 1) * size - 1]
        block = pool.blocks[1 + index + 30 * group]
        key = make_block_hash_with_group_id(name, group)
        pool.cached_block_hash_to_block.insert(key, block)


def test_a_hit_is_one_that_all_groups_can_serve() -> None:
    coordinator = make_coordinator(full(2), window(3, 2), full(4))
    cache_group(coordinator, 0, [0, 1, 2, 3, 4, 5])
    cache_group(coordinator, 1, [1, 3])
    cache_group(coordinator, 2, [0, 1, 2])
    blocks, length, beyond = coordinator.find_longest_cache_hit(HASHES, 30)
    assert length == 8
    assert beyond == 4
    assert [len(group) for group in blocks] == [4, 4, 2]
    assert [block.is_null for block in blocks[1]] == [True, True, True, False]
    per_group, lengths = coordinator.find_longest_cache_hit_per_group(HASHES, 30)
    assert lengths == (12, 8, 12)
    assert [len(group) for group in per_group] == [6, 4, 3]


def test_groups_that_shorten_each_other_settle_on_a_common_hit() -> None:
    # The windows agree at no length but 4: each has its own idea of a longer one.
    coordinator = make_coordinator(window(3, 2), window(5, 2))
    cache_group(coordinator, 0, [1, 4, 8])
    cache_group(coordinator, 1, [0, 1, 5, 6, 7])
    blocks, length, _ = coordinator.find_longest_cache_hit(HASHES, 20)
    assert length == 4
    assert [[b.block_id for b in group] for group in blocks] == [[0, 2], [31, 32]]


def test_tokens_beyond_the_hit_are_counted_whatever_the_order_of_groups() -> None:
    for first in (0, 1):
        specs = [full(2), window(3, 2)]
        coordinator = make_coordinator(specs[first], specs[1 - first])
        cache_group(coordinator, first, [0, 1, 2, 3, 4, 5])
        cache_group(coordinator, 1 - first, [1, 3])
        assert coordinator.find_longest_cache_hit(HASHES, 30)[1:] == (8, 4)


def test_no_common_hit_is_no_hit() -> None:
    coordinator = make_coordinator(full(2), full(4))
    cache_group(coordinator, 0, [0])
    cache_group(coordinator, 1, [0])
    blocks, length, _ = coordinator.find_longest_cache_hit(HASHES, 20)
    assert length == 0
    assert blocks == ([], [])


def test_equal_groups_hit_together() -> None:
    coordinator = make_coordinator(full(2), window(5, 2), full(2))
    for group in range(3):
        cache_group(coordinator, group, [0, 1, 2])
    coordinator.block_pool.cached_block_hash_to_block.pop(
        make_block_hash_with_group_id(HASHES[2], 2), 63
    )
    blocks, length, _ = coordinator.find_longest_cache_hit(HASHES, 20)
    assert length == 4
    assert [[b.block_id for b in group] for group in blocks] == [
        [1, 2],
        [31, 32],
        [61, 62],
    ]


def test_sizes_that_hashes_do_not_divide_are_refused() -> None:
    coordinator = make_coordinator(full(3), full(2))
    with pytest.raises(ValueError, match="multiple"):
        coordinator.find_longest_cache_hit(HASHES, 20)


def test_dtype_of_specs_does_not_matter_to_managers() -> None:
    other = full(4).__class__(
        block_size=4, num_kv_heads=8, head_size=64, dtype=torch.uint8
    )
    assert type(make_manager(other)) is FullAttentionManager
