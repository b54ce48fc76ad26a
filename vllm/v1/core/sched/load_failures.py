"""What happens to requests when a connector could not load blocks it had promised.

Knows which requests rest on a block. Knows nothing of how blocks are loaded.
"""

from collections.abc import Iterable

from vllm.config import KVTransferConfig
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.admission import Admission
from vllm.v1.core.sched.request_book import RequestBook
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

logger = init_logger(__name__)


class LoadFailures:
    """Starts spoiled requests again, or ends them, as the load-failure policy says.

    A request whose load failed is not loaded a second time, so it makes progress.
    """

    def __init__(
        self,
        config: KVTransferConfig | None,
        book: RequestBook,
        admission: Admission,
    ) -> None:
        self.recompute = (
            config is not None and config.kv_load_failure_policy == "recompute"
        )
        self.book = book
        self.admission = admission

    def handle(self, news: KVConnectorOutput) -> set[str]:
        """Takes in failed loads; returns the ids of requests whose output is void.

        What they, and requests that share their blocks, computed from the first failed
        block on is forgotten.
        """
        if not news.invalid_block_ids:
            return set()
        manager = self.admission.kv_cache_manager
        unfinished = [*self.book.running, *self.book.waiting]
        spoiled = find_spoiled_blocks(unfinished, news.invalid_block_ids, manager)
        # Last ones first: preempted requests keep their order at the queue's front.
        for request in reversed(unfinished):
            if request.request_id in spoiled:
                self._restart_or_end(request)
        if spoiled:
            manager.evict_blocks(set().union(*spoiled.values()))
        logger.warning(
            "a connector failed to load %d blocks: %d requests are %s",
            len(news.invalid_block_ids),
            len(spoiled),
            "computed again" if self.recompute else "ended",
        )
        return set(spoiled)

    def _restart_or_end(self, request: Request) -> None:
        if not self.recompute:
            self.book.end(request, RequestStatus.FINISHED_ERROR)
        elif request.status == RequestStatus.RUNNING:
            self.book.preempt(request, drop_stale_output=True)
            request.skip_external_cache = True
        elif request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
            # Its blocks are free once the rest of the load is over.
            self.admission.transfer.failed_recving.add(request.request_id)
        else:
            self.admission.release(request)
            request.skip_external_cache = True


def find_spoiled_blocks(
    requests: Iterable[Request],
    invalid_block_ids: set[int],
    kv_cache_manager: KVCacheManager,
) -> dict[str, set[int]]:
    """Requests that rest on blocks whose load failed, with the blocks to forget.

    A request is spoiled from its first invalid block on, in every group; so is every
    other request that shares any of those blocks.
    """
    managers = kv_cache_manager.coordinator.single_type_managers
    sizes = [manager.block_size for manager in managers]
    spoiled: dict[str, set[int]] = {}
    invalid = set(invalid_block_ids)
    pending = [request.request_id for request in requests]
    found_any = True
    while found_any:
        found_any = False
        for request_id in pending:
            groups = kv_cache_manager.get_block_ids(request_id)
            starts = [
                index * size
                for ids, size in zip(groups, sizes, strict=True)
                for index, block_id in enumerate(ids)
                if block_id in invalid
            ]
            if not starts:
                continue
            first = min(starts)
            blocks = {
                block_id
                for ids, size in zip(groups, sizes, strict=True)
                for block_id in ids[first // size :]
            }
            blocks.discard(kv_cache_manager.block_pool.null_block.block_id)
            spoiled[request_id] = blocks
            invalid |= blocks
            found_any = True
        pending = [request_id for request_id in pending if request_id not in spoiled]
    return spoiled
