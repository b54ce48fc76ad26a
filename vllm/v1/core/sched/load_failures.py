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

    def take_loads(self, news: KVConnectorOutput | None) -> set[str]:
        """Takes in how the loads of a step went, from its output; returns the ids of
        requests of which this output is void.

        Blocks that were loaded are cached now. Requests that rest on blocks whose load
        failed start again or end, and what was computed from those is forgotten.
        """
        loads = self.admission.transfer.take_loads_of_oldest_step()
        invalid = news.invalid_block_ids if news is not None else set()
        self._end_failed_loads(news)
        failed = {req_id for req_id, ids in loads.items() if ids & invalid}
        for req_id in loads.keys() - failed:
            self._cache_loaded(self.book.requests.get(req_id))
        if not invalid:
            return set()
        # Blocks of loads within a step may belong to other requests by now. The rest
        # was loaded outside of steps, or is reported late: whoever holds it is spoiled.
        others = invalid.difference(*loads.values())
        manager = self.admission.kv_cache_manager
        unfinished = [*self.book.running, *self.book.waiting]
        spoiled = find_spoiled_blocks(unfinished, others, manager)
        # Last ones first: preempted requests keep their order at the queue's front.
        for request in reversed(unfinished):
            if request.request_id in spoiled or request.request_id in failed:
                self._restart_or_end(request)
        if spoiled:
            manager.evict_blocks(set().union(*spoiled.values()))
        logger.warning(
            "a connector failed to load %d blocks: %d requests are %s",
            len(invalid),
            len(failed | spoiled.keys()),
            "computed again" if self.recompute else "ended",
        )
        return failed | spoiled.keys()

    def _end_failed_loads(self, news: KVConnectorOutput | None) -> None:
        """Requests that wait for a load which failed as a whole."""
        for req_id in (news and news.failed_recving) or ():
            request = self.book.requests.get(req_id)
            if request is not None and not request.is_finished():
                why = news.failure_reasons.get(req_id) if news is not None else None
                logger.warning(
                    "KV of request %s could not be loaded, so it is %s: %s",
                    req_id,
                    "computed again" if self.recompute else "ended",
                    why or "its connector does not say why",
                )
                self._restart_or_end(request, why)

    def _cache_loaded(self, request: Request | None) -> None:
        if request is None or request.status != RequestStatus.RUNNING:
            return
        if not self.admission.transfer.is_loading_in_step(request.request_id):
            self.admission.kv_cache_manager.cache_blocks(
                request, min(request.num_computed_tokens, request.num_tokens)
            )

    def _restart_or_end(self, request: Request, why: str | None = None) -> None:
        if not self.recompute:
            reason = "KV of the request could not be loaded"
            request.stop_reason = f"{reason}: {why}" if why else reason
            self.book.end(request, RequestStatus.FINISHED_ERROR)
            return
        if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
            # Its blocks are free once the rest of the load is over.
            self.admission.transfer.failed_recving.add(request.request_id)
            return
        if request.status == RequestStatus.RUNNING:
            self.book.preempt(request)
        else:
            self.admission.release(request)
        # What is under way was computed from the failed blocks.
        request.drop_outputs_under_way()
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
