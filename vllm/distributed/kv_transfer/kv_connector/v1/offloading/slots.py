"""Which blocks a tier of fixed size holds, and which one goes when another comes.

Knows keys and slot numbers. Knows nothing of bytes.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass


@dataclass
class _Slot:
    index: int
    is_ready: bool = False
    num_users: int = 0


class SlotCache:
    """Least recently used first. A block that is being filled or used stays."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_evicted = 0
        self._free = list(range(num_slots - 1, -1, -1))
        self._slots: OrderedDict[str, _Slot] = OrderedDict()

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: str) -> bool:
        """Says whether a block is there, or on its way."""
        return key in self._slots

    def is_ready(self, key: str) -> bool:
        """Says whether a block can be read."""
        slot = self._slots.get(key)
        return slot is not None and slot.is_ready

    def use(self, keys: Iterable[str]) -> None:
        """Makes blocks the last to go, the first of them last of all: others need it
        more."""
        for key in reversed(list(keys)):
            if key in self._slots:
                self._slots.move_to_end(key)

    def take(self, key: str, keep: Collection[str] = ()) -> int | None:
        """A slot for a block on its way, in use until `fill` or `drop`.

        Drops the least recently used block when all slots are taken, but none of
        `keep`; None when there is none to drop.
        """
        if not self._free:
            victim = next(
                (
                    k
                    for k, s in self._slots.items()
                    if s.is_ready and not s.num_users and k not in keep
                ),
                None,
            )
            if victim is None:
                return None
            self.num_evicted += 1
            self._free.append(self._slots.pop(victim).index)
        slot = self._slots[key] = _Slot(self._free.pop())
        return slot.index

    def fill(self, key: str) -> None:
        """The block has come."""
        self._slots[key].is_ready = True

    def drop(self, key: str) -> None:
        """The block does not come, or is not wanted."""
        self._free.append(self._slots.pop(key).index)

    def pin(self, key: str) -> int:
        """Keeps a block that is ready until `unpin`; returns its slot. KeyError when it
        is not there."""
        slot = self._slots[key]
        if not slot.is_ready:
            raise KeyError(f"block {key} is not ready")
        slot.num_users += 1
        return slot.index

    def unpin(self, key: str) -> None:
        self._slots[key].num_users -= 1

    @property
    def is_idle(self) -> bool:
        """True if no block is on its way or in use."""
        return all(s.is_ready and not s.num_users for s in self._slots.values())

    def clear(self) -> bool:
        """Forgets every block; False, and nothing happens, when one is in use."""
        if not self.is_idle:
            return False
        for key in list(self._slots):
            self.drop(key)
        return True

    def take_num_evicted(self) -> int:
        taken, self.num_evicted = self.num_evicted, 0
        return taken
