"""Pages of finished requests that another engine may still read, and for how long.

Knows requests and times. Called by the engine and by the side channel's thread.
"""

import threading
import time
from dataclasses import dataclass, field
from enum import Enum

#: A request of this engine, and the digest of what its reader was told of its pages.
Claim = tuple[str, str]


class Standing(Enum):
    """What becomes of a claim."""

    HELD = "held"
    GONE = "gone"
    OTHER = "other"  # the request is held, with other pages than those claimed


@dataclass
class _Lease:
    pages: str
    deadline: float
    num_readers: int
    ranks_done: set[int] = field(default_factory=set)


class Leases:
    """A lease begins with a long time to be asked for, and goes on, once somebody has
    asked, for `lease_s` seconds from one renewal to the next.

    Whoever is told that pages are held can rely on it: a lease ends under the same lock
    that answers, and blocks are freed after that. Whoever names a request has to name
    its pages as they are, too: pages of others cannot be had under its name.
    """

    def __init__(self, *, unclaimed_s: float, lease_s: float) -> None:
        self.unclaimed_s, self.lease_s = unclaimed_s, lease_s
        self._lock = threading.Lock()
        self._leases: dict[str, _Lease] = {}
        self._over: set[str] = set()

    def __len__(self) -> int:
        """Requests whose blocks are held, those on their way to be freed included."""
        with self._lock:
            return len(self._leases) + len(self._over)

    def hold(self, request_id: str, pages: str, num_readers: int) -> None:
        """`pages`: the digest that a claim has to have."""
        with self._lock:
            self._leases[request_id] = _Lease(
                pages, time.monotonic() + self.unclaimed_s, num_readers
            )

    def renew(self, claims: list[Claim]) -> list[Standing]:
        """How each claim stands; what is held is so for `lease_s` from now on."""
        now = time.monotonic()
        with self._lock:
            return [self._renew(claim, now) for claim in claims]

    def _renew(self, claim: Claim, now: float) -> Standing:
        request_id, pages = claim
        lease = self._leases.get(request_id)
        if lease is None or lease.deadline <= now:
            return Standing.GONE
        if lease.pages != pages:
            return Standing.OTHER
        lease.deadline = now + self.lease_s
        return Standing.HELD

    def release(self, claim: Claim, rank: int | None) -> bool:
        """Notes that a reader is done, or (None) that there is none. False when these
        pages were not held until now, so that what was read means nothing."""
        request_id, pages = claim
        with self._lock:
            lease = self._leases.get(request_id)
            if lease is None or lease.deadline <= time.monotonic():
                return False
            if lease.pages != pages:
                return False
            if rank is not None:
                lease.ranks_done.add(rank)
            if rank is None or len(lease.ranks_done) >= lease.num_readers:
                del self._leases[request_id]
                self._over.add(request_id)
            return True

    def take_over(self) -> tuple[set[str], set[str]]:
        """Requests whose blocks may go: those that were read, and those that nobody
        asked for in time."""
        now = time.monotonic()
        with self._lock:
            expired = {r for r, lease in self._leases.items() if lease.deadline <= now}
            for request_id in expired:
                del self._leases[request_id]
            read, self._over = self._over, set()
        return read, expired
