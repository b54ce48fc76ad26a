"""Requests come, hit, grow, are preempted and end in any order: no block is lost,
shared by mistake or held twice."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.v1.core.utils import (
    chunked,
    full,
    make_kv_cache_config,
    make_request,
    mamba,
    window,
)
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.request import Request, RequestStatus

GROUPS: dict[str, tuple[KVCacheSpec, ...]] = {
    "full": (full(),),
    "window": (window(6),),
    "full, window, window": (full(8), window(6), window(10)),
    "full, chunks": (full(), chunked(8)),
    "full, states": (full(), mamba("align")),
    "states": (mamba("all"), mamba("none", 8)),
}
NUM_BLOCKS = 24
MAX_LEN = 64


class Pool(RuleBasedStateMachine):
    """What a scheduler does with the manager, in no sensible order."""

    specs: tuple[KVCacheSpec, ...] = ()
    caching = True

    def __init__(self) -> None:
        super().__init__()
        self.running: dict[str, Request] = {}
        self.waiting: list[Request] = []
        self.num_started = 0

    @initialize()
    def build(self) -> None:
        self.manager = KVCacheManager(
            make_kv_cache_config(NUM_BLOCKS, *self.specs),
            max_model_len=MAX_LEN,
            scheduler_block_size=8,
            hash_block_size=4,
            enable_caching=self.caching,
        )
        self.pool = self.manager.block_pool
        self.usable = self.pool.get_num_free_blocks()

    # --- what happens -----------------------------------------------------------------

    @rule(family=st.integers(0, 2), length=st.integers(1, 40))
    def arrive(self, family: int, length: int) -> None:
        """A request whose prompt shares a prefix with others of its family."""
        self.num_started += 1
        prompt = [100 * family + i for i in range(length)]
        self.waiting.append(make_request(str(self.num_started), prompt, max_tokens=99))

    @precondition(lambda self: self.waiting)
    @rule(chunk=st.integers(1, 40), whole=st.booleans(), data=st.data())
    def admit(self, chunk: int, whole: bool, data: Any) -> None:
        request = data.draw(st.sampled_from(self.waiting))
        self.manager.new_step_starts()
        hit, num_hit, _ = self.manager.get_computed_blocks(request)
        assert 0 <= num_hit < request.num_tokens
        before = self.pool.get_num_free_blocks()
        num_new = min(chunk, request.num_tokens - num_hit)
        blocks = self.manager.allocate_slots(
            request, num_new, num_hit, hit, full_sequence_must_fit=whole
        )
        if blocks is None:
            assert self.pool.get_num_free_blocks() == before
            return
        self.waiting.remove(request)
        self.running[request.request_id] = request
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = num_hit + num_new

    @precondition(lambda self: self.running)
    @rule(chunk=st.integers(1, 12), data=st.data())
    def step(self, chunk: int, data: Any) -> None:
        """Computes what is left of the prompt, in chunks, or one more token."""
        request = self.any_running(data)
        self.manager.new_step_starts()
        if request.num_computed_tokens == request.num_tokens:
            if request.num_tokens == MAX_LEN:
                return
            request.append_output_token_ids(data.draw(st.integers(0, 3)))
        num_new = min(chunk, request.num_tokens - request.num_computed_tokens)
        if self.manager.allocate_slots(request, num_new) is None:
            self.give_up(request)
        else:
            request.num_computed_tokens += num_new

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def preempt(self, data: Any) -> None:
        self.give_up(self.any_running(data))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), late=st.booleans())
    def finish(self, data: Any, late: bool) -> None:
        request = self.any_running(data)
        del self.running[request.request_id]
        if late:  # a transfer still reads the blocks
            blocks = self.manager.pop_blocks_for_free(request)
            self.pool.free_blocks(blocks)
        else:
            self.manager.free(request)

    @rule(block_ids=st.sets(st.integers(1, NUM_BLOCKS - 1), max_size=4))
    def evict(self, block_ids: set[int]) -> None:
        self.manager.evict_blocks(block_ids)

    @rule()
    def reset(self) -> None:
        holds_none = self.pool.get_num_free_blocks() == self.usable
        assert self.manager.reset_prefix_cache() == holds_none

    def any_running(self, data: Any) -> Request:
        return self.running[data.draw(st.sampled_from(sorted(self.running)))]

    def give_up(self, request: Request) -> None:
        self.manager.free(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.status = RequestStatus.PREEMPTED
        del self.running[request.request_id]
        self.waiting.append(request)

    # --- what holds at all times ------------------------------------------------------

    @invariant()
    def counts_are_those_of_the_holders(self) -> None:
        held: Counter[int] = Counter()
        group_of: dict[int, int] = {}
        for single in self.manager.coordinator.single_type_managers:
            assert single.req_to_blocks.keys() <= self.running.keys()
            for blocks in single.req_to_blocks.values():
                own = [b.block_id for b in blocks if not b.is_null]
                assert len(set(own)) == len(own), "twice in one request"
                held.update(own)
                for block_id in own:
                    group = group_of.setdefault(block_id, single.kv_cache_group_id)
                    assert group == single.kv_cache_group_id, "in two groups"
        assert {b.block_id: b.ref_cnt for b in self.pool.blocks if b.ref_cnt} == held
        assert self.pool.get_num_free_blocks() == self.usable - len(held)

    @invariant()
    def the_queue_holds_every_free_block_once(self) -> None:
        queued = self.pool.free_block_queue.get_all_free_blocks()
        ids = {block.block_id for block in queued}
        assert len(ids) == len(queued) == self.pool.get_num_free_blocks()
        assert ids == {b.block_id for b in self.pool.blocks[1:] if not b.ref_cnt}

    @invariant()
    def cached_blocks_are_found_under_their_hash(self) -> None:
        cached = self.pool.cached_block_hash_to_block
        for block in self.pool.blocks:
            if block.block_hash is not None:
                assert cached.get_one_block(block.block_hash) is not None

    @invariant()
    def requests_have_slots_for_what_they_computed(self) -> None:
        for request in self.running.values():
            for single in self.manager.coordinator.single_type_managers:
                assert single.has_slots(request.request_id, request.num_computed_tokens)

    def teardown(self) -> None:
        for request in self.running.values():
            self.manager.free(request)
        self.manager.new_step_starts()
        assert self.pool.get_num_free_blocks() == self.usable
        assert self.manager.reset_prefix_cache()
        for single in self.manager.coordinator.single_type_managers:
            assert not single.req_to_blocks and not single.num_cached_block


@pytest.mark.parametrize("caching", [True, False], ids=["caching", "no caching"])
@pytest.mark.parametrize("groups", GROUPS)
def test_the_pool_keeps_its_invariants(groups: str, caching: bool) -> None:
    machine = type("Machine", (Pool,), {"specs": GROUPS[groups], "caching": caching})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=40,
            stateful_step_count=30,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
