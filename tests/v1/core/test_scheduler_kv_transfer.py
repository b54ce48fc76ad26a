"""Requests whose KV comes from, or goes to, somewhere else: tokens and frees."""

import random
from typing import Any

import pytest

from tests.v1.core.test_preemption import check_tokens, random_requests, run_all
from tests.v1.core.utils import (
    POISON,
    Engine,
    SimulatedWorker,
    assert_nothing_leaked,
    full,
    make_request,
    make_scheduler,
    mamba,
    num_free,
    num_usable,
    states_of,
    window,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import FinishReason
from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus


class FakeConnector:
    """Claims to hold any prefix up to a share of the prompt, in chunks of `chunk`.

    Its scheduler side hands load orders to the worker side below; both share the
    object.
    """

    def __init__(
        self,
        rng: random.Random,
        *,
        asynchronous: bool = False,
        chunk: int = 6,
        fail_share: float = 0.0,
        send_share: float = 0.0,
        later_share: float = 0.0,
        delay: int = 3,
    ) -> None:
        self.rng = rng
        self.asynchronous = asynchronous
        self.chunk = chunk
        self.fail_share = fail_share
        self.send_share = send_share
        self.later_share = later_share
        self.delay = delay
        self.orders: list[tuple[Request, tuple[list[int], ...], int, int]] = []
        self.sends: list[tuple[str, tuple[list[int], ...]]] = []
        self.num_loads: dict[str, int] = {}
        # Under way: [steps left, request, blocks, start, count] and
        # [steps left, id, block ids, slots as sent].
        self.loads: list[list[Any]] = []
        self.sending: list[list[Any]] = []

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self.rng.random() < self.later_share:
            return None, False
        held = request.num_tokens // self.chunk * self.chunk
        num_tokens = max(held - num_computed_tokens, 0)
        return num_tokens, self.asynchronous and num_tokens > 0

    def update_state_after_alloc(
        self, request: Request, blocks: Any, num_external_tokens: int
    ) -> None:
        if num_external_tokens:
            req_id = request.request_id
            self.num_loads[req_id] = self.num_loads.get(req_id, 0) + 1
            self.orders.append(
                (request, blocks.get_block_ids(), num_external_tokens, -1)
            )

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        orders, self.orders = self.orders, []
        return orders

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        # An aborted request may not be loaded yet: there is nothing to send.
        is_whole = request.status != RequestStatus.FINISHED_ABORTED
        if self.rng.random() >= self.send_share or not is_whole:
            return False, None
        self.sends.append((request.request_id, block_ids))
        return True, {"remote": request.request_id}

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        return

    def take_events(self) -> list[Any]:
        return []

    def reset_cache(self) -> bool:
        return True

    def has_pending_push_work(self) -> bool:
        return bool(self.sends or self.sending or self.loads)

    def shutdown(self) -> None:
        return


class ConnectedWorker(SimulatedWorker):
    """Fills slots as the connector orders: within the step, or some steps later."""

    def __init__(
        self, specs: list[KVCacheSpec], connector: FakeConnector, depth: int
    ) -> None:
        super().__init__(specs, eos_share=25)
        self.connector = connector
        self.depth = depth
        self.invalid: set[int] = set()
        self.num_failures = 0

    def load(self, step: SchedulerOutput) -> None:
        starts = {r.req_id: r.num_computed_tokens for r in step.scheduled_new_reqs}
        cached = step.scheduled_cached_reqs
        starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request, blocks, count, _ in step.kv_connector_metadata or ():
            if self.connector.asynchronous:
                end = request.num_computed_tokens
                steps = self.connector.rng.randrange(1, self.connector.delay + 1)
                self.connector.loads.append(
                    [steps, request, blocks, end - count, count]
                )
            else:
                end = starts[request.request_id]
                self._fill(request, blocks, end - count, count)

    def report(self) -> KVConnectorOutput:
        received = set()
        for load in self.connector.loads:
            load[0] -= 1
            if load[0] == 0:
                self._fill(*load[1:])
                received.add(load[1].request_id)
        self.connector.loads = [load for load in self.connector.loads if load[0] > 0]
        sent = self._send()
        invalid, self.invalid = self.invalid, set()
        return KVConnectorOutput(
            finished_recving=received, finished_sending=sent, invalid_block_ids=invalid
        )

    def _send(self) -> set[str]:
        for req_id, blocks in self.connector.sends:
            ids = {block_id for group in blocks for block_id in group}
            slots = {k: v for k, v in self.slots.items() if k[0] in ids and k[0]}
            self.connector.sending.append([self.connector.delay, req_id, ids, slots])
        self.connector.sends = []
        sent = set()
        for send in self.connector.sending:
            send[0] -= 1
            for key, value in send[3].items():
                assert self.slots.get(key) == value, "a block changed while being sent"
            if send[0] == 0:
                sent.add(send[1])
        self.connector.sending = [s for s in self.connector.sending if s[0] > 0]
        return sent

    def _fill(self, request: Request, blocks: Any, start: int, count: int) -> None:
        states = states_of(list(request.all_token_ids), request.cache_salt)
        fails = self.connector.rng.random() < self.connector.fail_share
        self.num_failures += fails
        for ids, spec in zip(blocks, self.specs, strict=True):
            size = spec.block_size
            if isinstance(spec, MambaSpec):
                end = start + count - 1
                block = 0 if spec.mamba_cache_mode == "none" else end // size
                self.slots[ids[block], 0] = states[end]
                continue
            for position in range(start, start + count):
                block_id = ids[position // size]
                if block_id == 0:
                    continue
                if fails and position >= start + count // 2:
                    self.slots[block_id, position % size] = POISON
                    self.num_poisoned_steps = self.depth
                    self.invalid.add(block_id)
                else:
                    self.slots[block_id, position % size] = states[position]


def make_connected(
    specs: list[KVCacheSpec], connector: FakeConnector, depth: int = 1, **config: Any
) -> Engine:
    scheduler = make_scheduler(
        *specs, connector=connector, asynchronous=depth > 1, **config
    )
    return Engine(scheduler, ConnectedWorker(specs, connector, depth), depth)


MODELS = {
    "full": [full()],
    "full and window": [full(), window(6)],
    "full and state": [full(4), mamba("align", 8)],
}


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_tokens_with_a_connector_equal_tokens_alone(
    model: str, asynchronous: bool, depth: int
) -> None:
    specs = MODELS[model]
    for seed in range(4):
        rng = random.Random(f"{model}{asynchronous}{seed}")
        connector = FakeConnector(
            rng,
            asynchronous=asynchronous,
            chunk=rng.choice([1, 4, 6, 16]),
            send_share=rng.choice([0.0, 0.3]),
            later_share=0.2,
        )
        engine = make_connected(
            specs,
            connector,
            depth=depth,
            num_blocks=1 + len(specs) * rng.randrange(25, 40),
            max_model_len=70,
            max_num_batched_tokens=rng.choice([16, 64]),
            max_num_seqs=6,
            policy=rng.choice(["fcfs", "priority"]),
            scheduler_reserve_full_isl=rng.random() < 0.5,
        )
        requests = random_requests(rng, 25)
        aborted = run_all(engine, requests, rng, abort_share=0.01)
        check_tokens(engine, requests, aborted)
        assert_nothing_leaked(engine.scheduler)
        assert sum(connector.num_loads.values()) > 0


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("model", ["full", "full and window"])
def test_failed_loads_are_computed_again_once(
    model: str, asynchronous: bool, depth: int
) -> None:
    num_failures = 0
    for seed in range(4):
        rng = random.Random(f"{model}{asynchronous}{seed}")
        connector = FakeConnector(rng, asynchronous=asynchronous, fail_share=0.4)
        engine = make_connected(
            MODELS[model],
            connector,
            depth=depth,
            num_blocks=1 + len(MODELS[model]) * 40,
            max_model_len=70,
            max_num_seqs=6,
        )
        requests = random_requests(rng, 20)
        run_all(engine, requests, rng)
        num_failures += engine.worker.num_failures
        check_tokens(engine, requests, set())
        assert_nothing_leaked(engine.scheduler)
    assert num_failures > 0


@pytest.mark.parametrize("asynchronous", [False, True])
def test_failed_loads_end_requests_under_policy_fail(asynchronous: bool) -> None:
    rng = random.Random(1)
    connector = FakeConnector(rng, asynchronous=asynchronous, fail_share=1.0)
    engine = make_connected([full()], connector, load_failure_policy="fail")
    bad = make_request("bad", [1] * 13)
    engine.add(bad)
    engine.run(max_steps=100)
    assert engine.finish_reasons["bad"] == FinishReason.ERROR
    assert engine.tokens["bad"] == []
    assert_nothing_leaked(engine.scheduler)
    # Nothing of it is hit by the next one.
    connector.fail_share = 0.0
    good = make_request("good", [1] * 13)
    engine.add(good)
    engine.run(max_steps=100)
    check_tokens(engine, [good], set())


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_load_that_failed_as_a_whole_is_over_too(policy: str) -> None:
    """Its worker names no block: none of them may be relied on."""
    connector = FakeConnector(random.Random(1), asynchronous=True, delay=2)
    engine = make_connected([full()], connector, load_failure_policy=policy)
    worker, report = engine.worker, engine.worker.report

    def failing() -> KVConnectorOutput:
        news = report()
        news.failed_recving, news.finished_recving = news.finished_recving, None
        return news

    worker.report = failing
    requests = [make_request(str(i), [i + 1] * 20) for i in range(3)]
    for request in requests:
        engine.add(request)
    engine.run(max_steps=200)
    assert_nothing_leaked(engine.scheduler)
    assert connector.num_loads == {"0": 1, "1": 1, "2": 1}
    if policy == "recompute":
        check_tokens(engine, requests, set())
    else:
        assert set(engine.finish_reasons.values()) == {FinishReason.ERROR}
        assert not any(engine.tokens.values())


def test_loads_that_fill_the_pool_do_not_lock_it() -> None:
    # Each prompt takes 5 of 8 usable blocks to load and 6 to run.
    connector = FakeConnector(random.Random(0), asynchronous=True, chunk=4)
    engine = make_connected(
        [full()], connector, num_blocks=9, scheduler_reserve_full_isl=False
    )
    requests = [
        make_request(str(i), [i + 1] * 12, max_tokens=12, ignore_eos=True)
        for i in range(3)
    ]
    for request in requests:
        engine.add(request)
    engine.run(max_steps=500)
    check_tokens(engine, requests, set())
    assert_nothing_leaked(engine.scheduler)


def test_running_requests_take_blocks_from_those_that_wait_with_loaded_ones() -> None:
    connector = FakeConnector(random.Random(0), asynchronous=True, chunk=4, delay=1)
    engine = make_connected(
        [full()],
        connector,
        num_blocks=13,
        max_num_seqs=1,
        scheduler_reserve_full_isl=False,
    )
    # One runs at a time; 15 + 34 tokens fill all 12 blocks but for the last token.
    running = make_request("a", [1] * 15, max_tokens=34, ignore_eos=True)
    waiting = make_request("b", [2] * 24, max_tokens=1)
    engine.add(running)
    engine.add(waiting)
    engine.run(max_steps=200)
    assert running.num_preemptions == 0
    assert connector.num_loads == {"a": 1, "b": 2}
    check_tokens(engine, [running, waiting], set())
    assert_nothing_leaked(engine.scheduler)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_connectors_that_always_fail_are_asked_once_a_request(
    asynchronous: bool,
) -> None:
    connector = FakeConnector(
        random.Random(0), asynchronous=asynchronous, fail_share=1.0
    )
    engine = make_connected([full()], connector)
    requests = [make_request(str(i), [i + 1] * 20) for i in range(3)]
    for request in requests:
        engine.add(request)
    engine.run(max_steps=100)
    check_tokens(engine, requests, set())
    assert connector.num_loads == {"0": 1, "1": 1, "2": 1}


def test_abort_while_loading_frees_blocks_only_when_the_load_is_over() -> None:
    connector = FakeConnector(random.Random(0), asynchronous=True, delay=1)
    engine = make_connected([full()], connector)
    engine.add(make_request("a", [1] * 20))
    scheduler = engine.scheduler
    step = scheduler.schedule()
    held = num_usable(scheduler) - num_free(scheduler)
    assert held > 0
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert num_usable(scheduler) - num_free(scheduler) == held
    assert scheduler.get_num_unfinished_requests() == 0
    scheduler.update_from_output(step, engine.worker.execute(step))
    assert_nothing_leaked(scheduler)


def test_sent_blocks_stay_until_they_are_sent() -> None:
    connector = FakeConnector(random.Random(0), send_share=1.0, delay=5, chunk=1000)
    engine = make_connected([full()], connector, num_blocks=12)
    requests = [
        make_request(str(i), [i + 1] * 10, max_tokens=6, ignore_eos=True)
        for i in range(6)
    ]
    for request in requests:
        engine.add(request)
    engine.run(max_steps=300)
    check_tokens(engine, requests, set())
    assert_nothing_leaked(engine.scheduler)


def test_load_ends_on_the_last_token_when_it_is_outside_of_a_step() -> None:
    connector = FakeConnector(random.Random(0), asynchronous=True, chunk=4)
    engine = make_connected([full()], connector)
    request = make_request("a", list(range(1, 17)), max_tokens=4)
    engine.add(request)
    engine.run(max_steps=100)
    check_tokens(engine, [request], set())
    assert request.num_external_computed_tokens == 16
    # The last prompt token once more, then one token a step.
    assert engine.worker.num_computed == len(engine.tokens["a"])


def test_prompt_logprobs_are_never_loaded() -> None:
    connector = FakeConnector(random.Random(0), chunk=4)
    engine = make_connected([full()], connector)
    request = make_request("a", [1] * 17, prompt_logprobs=1)
    engine.add(request)
    engine.run(max_steps=100)
    assert connector.num_loads == {}
    assert engine.worker.num_computed == request.num_tokens - 1
