"""Which block a full tier lets go: least recently used, or adaptively (ARC).

Knows keys and their order of use. Knows nothing of slots, bytes and requests: what may
not go at the moment, it is told.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable

MayGo = Callable[[str], bool]
_Keys = OrderedDict[str, None]


class EvictionPolicy(ABC):
    """The resident keys of a tier of `capacity` blocks, in some order."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity

    @abstractmethod
    def admit(self, key: str, is_full: bool, may_go: MayGo) -> tuple[bool, str | None]:
        """Takes in a key that is not resident: (whether it comes in, who goes for it).

        Nobody goes unless the tier `is_full`; nothing changes where none may go.
        """

    @abstractmethod
    def use(self, key: str) -> None:
        """A resident key was hit."""

    @abstractmethod
    def drop(self, key: str) -> None:
        """A resident key is gone without having been evicted."""


class LRU(EvictionPolicy):
    """The least recently used goes first."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._keys: _Keys = OrderedDict()

    def admit(self, key: str, is_full: bool, may_go: MayGo) -> tuple[bool, str | None]:
        victim = _oldest(self._keys, may_go) if is_full else None
        if is_full and victim is None:
            return False, None
        if victim is not None:
            del self._keys[victim]
        self._keys[key] = None
        return True, victim

    def use(self, key: str) -> None:
        self._keys.move_to_end(key)

    def drop(self, key: str) -> None:
        del self._keys[key]


class ARC(EvictionPolicy):
    """Adaptive replacement (Megiddo and Modha, 2003): a scan of new blocks does not
    drive out those that are used again and again.

    `once` holds keys used once since they came, `often` those used more often; both
    remember, in `gone_once` and `gone_often`, whom they lost last. A key that comes
    back soon after it went moves `target`, the size that `once` should have.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.target = 0.0
        self.once: _Keys = OrderedDict()
        self.often: _Keys = OrderedDict()
        self.gone_once: _Keys = OrderedDict()
        self.gone_often: _Keys = OrderedDict()

    def admit(self, key: str, is_full: bool, may_go: MayGo) -> tuple[bool, str | None]:
        before, comes_back = self.target, self._adapt(key)
        victim = None
        if is_full:
            victim = self._evict(key, comes_back, may_go)
            if victim is None:
                self.target = before
                return False, None
        if comes_back:
            self.gone_once.pop(key, None)
            self.gone_often.pop(key, None)
            self.often[key] = None
        else:
            self.once[key] = None
        self._trim()
        return True, victim

    def _adapt(self, key: str) -> bool:
        """Moves the target towards the list that lost a key too early; says whether one
        did."""
        lost_once, lost_often = len(self.gone_once), len(self.gone_often)
        if key in self.gone_once:
            step = max(1.0, lost_often / lost_once)
            self.target = min(self.target + step, float(self.capacity))
            return True
        if key in self.gone_often:
            step = max(1.0, lost_once / lost_often)
            self.target = max(self.target - step, 0.0)
            return True
        return False

    def _evict(self, key: str, comes_back: bool, may_go: MayGo) -> str | None:
        """Lets a key go, and remembers it unless `once` fills the tier alone."""
        forgets = not comes_back and len(self.once) >= self.capacity
        prefers_once = bool(self.once) and (
            len(self.once) > self.target
            or (key in self.gone_often and len(self.once) == self.target)
            or forgets
        )
        # Where new keys fill `once` faster than they can go again, the next one stays
        # out: those of `often` are worth more.
        choice = [(self.once, self.gone_once)]
        if not prefers_once:
            choice.insert(0, (self.often, self.gone_often))
        for keys, gone in choice:
            victim = _oldest(keys, may_go)
            if victim is None:
                continue
            del keys[victim]
            if not forgets:
                gone[victim] = None
            return victim
        return None

    def _trim(self) -> None:
        """Forgets the oldest of those who went: as many names as blocks for keys used
        once, and twice as many for all."""
        while len(self.once) + len(self.gone_once) > self.capacity and self.gone_once:
            self.gone_once.popitem(last=False)
        resident = len(self.once) + len(self.often)
        room = 2 * self.capacity - resident
        while len(self.gone_once) + len(self.gone_often) > room and self.gone_often:
            self.gone_often.popitem(last=False)

    def use(self, key: str) -> None:
        self.once.pop(key, None)
        self.often[key] = None
        self.often.move_to_end(key)

    def drop(self, key: str) -> None:
        self.once.pop(key, None)
        self.often.pop(key, None)


def _oldest(keys: _Keys, may_go: MayGo) -> str | None:
    return next((key for key in keys if may_go(key)), None)


POLICIES: dict[str, type[EvictionPolicy]] = {"lru": LRU, "arc": ARC}


def policy_by_name(name: str, capacity: int) -> EvictionPolicy:
    """ValueError lists the names there are."""
    if name not in POLICIES:
        known = ", ".join(POLICIES)
        raise ValueError(f"unknown eviction_policy {name!r}: expected one of {known}")
    return POLICIES[name](capacity)
