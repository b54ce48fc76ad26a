"""Which block goes: policies against a textbook, and tiers whose blocks are in use."""

import random
from collections import deque
from collections.abc import Iterator

import pytest

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.policies import (
    ARC,
    LRU,
    POLICIES,
    policy_by_name,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.slots import SlotCache


class TextbookArc:
    """ARC(c) as in figure 4 of "ARC: a self-tuning, low overhead replacement cache"
    (FAST 2003): four lists, left end least recent; nothing is ever in use."""

    def __init__(self, c: int) -> None:
        self.c, self.p = c, 0.0
        self.t1, self.t2, self.b1, self.b2 = deque(), deque(), deque(), deque()

    def _replace(self, x: str) -> None:
        t1 = len(self.t1)
        if t1 >= 1 and ((x in self.b2 and t1 == self.p) or t1 > self.p):
            self.b1.append(self.t1.popleft())
        else:
            self.b2.append(self.t2.popleft())

    def request(self, x: str) -> bool:
        """Whether x was a hit."""
        for resident in (self.t1, self.t2):
            if x in resident:
                resident.remove(x)
                self.t2.append(x)
                return True
        if x in self.b1:
            self.p = min(self.c, self.p + max(len(self.b2) / len(self.b1), 1))
            self._replace(x)
            self.b1.remove(x)
            self.t2.append(x)
            return False
        if x in self.b2:
            self.p = max(0, self.p - max(len(self.b1) / len(self.b2), 1))
            self._replace(x)
            self.b2.remove(x)
            self.t2.append(x)
            return False
        l1 = len(self.t1) + len(self.b1)
        total = l1 + len(self.t2) + len(self.b2)
        if l1 == self.c:
            if len(self.t1) < self.c:
                self.b1.popleft()
                self._replace(x)
            else:
                self.t1.popleft()
        elif total >= self.c:
            if total == 2 * self.c:
                self.b2.popleft()
            self._replace(x)
        self.t1.append(x)
        return False


def traces(rng: random.Random) -> Iterator[tuple[str, list[str]]]:
    """Loops, scans through a working set, and skewed access."""
    yield "loop", [str(i % 11) for i in range(400)]
    yield "uniform", [str(rng.randrange(20)) for _ in range(600)]
    yield "skewed", [str(int(rng.paretovariate(0.7))) for _ in range(800)]
    mixed = []
    for i in range(60):
        mixed += [str(rng.randrange(5)) for _ in range(8)]
        mixed += [f"scan {i} {j}" for j in range(rng.randrange(12))]
    yield "scans", mixed


@pytest.mark.parametrize("capacity", [1, 2, 3, 8, 16])
def test_arc_keeps_what_the_textbook_keeps(capacity: int) -> None:
    for name, trace in traces(random.Random(capacity)):
        book = TextbookArc(capacity)
        slots = SlotCache(capacity, ARC(capacity))
        policy = slots.policy
        assert isinstance(policy, ARC)
        for step, key in enumerate(trace):
            hit = key in slots
            assert hit == book.request(key), (name, step)
            if hit:
                slots.use([key])
            else:
                assert slots.take(key) is not None
                slots.fill(key)
            assert policy.target == book.p, (name, step)
            for mine, theirs in (
                (policy.once, book.t1),
                (policy.often, book.t2),
                (policy.gone_once, book.b1),
                (policy.gone_often, book.b2),
            ):
                assert list(mine) == list(theirs), (name, step)


def num_hits(policy: str, trace: list[str], capacity: int) -> int:
    slots, hits = SlotCache(capacity, policy_by_name(policy, capacity)), 0
    for key in trace:
        if key in slots:
            hits += 1
            slots.use([key])
        else:
            slots.take(key)
            slots.fill(key)
    return hits


def test_a_scan_drives_out_less_under_arc() -> None:
    (trace,) = [t for name, t in traces(random.Random(3)) if name == "scans"]
    assert num_hits("arc", trace, 8) > 1.2 * num_hits("lru", trace, 8)


@pytest.mark.parametrize("policy", POLICIES)
def test_any_use_of_a_tier_keeps_its_slots_apart(policy: str) -> None:
    rng = random.Random(policy)
    for _ in range(30):
        capacity = rng.randrange(1, 9)
        slots = SlotCache(capacity, policy_by_name(policy, capacity))
        place: dict[str, int] = {}
        coming, pinned = set[str](), list[str]()
        for _ in range(300):
            key, dice = str(rng.randrange(3 * capacity)), rng.random()
            if dice < 0.5 and key not in slots:
                keep = {str(rng.randrange(3 * capacity))}
                before = set(place)
                slot = slots.take(key, keep=keep)
                gone = set(slots.take_evicted())
                assert gone <= before - coming - set(pinned) - keep
                for other in gone:
                    del place[other]
                if slot is None:
                    stay = coming | set(pinned) | keep
                    once = getattr(slots.policy, "once", before)
                    assert not gone and set(once) <= stay
                    assert once or before <= stay
                    continue
                place[key] = slot
                coming.add(key)
            elif coming and dice < 0.75:
                key = coming.pop()
                if rng.random() < 0.2:
                    slots.drop(key)
                    del place[key]
                else:
                    slots.fill(key)
            elif slots.is_ready(key) and dice < 0.85:
                assert slots.pin(key) == place[key]
                pinned.append(key)
            elif pinned and dice < 0.95:
                slots.unpin(pinned.pop())
            else:
                slots.use([key])
            assert len(set(place.values())) == len(place) == len(slots) <= capacity
            assert slots.is_idle == (not coming and not pinned)
        if isinstance(slots.policy, ARC):
            names = [*slots.policy.gone_once, *slots.policy.gone_often]
            assert len(names) + len(place) <= 2 * capacity
            assert not set(names) & set(place)
            assert {*slots.policy.once, *slots.policy.often} == set(place)


def test_policies_have_names() -> None:
    assert isinstance(policy_by_name("lru", 2), LRU)
    with pytest.raises(ValueError, match=r"unknown eviction_policy 'fifo'.*lru, arc"):
        policy_by_name("fifo", 2)
