"""What the two sides of an offloading connector tell each other: plain data."""

from collections import Counter
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)


@dataclass(frozen=True, kw_only=True)
class Move:
    """One block between its pages and a slot of host memory, or between a slot and a
    file (`block_id` is unused there)."""

    key: str
    group_id: int
    slot: int
    block_id: int = -1


@dataclass(frozen=True, kw_only=True)
class Job:
    """Moves that are reported as done together. `request_id` waits for a load."""

    job_id: int
    moves: tuple[Move, ...]
    request_id: str | None = None


@dataclass
class OffloadingMetadata(KVConnectorMetadata):
    """Jobs that start in this step: pages to memory (after the forward pass), memory to
    pages, memory to disk, disk to memory."""

    stores: list[Job] = field(default_factory=list)
    loads: list[Job] = field(default_factory=list)
    spills: list[Job] = field(default_factory=list)
    fetches: list[Job] = field(default_factory=list)


@dataclass
class OffloadingNews(KVConnectorWorkerMetadata):
    """Jobs that are over, counted by worker, and the keys that they failed for."""

    done: Counter[int] = field(default_factory=Counter)
    failed_keys: dict[int, set[str]] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "OffloadingNews":
        if not isinstance(other, OffloadingNews):
            raise TypeError(f"news of another connector: {type(other).__name__}")
        failed = {job_id: set(keys) for job_id, keys in self.failed_keys.items()}
        for job_id, keys in other.failed_keys.items():
            failed.setdefault(job_id, set()).update(keys)
        return OffloadingNews(done=self.done + other.done, failed_keys=failed)
