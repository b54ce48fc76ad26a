"""Keeps pages in other engines alive while our requests want them.

Knows requests of other engines by name. A thread of its own: an engine that computes
for a long time does not lose what it waits for.
"""

import threading
import time
from collections import defaultdict
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import zmq

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.leases import Standing
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import RemotePrefill
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.side_channel import (
    Held,
    Release,
    Renew,
    SideChannelLink,
)
from vllm.logger import init_logger

logger = init_logger(__name__)

Key = tuple[str, ...]
Address = tuple[str, int]

# Between two looks at the sockets: while an answer is awaited, and otherwise.
_BUSY_WAIT_S = 0.001
_IDLE_WAIT_S = 0.1
# Renewals in the time of a lease.
_RENEWALS_A_LEASE = 3


class Hold(Enum):
    """What is known of pages in another engine."""

    ASKED = auto()  # no answer yet
    HELD = auto()
    GONE = auto()  # it does not have them, or does not answer
    REFUSED = auto()  # it has the request, with other pages than those asked for


_HOLDS = {
    Standing.HELD: Hold.HELD,
    Standing.GONE: Hold.GONE,
    Standing.OTHER: Hold.REFUSED,
}
# Of these nothing is to be asked again, and nothing to be let go.
_ENDS = (Hold.GONE, Hold.REFUSED)


@dataclass
class _Kept:
    remote: RemotePrefill
    state: Hold = Hold.ASKED
    renew_at: float = 0.0


@dataclass
class _Asked:
    keys: list[Key]
    deadline: float


class Keeper:
    """Renews leases. `answer_timeout_s` without an answer is an answer: they are
    gone."""

    def __init__(self, answer_timeout_s: float) -> None:
        self.answer_timeout_s = answer_timeout_s
        self._lock = threading.Lock()
        self._kept: dict[Key, _Kept] = {}
        self._releases: list[RemotePrefill] = []
        self._wake = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None

    # --- for the engine ---------------------------------------------------------------

    def keep(self, remote: RemotePrefill) -> None:
        """Asks for pages, and goes on asking until `drop`."""
        with self._lock:
            self._kept.setdefault(remote.key, _Kept(remote))
            self._start()
        self._wake.set()

    def release(self, remote: RemotePrefill) -> None:
        """Tells the other engine that nobody wants some pages."""
        with self._lock:
            self._releases.append(remote)
            self._start()
        self._wake.set()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="kv-lease-keeper", daemon=True
            )
            self._thread.start()

    def state(self, key: Key) -> Hold:
        with self._lock:
            kept = self._kept.get(key)
            return Hold.GONE if kept is None else kept.state

    def drop(self, key: Key, release: bool) -> None:
        """Asks no more; `release` tells the other engine that it can free the pages."""
        with self._lock:
            kept = self._kept.pop(key, None)
            if kept is not None and release and kept.state not in _ENDS:
                self._releases.append(kept.remote)
        self._wake.set()

    def close(self) -> None:
        """Releases everything. May be called twice."""
        with self._lock:
            self._releases += [kept.remote for kept in self._kept.values()]
            self._kept.clear()
            self._stopping = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()

    # --- the thread -------------------------------------------------------------------

    def _run(self) -> None:
        context = zmq.Context()
        links: dict[Address, SideChannelLink] = {}
        asked: dict[tuple[Address, int], _Asked] = {}
        try:
            while self._goes_on(context, links, asked):
                self._wake.wait(_BUSY_WAIT_S if asked else _IDLE_WAIT_S)
                self._wake.clear()
        finally:
            for link in links.values():
                link.close()
            context.destroy()

    def _goes_on(
        self,
        context: zmq.Context[Any],
        links: dict[Address, SideChannelLink],
        asked: dict[tuple[Address, int], _Asked],
    ) -> bool:
        """One round. What fails in it concerns one engine; the others' pages are to be
        kept all the same."""
        try:
            return self._one_round(context, links, asked)
        except Exception:
            logger.exception(
                "KV pages: a round of renewals failed; the next one follows"
            )
            return True

    def _one_round(
        self,
        context: zmq.Context[Any],
        links: dict[Address, SideChannelLink],
        asked: dict[tuple[Address, int], _Asked],
    ) -> bool:
        """Sends what is due and takes in what came. False when all is over."""
        now = time.monotonic()
        with self._lock:
            stopping = self._stopping
            releases, self._releases = self._releases, []
            due = self._take_due(now)
        for remote in releases:
            link = _link(context, links, (remote.host, remote.port))
            if link is not None:
                link.ask(Release(remote.claim, None))
        for address, remotes in due.items():
            link = _link(context, links, address)
            keys = [remote.key for remote in remotes]
            if link is None:
                self._note(keys, None)
                continue
            number = link.ask(Renew([remote.claim for remote in remotes]))
            asked[address, number] = _Asked(keys, now + self.answer_timeout_s)
        for address, link in links.items():
            for number, answer in link.take_answers().items():
                question = asked.pop((address, number), None)
                if question is not None:
                    self._note(question.keys, answer)
        for place in [p for p, question in asked.items() if question.deadline < now]:
            self._note(asked.pop(place).keys, None)
        return not stopping

    def _take_due(self, now: float) -> dict[Address, list[RemotePrefill]]:
        """What is to be renewed now, by engine. None of it is due again before its
        answer came."""
        due: dict[Address, list[RemotePrefill]] = defaultdict(list)
        for kept in self._kept.values():
            if kept.state not in _ENDS and kept.renew_at <= now:
                kept.renew_at = float("inf")
                due[kept.remote.host, kept.remote.port].append(kept.remote)
        return due

    def _note(self, keys: list[Key], answer: Any) -> None:
        is_fit = isinstance(answer, Held) and len(answer.standings) == len(keys)
        held = answer if is_fit else Held([Standing.GONE] * len(keys), 0.0)
        again = time.monotonic() + held.lease_s / _RENEWALS_A_LEASE
        with self._lock:
            for key, standing in zip(keys, held.standings, strict=True):
                kept = self._kept.get(key)
                if kept is None:
                    continue
                kept.state = _HOLDS[standing]
                kept.renew_at = again
                if answer is None:
                    logger.warning(
                        "KV pages of request %s are gone: the engine on %s:%d does not "
                        "answer",
                        kept.remote.name,
                        kept.remote.host,
                        kept.remote.port,
                    )


def _link(
    context: zmq.Context[Any],
    links: dict[Address, SideChannelLink],
    address: Address,
) -> SideChannelLink | None:
    """The link to an engine, None for a host that is not known."""
    if address not in links:
        try:
            links[address] = SideChannelLink(context, *address)
        except ValueError as error:
            logger.warning("%s", error)
            return None
    return links[address]
