"""Moves blocks between pages, host memory and disk, beside the engine's own work.

Knows slots, blocks and files. Which block goes where, and what must not be overwritten
meanwhile, is the scheduler side's matter: pages of a store are held by it until the
store is reported, slots and blocks of a load likewise.
"""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

import torch

from vllm.distributed.kv_transfer.kv_connector.page_table import BlockMover, Cache
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import TransferStats
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.jobs import (
    Job,
    Move,
    OffloadingMetadata,
    OffloadingNews,
)
from vllm.distributed.kv_transfer.kv_connector.v1.page_store import PageStore
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class _Done:
    job: Job
    is_load: bool
    counter: str
    num_bytes: int = 0
    failed: list[Move] = field(default_factory=list)


class OffloadingWorker:
    """One thread for pages, one for files: each does its jobs in order."""

    def __init__(
        self, num_slots: int, slot_bytes: int, store: PageStore | None
    ) -> None:
        self.num_slots, self.slot_bytes, self.store = num_slots, slot_bytes, store
        self.stats = TransferStats()
        self._pages_thread = ThreadPoolExecutor(1, "kv-offload-pages")
        self._files_thread = ThreadPoolExecutor(1, "kv-offload-files")
        self._over: SimpleQueue[_Done] = SimpleQueue()
        self._news = OffloadingNews()
        self._received: set[str] = set()
        self._failed_block_ids: set[int] = set()

    def register(self, plan: KVCacheConfig, kv_caches: dict[str, Cache]) -> None:
        """Takes the caches and reserves the memory, which is used as it is filled.

        ValueError when a block does not fit a slot.
        """
        self.mover = BlockMover(plan, kv_caches)
        if max(self.mover.block_bytes) > self.slot_bytes:
            raise ValueError(
                f"blocks of {max(self.mover.block_bytes)} bytes do not fit slots of "
                f"{self.slot_bytes} bytes"
            )
        self.memory = torch.empty(self.num_slots, self.slot_bytes, dtype=torch.uint8)

    # --- jobs -------------------------------------------------------------------------

    def before_forward(self, orders: OffloadingMetadata) -> None:
        for job in orders.loads:
            self._start(self._pages_thread, job, self._load, "loaded", is_load=True)
        for job in orders.fetches:
            self._start(self._files_thread, job, self._fetch, "fetched")
        for job in orders.spills:
            self._start(self._files_thread, job, self._spill, "spilled")

    def after_forward(self, orders: OffloadingMetadata) -> None:
        for job in orders.stores:
            self._start(self._pages_thread, job, self._save, "saved")

    def _start(
        self,
        thread: ThreadPoolExecutor,
        job: Job,
        act: Callable[[Move], bool],
        counter: str,
        is_load: bool = False,
    ) -> None:
        thread.submit(self._run, job, act, counter, is_load)

    def _run(
        self, job: Job, act: Callable[[Move], bool], counter: str, is_load: bool
    ) -> None:
        """Every job is reported, whatever happens to its moves."""
        failed = []
        for move in job.moves:
            try:
                done = act(move)
            except Exception as error:
                logger.warning("KV block %s was not %s: %s", move.key, counter, error)
                done = False
            if not done:
                failed.append(move)
        good = set(job.moves) - set(failed)
        num_bytes = sum(self.mover.block_bytes[move.group_id] for move in good)
        self._over.put(
            _Done(
                job=job,
                is_load=is_load,
                counter=counter,
                num_bytes=num_bytes,
                failed=failed,
            )
        )

    def _save(self, move: Move) -> bool:
        self.mover.read(move.group_id, move.block_id, self.memory[move.slot])
        return True

    def _load(self, move: Move) -> bool:
        self.mover.write(move.group_id, move.block_id, self.memory[move.slot])
        return True

    def _spill(self, move: Move) -> bool:
        num_bytes = self.mover.block_bytes[move.group_id]
        self._store.write(move.key, self.memory[move.slot, :num_bytes])
        return True

    def _fetch(self, move: Move) -> bool:
        pages = self._store.read(move.key)
        num_bytes = self.mover.block_bytes[move.group_id]
        if pages is None or pages.numel() != num_bytes:
            return False
        self.memory[move.slot, :num_bytes].copy_(pages)
        return True

    @property
    def _store(self) -> PageStore:
        if self.store is None:
            raise RuntimeError("there is no disk tier")
        return self.store

    # --- news -------------------------------------------------------------------------

    def _take_in(self) -> None:
        """Notes the jobs that are over."""
        while True:
            try:
                done = self._over.get_nowait()
            except Empty:
                return
            self._news.done[done.job.job_id] += 1
            if done.failed:
                self._news.failed_keys[done.job.job_id] = {m.key for m in done.failed}
            if done.is_load:
                self._failed_block_ids.update(m.block_id for m in done.failed)
                if done.job.request_id is not None:
                    self._received.add(done.job.request_id)
            counts = {
                f"{done.counter}_blocks": len(done.job.moves) - len(done.failed),
                f"{done.counter}_bytes": done.num_bytes,
                "failed_blocks": len(done.failed),
            }
            self.stats.count(**counts)

    def take_received(self) -> set[str]:
        """Requests whose loads are over."""
        self._take_in()
        taken, self._received = self._received, set()
        return taken

    def take_failed_block_ids(self) -> set[int]:
        taken, self._failed_block_ids = self._failed_block_ids, set()
        return taken

    def take_news(self) -> OffloadingNews | None:
        """Jobs that are over, for the scheduler side. Loads are named here after their
        requests were: their slots may go then."""
        taken, self._news = self._news, OffloadingNews(Counter())
        return taken if taken.done else None

    def take_stats(self) -> TransferStats | None:
        if self.store is not None:
            self.stats.count(damaged_blocks=self.store.take_num_damaged())
        return self.stats.take()

    def shutdown(self) -> None:
        """Ends the jobs that were started: files are whole."""
        self._pages_thread.shutdown()
        self._files_thread.shutdown()
