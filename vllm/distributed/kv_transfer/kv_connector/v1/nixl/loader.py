"""Loads under way in one worker: from an order to pages that can be relied on.

Knows stages and times. A thread of its own makes every call to other engines, so the
engine's steps never wait for them.
"""

import threading
import time
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

import zmq

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.agent import TransferFailed
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import LoadOrder
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.peer import (
    LoadRefused,
    OwnPages,
    Peer,
)
from vllm.logger import init_logger
from vllm.utils.text_utils import shorten

logger = init_logger(__name__)

# Between two looks at loads under way, and at the queue when there are none.
_BUSY_WAIT_S = 0.0005
_IDLE_WAIT_S = 0.2

PeerKey = tuple[str, str, int]


@dataclass
class _Load:
    """First a peer is met, then pages are read, then the peer says whether it held them
    throughout: only then they count."""

    order: LoadOrder
    deadline: float
    handle: Any = None
    is_read: bool = False
    release: int | None = None
    release_deadline: float = 0.0

    @property
    def peer_key(self) -> PeerKey:
        remote = self.order.remote
        return remote.engine_id, remote.host, remote.port


@dataclass
class LoadResults:
    """Request ids of loads that are over, and what they brought."""

    finished: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)  # with the reason
    num_blocks: int = 0
    num_bytes: int = 0
    num_failed_blocks: int = 0


class PageLoader:
    """Orders in, results out. A load that fails while it is read takes the connection
    to its peer with it: this keeps late bytes out of pages that go to others."""

    def __init__(
        self, me: OwnPages, *, read_timeout_s: float, answer_timeout_s: float
    ) -> None:
        self.me = me
        self.read_timeout_s, self.answer_timeout_s = read_timeout_s, answer_timeout_s
        self._inbox: SimpleQueue[LoadOrder | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._results = LoadResults()
        self._loads: list[_Load] = []
        self._peers: dict[PeerKey, Peer] = {}
        self._stopping = False
        self._thread = threading.Thread(
            target=self._run, name="kv-page-loader", daemon=True
        )
        self._thread.start()

    # --- for the engine ---------------------------------------------------------------

    def submit(self, order: LoadOrder) -> None:
        self._inbox.put(order)

    def take_results(self) -> LoadResults:
        """What ended since the last call."""
        with self._lock:
            taken, self._results = self._results, LoadResults()
        return taken

    def close(self) -> None:
        """Ends what is under way. May be called twice."""
        self._inbox.put(None)
        self._thread.join()

    # --- the thread -------------------------------------------------------------------

    def _run(self) -> None:
        self._context = zmq.Context()
        try:
            while not self._stopping:
                self._take_orders()
                for peer in self._peers.values():
                    peer.take_answers()
                for load in list(self._loads):
                    if load in self._loads:  # not ended with another one's peer
                        self._advance(load)
        finally:
            for peer in self._peers.values():
                peer.close()
            self._context.term()

    def _take_orders(self) -> None:
        wait = _BUSY_WAIT_S if self._loads else _IDLE_WAIT_S
        try:
            while not self._stopping:
                order = self._inbox.get(timeout=wait)
                if order is None:
                    self._stopping = True
                    return
                deadline = time.monotonic() + self.read_timeout_s
                self._loads.append(_Load(order, deadline))
                wait = 0.0
        except Empty:
            return

    def _advance(self, load: _Load) -> None:
        try:
            if self._is_over(load):
                self._loads.remove(load)
                self._report(load)
        except Exception as error:
            if not isinstance(error, TransferFailed):
                logger.exception("a KV transfer failed unexpectedly")
            self._give_up(load, error)

    def _is_over(self, load: _Load) -> bool:
        """Takes a load as far as it gets now."""
        if load.order.refusal is not None:
            raise LoadRefused(load.order.refusal)
        now, remote = time.monotonic(), load.order.remote
        peer = self._peers.get(load.peer_key) or self._meet(load)
        if not load.is_read and now > load.deadline:
            raise TransferFailed(
                f"{peer.where} did not give its pages within {self.read_timeout_s:g} s"
            )
        if not peer.is_ready():
            return False
        if load.handle is None:
            load.handle = peer.read(load.order)
        if not load.is_read:
            load.is_read = peer.is_read(load.handle)
            if not load.is_read:
                return False
        if load.release is None:
            load.release = peer.ask_release(remote)
            load.release_deadline = time.monotonic() + self.answer_timeout_s
            peer.take_answers()
        return peer.is_released(load.release, load.release_deadline)

    def _meet(self, load: _Load) -> Peer:
        """A new peer. One that was on the same port before it is no more."""
        in_use = {other.peer_key for other in self._loads}
        for key in set(self._peers) - in_use:
            if key[1:] == load.peer_key[1:]:
                self._peers.pop(key).close()
        peer = Peer(self._context, self.me, load.order.remote, self.answer_timeout_s)
        self._peers[load.peer_key] = peer
        return peer

    def _give_up(self, load: _Load, error: Exception) -> None:
        """Ends a load and, unless it is sound, the connection that it came by: other
        loads of the same peer begin anew."""
        self._loads.remove(load)
        if not isinstance(error, LoadRefused):
            peer = self._peers.pop(load.peer_key, None)
            if peer is not None:
                peer.close()
            for other in self._loads:
                if other.peer_key == load.peer_key:
                    other.handle, other.is_read, other.release = None, False, None
        # Who reads it may be a client: what is not known is for the log alone.
        is_known = isinstance(error, TransferFailed)
        why = f"an unexpected {type(error).__name__}, see the log"
        self._report(load, shorten(str(error)) if is_known else why)

    def _report(self, load: _Load, why_not: str | None = None) -> None:
        order = load.order
        with self._lock:
            results = self._results
            if why_not is not None:
                results.failed[order.request_id] = why_not
                results.num_failed_blocks += order.num_blocks
                return
            results.finished.add(order.request_id)
            results.num_blocks += order.num_blocks
            results.num_bytes += sum(
                len(ids) * num_bytes
                for ids, num_bytes in zip(
                    order.local_block_ids, self.me.block_bytes, strict=True
                )
            )
