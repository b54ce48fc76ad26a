"""Decides which blocks are kept in host memory and on disk, and which are loaded.

Knows requests, blocks by content, slots and files. Moves no bytes: it hands out jobs
and learns when they are over. A page that is being stored is held in the block pool
like a page of a request, so nothing can be written to it before.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import TransferStats
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.disk_index import (
    DiskIndex,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import (
    DISK,
    MEMORY,
    TierEvents,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.jobs import (
    Job,
    Move,
    OffloadingMetadata,
    OffloadingNews,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.slots import SlotCache
from vllm.distributed.kv_transfer.kv_connector.v1.prefix_blocks import PrefixBlocks
from vllm.v1.core.sched.output import SchedulerOutput

# How often one request may have blocks fetched from disk before it goes on without.
_MAX_FETCHES = 3

_Ending = Callable[[Job, set[str]], None]


class OffloadingScheduler:
    """`slots` is the tier in memory, `disk` the one behind it, or None.

    What comes to memory is written to disk too. A hit on disk is fetched to memory
    first, checked on the way: its request is asked again until that is over.
    """

    def __init__(
        self,
        blocks: PrefixBlocks,
        slots: SlotCache,
        disk: DiskIndex | None,
        *,
        num_workers: int,
        block_bytes: int,
        loads: bool = True,
        saves: bool = True,
        has_events: bool = False,
    ) -> None:
        self.blocks, self.slots, self.disk = blocks, slots, disk
        self.events = TierEvents(blocks, has_events)
        self.num_workers, self.block_bytes = num_workers, block_bytes
        self.loads, self.saves = loads, saves
        self.stats = TransferStats()
        self.block_pool: Any = None
        self._orders = OffloadingMetadata()
        # Jobs under way: how many workers have reported, and what follows.
        self._jobs: dict[int, tuple[Job, _Ending]] = {}
        self._reports: Counter[int] = Counter()
        self._num_jobs = 0
        self._num_local: dict[str, int] = {}
        self._num_fetches: Counter[str] = Counter()
        self._fetched_keys: defaultdict[str, set[str]] = defaultdict(set)

    # --- jobs -------------------------------------------------------------------------

    def _job(
        self, moves: Iterable[Move], ending: _Ending, request_id: str | None = None
    ) -> Job:
        self._num_jobs += 1
        job = Job(job_id=self._num_jobs, moves=tuple(moves), request_id=request_id)
        self._jobs[job.job_id] = (job, ending)
        return job

    def take_news(self, news: OffloadingNews) -> None:
        """Goes on with jobs that every worker has done."""
        failed = news.failed_keys
        for job_id, count in news.done.items():
            self._reports[job_id] += count
            if self._reports[job_id] < self.num_workers:
                continue
            del self._reports[job_id]
            job, ending = self._jobs.pop(job_id)
            ending(job, failed.get(job_id, set()))

    @property
    def has_jobs(self) -> bool:
        """Says whether further steps are needed to start or to end jobs."""
        return bool(self._jobs)

    # --- loads ------------------------------------------------------------------------

    def find(self, request: Any, num_local: int) -> int | None:
        """Tokens after the local ones that are in memory; None while blocks come from
        disk."""
        self._num_local[request.request_id] = num_local
        if not self.loads:
            return 0
        found = self.blocks.longest_hit(request, num_local, self._is_stored)
        if found and self._fetches(request, num_local, found):
            return None
        if found:
            found = self.blocks.longest_hit(request, num_local, self.slots.is_ready)
        return found

    def _is_stored(self, key: str) -> bool:
        return self.slots.is_ready(key) or (self.disk is not None and key in self.disk)

    def _fetches(self, request: Any, num_local: int, found: int) -> bool:
        """Sees to it that a hit comes to memory; False when it is there, or cannot."""
        refs = self.blocks.needed(request, num_local, num_local + found)
        keys = [ref.key for ref in refs]
        missing = [ref for ref in refs if not self.slots.is_ready(ref.key)]
        new = [ref for ref in missing if ref.key not in self.slots]
        if not new:
            return bool(missing)
        request_id = request.request_id
        if (
            len(keys) > self.slots.num_slots // 2
            or self._num_fetches[request_id] == _MAX_FETCHES
        ):
            return False
        self._num_fetches[request_id] += 1
        self.slots.use(keys)
        self.events.learn(request, new)
        moves = []
        for ref in new:
            slot = self.slots.take(ref.key, keep=keys)
            if slot is None:
                break
            moves.append(Move(key=ref.key, group_id=ref.group_id, slot=slot))
        self.events.removed([ref.key for ref in new[len(moves) :]], MEMORY)
        if moves:
            self._fetched_keys[request_id].update(move.key for move in moves)
            self._orders.fetches.append(self._job(moves, self._fetched))
        return len(moves) == len(new)

    def _fetched(self, job: Job, failed: set[str]) -> None:
        for move in job.moves:
            if move.key in failed:
                self.slots.drop(move.key)
                self.events.removed([move.key], DISK)
                if self.disk is not None:
                    self.disk.forget(move.key)
                continue
            self.slots.fill(move.key)
            self.events.stored([move.key], MEMORY)
            if self.disk is not None:
                self.disk.use(move.key)

    def load(self, request: Any, blocks: Any, num_external: int) -> None:
        """Orders the blocks of a hit into the pages of its request."""
        request_id = request.request_id
        refs = self.blocks.to_load(
            request, blocks, self._num_local[request_id], num_external
        )
        moves = [
            Move(
                key=ref.key,
                group_id=ref.group_id,
                slot=self.slots.pin(ref.key),
                block_id=ref.block_id,
            )
            for ref in refs
        ]
        self.slots.use(ref.key for ref in refs)
        self._orders.loads.append(self._job(moves, self._loaded, request_id))

    def hit_sources(self, request: Any, num_external: int) -> dict[str, int]:
        """Where the tokens of a hit were before: in memory, or on disk."""
        request_id = request.request_id
        num_local = self._num_local[request_id]
        refs = self.blocks.needed(request, num_local, num_local + num_external)
        fetched = self._fetched_keys.get(request_id, set())
        from_disk = self.blocks.num_tokens_of(refs, fetched)
        sources = {"memory": num_external - from_disk, "disk": from_disk}
        return {source: count for source, count in sources.items() if count}

    def _loaded(self, job: Job, failed: set[str]) -> None:
        for move in job.moves:
            self.slots.unpin(move.key)

    # --- saves ------------------------------------------------------------------------

    def take_orders(self, scheduled: SchedulerOutput) -> OffloadingMetadata:
        """The jobs that start in this step."""
        if self.saves:
            moves = self._new_blocks(scheduled)
            if moves:
                # As if a request held them: they stay until the store is over.
                self.block_pool.touch(self._pages(moves))
                self._orders.stores.append(self._job(moves, self._stored))
        orders, self._orders = self._orders, OffloadingMetadata()
        return orders

    def _new_blocks(self, scheduled: SchedulerOutput) -> list[Move]:
        moves = []
        for request, refs in self.blocks.to_save(scheduled):
            self.events.learn(request, [r for r in refs if r.key not in self.slots])
            for ref in refs:
                if ref.key in self.slots:
                    self.slots.use([ref.key])
                    continue
                slot = self.slots.take(ref.key)
                if slot is None:
                    self.events.removed([ref.key], MEMORY)
                    continue  # every slot is on its way or in use
                moves.append(
                    Move(
                        key=ref.key,
                        group_id=ref.group_id,
                        slot=slot,
                        block_id=ref.block_id,
                    )
                )
        return moves

    def _pages(self, moves: Iterable[Move]) -> list[Any]:
        return [self.block_pool.blocks[move.block_id] for move in moves]

    def _stored(self, job: Job, failed: set[str]) -> None:
        self.block_pool.free_blocks(reversed(self._pages(job.moves)))
        spilled = []
        for move in job.moves:
            if move.key in failed:
                self.slots.drop(move.key)
                self.events.removed([move.key], MEMORY)
                continue
            self.slots.fill(move.key)
            self.events.stored([move.key], MEMORY)
            if self.disk is not None and move.key not in self.disk:
                self.slots.pin(move.key)
                spilled.append(move)
        if spilled:
            self._orders.spills.append(self._job(spilled, self._spilled))

    def _spilled(self, job: Job, failed: set[str]) -> None:
        for move in job.moves:
            self.slots.unpin(move.key)
            if move.key not in failed and self.disk is not None:
                removed = self.disk.add(move.key, self.block_bytes)
                self.events.stored([move.key], DISK)
                self.events.removed(removed, DISK)

    # --- requests ---------------------------------------------------------------------

    def forget(self, request: Any) -> None:
        self.blocks.forget(request.request_id)
        self._num_local.pop(request.request_id, None)
        self._num_fetches.pop(request.request_id, None)
        self._fetched_keys.pop(request.request_id, None)

    def reset(self) -> bool:
        """Forgets every stored block; False while any is in use."""
        keys = None if self._jobs else self.slots.clear()
        if keys is None:
            return False
        self.events.removed(keys, MEMORY)
        if self.disk is not None:
            self.events.removed(self.disk.clear(), DISK)
        return True

    def take_events(self) -> list[KVCacheEvent]:
        """What came to the tiers and left them since the last call."""
        self._note_evicted()
        return self.events.take()

    def _note_evicted(self) -> None:
        evicted = self.slots.take_evicted()
        self.events.removed(evicted, MEMORY)
        self.stats.count(evicted_blocks=len(evicted))

    def take_stats(self) -> TransferStats | None:
        self._note_evicted()
        return self.stats.take()
