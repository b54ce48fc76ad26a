"""Which blocks a tier of fixed size holds, and in which slots.

Knows keys and slot numbers. Knows nothing of bytes; who goes when another comes is its
policy's matter.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.policies import (
    LRU,
    EvictionPolicy,
)


@dataclass
class _Slot:
    index: int
    is_ready: bool = False
    num_users: int = 0


class SlotCache:
    """A block that is being filled or used stays; of the others the policy's go."""

    def __init__(self, num_slots: int, policy: EvictionPolicy | None = None) -> None:
        self.num_slots = num_slots
        self.policy = policy or LRU(num_slots)
        self._evicted: list[str] = []
        self._free = list(range(num_slots - 1, -1, -1))
        self._slots: dict[str, _Slot] = {}

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
        """Notes a hit of blocks, the first of them last: others need it more."""
        for key in reversed(list(keys)):
            if key in self._slots:
                self.policy.use(key)

    def take(self, key: str, keep: Collection[str] = ()) -> int | None:
        """A slot for a block on its way, in use until `fill` or `drop`.

        A block of the policy's choice goes when all slots are taken, but none of
        `keep`; None when none can go.
        """

        def may_go(other: str) -> bool:
            slot = self._slots[other]
            return slot.is_ready and not slot.num_users and other not in keep

        comes_in, victim = self.policy.admit(key, not self._free, may_go)
        if not comes_in:
            return None
        if victim is not None:
            self._evicted.append(victim)
            self._free.append(self._slots.pop(victim).index)
        slot = self._slots[key] = _Slot(self._free.pop())
        return slot.index

    def fill(self, key: str) -> None:
        """The block has come."""
        self._slots[key].is_ready = True

    def drop(self, key: str) -> None:
        """The block does not come, or is not wanted."""
        self.policy.drop(key)
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

    def clear(self) -> list[str] | None:
        """Forgets every block and returns their keys; None, and nothing happens, when
        one is in use."""
        if not self.is_idle:
            return None
        keys = list(self._slots)
        for key in keys:
            self.drop(key)
        return keys

    def take_evicted(self) -> list[str]:
        """Keys of blocks that went for others since the last call."""
        taken, self._evicted = self._evicted, []
        return taken
