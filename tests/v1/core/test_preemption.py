"""Under any pressure requests give the tokens they give alone; no block leaks."""

import random

import pytest

from tests.v1.core.utils import (
    Engine,
    assert_nothing_leaked,
    chunked,
    full,
    make_engine,
    make_request,
    mamba,
    num_free,
    num_usable,
    reference_tokens,
    window,
)
from vllm.v1.engine import FinishReason
from vllm.v1.request import Request, RequestStatus

MODELS = {
    "full": [full()],
    "window": [window(6)],
    "chunked": [chunked(8)],
    "window of one": [window(1)],
    "full and window": [full(), window(10)],
    "unlike block sizes": [full(4), window(7, 8), full(8), full(2)],
    "full and chunked": [full(8), chunked(12, 4)],
    "two windows": [window(5), window(11, 2), full()],
    "align": [full(4), mamba("align", 8)],
    "align alone": [mamba("align", 4)],
    "all": [full(4), mamba("all", 4), window(6)],
    "none": [full(4), mamba("none", 256)],
}


def random_requests(
    rng: random.Random, count: int, max_prompt: int = 60, hash_block_size: int = 4
) -> list[Request]:
    """Requests that often share prefixes, some under a salt of their own."""
    stems = [[rng.randrange(1, 50) for _ in range(max_prompt)] for _ in range(3)]
    requests = []
    for i in range(count):
        stem = rng.choice(stems)[: rng.randrange(0, max_prompt - 1)]
        tail = [rng.randrange(1, 50) for _ in range(rng.randrange(1, 8))]
        requests.append(
            make_request(
                f"r{i}",
                (stem + tail)[:max_prompt],
                hash_block_size=hash_block_size,
                priority=rng.randrange(3),
                cache_salt=rng.choice([None, None, "a", "b"]),
                arrival_time=float(i),
                max_tokens=rng.randrange(1, 24),
                ignore_eos=rng.random() < 0.3,
                prompt_logprobs=rng.choice([None, None, None, 1]),
            )
        )
    return requests


def run_all(
    engine: Engine,
    requests: list[Request],
    rng: random.Random,
    abort_share: float = 0.0,
) -> set[str]:
    """Feeds requests a few at a time and aborts some; returns the aborted ids."""
    aborted: set[str] = set()
    pending = list(requests)
    while pending:
        for request in pending[: rng.randrange(0, 4)]:
            engine.add(request)
            pending.remove(request)
        engine.step()
        for request in requests:
            is_known = request.request_id in engine.scheduler.requests
            if is_known and rng.random() < abort_share:
                ended = engine.scheduler.finish_requests(
                    request.request_id, RequestStatus.FINISHED_ABORTED
                )
                aborted.update(r.request_id for r in ended)
    engine.run()
    return aborted


def check_tokens(engine: Engine, requests: list[Request], aborted: set[str]) -> None:
    limit = engine.scheduler.max_model_len
    for request in requests:
        expected = reference_tokens(request, limit, engine.worker.eos_share)
        got = engine.tokens.get(request.request_id, [])
        if request.request_id in aborted:
            assert got == expected[: len(got)]
        else:
            assert got == expected, request.request_id
            assert engine.finish_reasons[request.request_id] in (
                FinishReason.STOP,
                FinishReason.LENGTH,
            )


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("model", MODELS)
def test_tokens_under_pressure_equal_tokens_alone(
    model: str, policy: str, depth: int
) -> None:
    specs = MODELS[model]
    for seed in range(2):
        rng = random.Random(f"{model}{policy}{depth}{seed}")
        engine = make_engine(
            *specs,
            depth=depth,
            eos_share=25,
            num_blocks=1 + len(specs) * rng.randrange(25, 50),
            policy=policy,
            max_model_len=70,
            max_num_batched_tokens=rng.choice([16, 24, 64]),
            max_num_seqs=rng.choice([3, 8]),
            long_prefill_token_threshold=rng.choice([0, 7]),
            scheduler_reserve_full_isl=rng.random() < 0.5,
            watermark=rng.choice([0.0, 0.1]),
        )
        requests = random_requests(
            rng, 25, hash_block_size=engine.scheduler.hash_block_size
        )
        aborted = run_all(engine, requests, rng, abort_share=0.01)
        check_tokens(engine, requests, aborted)
        assert_nothing_leaked(engine.scheduler)


def test_two_requests_that_do_not_fit_together_both_finish() -> None:
    # 7 usable blocks of 16 tokens; 34 + 35 prompt tokens grow beyond them.
    engine = make_engine(full(16), num_blocks=8, scheduler_reserve_full_isl=False)
    requests = [
        make_request(
            str(i), list(range(1 + i, 35 + 2 * i)), 16, max_tokens=40, ignore_eos=True
        )
        for i in range(2)
    ]
    for request in requests:
        engine.add(request)
    engine.run()
    assert sum(request.num_preemptions for request in requests) > 0
    check_tokens(engine, requests, set())
    assert_nothing_leaked(engine.scheduler)


def test_preempted_requests_hit_what_they_left_in_the_cache() -> None:
    engine = make_engine(full(), num_blocks=13, scheduler_reserve_full_isl=False)
    first = make_request("a", list(range(1, 17)), max_tokens=24)
    second = make_request("b", list(range(20, 36)), max_tokens=24)
    engine.add(first)
    engine.add(second)
    engine.run()
    assert second.num_preemptions > 0
    assert engine.lookups.preempted_requests == second.num_preemptions
    assert engine.lookups.preempted_hits > 0
    # The last token of each is sampled, never computed.
    wasted = engine.worker.num_computed - (first.num_tokens + second.num_tokens - 2)
    assert (
        wasted == engine.lookups.preempted_queries - engine.lookups.preempted_hits - 1
    )
    check_tokens(engine, [first, second], set())


def test_preempted_requests_keep_their_order() -> None:
    engine = make_engine(full(), num_blocks=17, scheduler_reserve_full_isl=False)
    requests = [
        make_request(str(i), [i + 1] * 12, max_tokens=30, ignore_eos=True)
        for i in range(4)
    ]
    for request in requests:
        engine.add(request)
    scheduler = engine.scheduler
    while scheduler.has_unfinished_requests():
        engine.step()
        order = [int(r.request_id) for r in [*scheduler.running, *scheduler.waiting]]
        assert order == sorted(order)
    assert sum(r.num_preemptions for r in requests) > 0


def test_priority_decides_who_is_preempted() -> None:
    engine = make_engine(
        full(), num_blocks=13, policy="priority", scheduler_reserve_full_isl=False
    )
    low = make_request("low", [1] * 16, priority=5, arrival_time=0.0, max_tokens=24)
    high = make_request("high", [2] * 16, priority=1, arrival_time=1.0, max_tokens=24)
    engine.add(low)
    engine.step()
    engine.add(high)
    engine.run()
    assert high.num_preemptions == 0
    assert low.num_preemptions > 0
    check_tokens(engine, [low, high], set())


def test_exact_free_blocks_after_two_thousand_requests() -> None:
    rng = random.Random(7)
    engine = make_engine(
        full(), window(9), num_blocks=90, eos_share=12, max_model_len=64
    )
    for _ in range(20):
        requests = random_requests(rng, 100, max_prompt=30)
        for i, request in enumerate(requests):
            request.request_id = f"{engine.num_steps}-{i}"
        run_all(engine, requests, rng, abort_share=0.002)
        assert num_free(engine.scheduler) == num_usable(engine.scheduler)
    assert_nothing_leaked(engine.scheduler)


@pytest.mark.parametrize("depth", [1, 2])
def test_reset_of_running_requests_loses_no_token(depth: int) -> None:
    engine = make_engine(full(), depth=depth, num_blocks=60)
    requests = random_requests(random.Random(3), 8, max_prompt=30)
    for request in requests:
        engine.add(request)
    for _ in range(6):
        engine.step()
        assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        assert num_free(engine.scheduler) == num_usable(engine.scheduler)
    engine.run()
    check_tokens(engine, requests, set())
    assert_nothing_leaked(engine.scheduler)


def test_request_that_outgrows_the_whole_pool_is_cut_not_stuck() -> None:
    engine = make_engine(full(), num_blocks=6)
    engine.add(make_request("a", [1] * 10, max_tokens=100, ignore_eos=True))
    engine.run(max_steps=200)
    assert engine.finish_reasons["a"] == FinishReason.LENGTH
    assert len(engine.tokens["a"]) == 11  # 20 slots, and a last token without one
    assert_nothing_leaked(engine.scheduler)


def test_prompt_larger_than_the_whole_pool_is_an_error_and_others_go_on() -> None:
    engine = make_engine(full(), num_blocks=6)
    engine.add(make_request("big", [1] * 40))
    small = make_request("small", [2] * 4)
    engine.add(small)
    engine.run(max_steps=100)
    assert engine.finish_reasons["big"] == FinishReason.ERROR
    check_tokens(engine, [small], set())
    assert_nothing_leaked(engine.scheduler)
