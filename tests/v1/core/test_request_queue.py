"""Queues give requests in the order of their policy, whatever was done before."""

import random
import time

import pytest

from tests.v1.core.utils import make_request, make_scheduler
from vllm.v1.core.sched.request_queue import (
    RequestQueue,
    SchedulingPolicy,
    create_request_queue,
)
from vllm.v1.request import Request, RequestStatus


def make(name: str, priority: int = 0, arrival: float = 0.0) -> Request:
    return make_request(name, [1], priority=priority, arrival_time=arrival)


def names(queue: RequestQueue) -> list[str]:
    return [request.request_id for request in queue]


def drain(queue: RequestQueue) -> list[str]:
    taken = []
    while queue:
        first = queue.peek_request()
        assert queue.pop_request() is first
        taken.append(first.request_id)
    return taken


def test_fcfs_keeps_the_order_of_arrival() -> None:
    queue = create_request_queue(SchedulingPolicy.FCFS)
    for name in "abc":
        queue.add_request(make(name, priority=-ord(name)))
    queue.prepend_request(make("z"))
    queue.prepend_requests([make("x"), make("y")])
    assert names(queue) == list("xyzabc")
    assert drain(queue) == list("xyzabc")


def test_priority_orders_by_number_then_arrival_then_id() -> None:
    queue = create_request_queue(SchedulingPolicy.PRIORITY)
    requests = [
        make("late", 1, 2.0),
        make("low", 5, 0.0),
        make("b", 1, 1.0),
        make("a", 1, 1.0),
        make("high", -3, 9.0),
    ]
    queue.add_request(requests[0])
    queue.prepend_request(requests[1])
    queue.prepend_requests(requests[2:])
    expected = ["high", "a", "b", "late", "low"]
    assert names(queue) == expected
    assert len(queue) == 5
    assert drain(queue) == expected


@pytest.mark.parametrize("policy", SchedulingPolicy)
def test_removal_leaves_the_others_in_order(policy: SchedulingPolicy) -> None:
    rng = random.Random(0)
    queue = create_request_queue(policy)
    requests = [make(f"{i:02}", rng.randrange(3), float(i)) for i in range(30)]
    for request in requests:
        queue.add_request(request)
    order = names(queue)
    gone = rng.sample(requests, 10)
    queue.remove_request(gone[0])
    queue.remove_requests([*gone[1:], make("stranger")])
    left = [name for name in order if name not in {r.request_id for r in gone}]
    assert names(queue) == left
    assert drain(queue) == left
    with pytest.raises(ValueError):
        queue.remove_request(gone[0])


@pytest.mark.parametrize("policy", SchedulingPolicy)
def test_empty_queues_say_so(policy: SchedulingPolicy) -> None:
    queue = create_request_queue(policy)
    assert not queue
    with pytest.raises(IndexError):
        queue.peek_request()
    with pytest.raises(IndexError):
        queue.pop_request()


@pytest.mark.parametrize("policy", SchedulingPolicy)
def test_any_order_of_calls_keeps_the_order_of_requests(
    policy: SchedulingPolicy,
) -> None:
    """Against a plain list; requests also come back after they were removed."""
    rng = random.Random(1)
    queue, known = create_request_queue(policy), list[Request]()
    away = [make(f"{i:02}", rng.randrange(3), float(i)) for i in range(20)]
    for _ in range(3000):
        act = rng.choice(["add", "prepend", "remove", "remove", "pop"])
        if act in ("add", "prepend") and away:
            request = away.pop(rng.randrange(len(away)))
            known.insert(0 if act == "prepend" else len(known), request)
            (queue.prepend_request if act == "prepend" else queue.add_request)(request)
        elif act == "remove" and known:
            gone = rng.sample(known, rng.randint(1, min(4, len(known))))
            assert queue.remove_requests([*gone, make("stranger")]) == len(gone)
            known = [request for request in known if request not in gone]
            away += gone
        elif act == "pop" and known:
            away.append(queue.pop_request())
            known.remove(away[-1])
        if policy is SchedulingPolicy.PRIORITY:
            known.sort()
        assert [*queue] == known and len(queue) == len(known)
        assert not known or queue.peek_request() is known[0]


@pytest.mark.parametrize("policy", SchedulingPolicy)
def test_requests_leave_one_by_one_in_time_that_grows_as_their_number(
    policy: SchedulingPolicy,
) -> None:
    """Clients go away one by one; looking at all others each time took minutes."""
    scheduler = make_scheduler(policy=policy.value)
    requests = [make(f"{i}", i % 3, float(i)) for i in range(15_000)]
    for request in requests:
        scheduler.add_request(request)
    random.Random(0).shuffle(requests)
    started = time.process_time()
    for request in requests:
        status = RequestStatus.FINISHED_ABORTED
        assert scheduler.finish_requests([request.request_id], status) == [request]
    assert time.process_time() - started < 2.0  # 0.1 s; with a look at each, 6 s
    assert scheduler.get_num_unfinished_requests() == 0
