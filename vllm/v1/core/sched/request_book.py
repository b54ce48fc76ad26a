"""All unfinished requests: which wait, which run, and how each of them leaves.

Knows statuses and queues. Knows nothing of budgets, steps and tokens.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.kv_transfer import KVTransfer
from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus


class RequestBook:
    """Every request is in `requests` until its blocks are free, and while unfinished in
    exactly one of `waiting` and `running`.

    `finished_req_ids` are those that workers have not heard of; `finished_by_client`
    the same for clients, where they want it.
    """

    def __init__(
        self,
        policy: SchedulingPolicy,
        kv_cache_manager: KVCacheManager,
        transfer: KVTransfer,
        include_finished_set: bool,
    ) -> None:
        self.kv_cache_manager = kv_cache_manager
        self.transfer = transfer
        self.requests: dict[str, Request] = {}
        self.waiting = create_request_queue(policy)
        self.running: list[Request] = []
        self.finished_req_ids: set[str] = set()
        self.finished_by_client: defaultdict[int, set[str]] | None = (
            defaultdict(set) if include_finished_set else None
        )
        self._ended: list[tuple[Request, dict[str, Any] | None]] = []

    def add(self, request: Request) -> None:
        """Queues a new request. ValueError when its id is in use, or when a connector
        refuses it."""
        if request.request_id in self.requests:
            raise ValueError(
                f"request id {request.request_id!r} is in use: choose another one"
            )
        # A connector may refuse what the request asks of it.
        self.transfer.on_new_request(request)
        self.requests[request.request_id] = request
        self.waiting.add_request(request)

    def finish(
        self, request_ids: str | Iterable[str] | None, status: RequestStatus
    ) -> list[Request]:
        """Ends requests from outside; None means all. Returns those that it ended."""
        if not RequestStatus.is_finished(status):
            raise ValueError(
                f"status {status} does not end a request: expected FINISHED_*"
            )
        if isinstance(request_ids, str):
            request_ids = (request_ids,)
        ids = list(self.requests) if request_ids is None else dict.fromkeys(request_ids)
        known = (self.requests.get(req_id) for req_id in ids)
        ending = [r for r in known if r is not None and not r.is_finished()]
        self.leave_queues(ending)
        for request in ending:
            self.let_go(request, status)
        return ending

    def end(self, request: Request, status: RequestStatus) -> None:
        """Ends a request by the scheduler's own decision: `take_ended` reports it."""
        self.leave_queues([request])
        self._ended.append((request, self.let_go(request, status)))

    def preempt(self, request: Request, drop_stale_output: bool = False) -> None:
        """Takes a running request's blocks and puts it back in the queue. Outputs under
        way still count, unless `drop_stale_output`."""
        self.running.remove(request)
        self.kv_cache_manager.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_external_computed_tokens = 0
        request.num_preemptions += 1
        request.spec_token_ids = []
        if drop_stale_output:
            request.drop_outputs_under_way()
        self.waiting.prepend_request(request)

    def leave_queues(self, requests: list[Request]) -> None:
        """Takes requests out of whichever queue they are in."""
        if self.waiting.remove_requests(requests) < len(requests):
            gone = {id(request) for request in requests}
            self.running[:] = [r for r in self.running if id(r) not in gone]

    def let_go(
        self, request: Request, status: RequestStatus | None = None
    ) -> dict[str, Any] | None:
        """Frees a request that ends, now or after the transfers that use its blocks.

        Without `status` the request is finished already. Returns what the connector
        tells the client.
        """
        req_id, transfer = request.request_id, self.transfer
        is_loading = (
            request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
            and req_id not in transfer.finished_recving
        )
        transfer.finished_recving.discard(req_id)
        transfer.failed_recving.discard(req_id)
        if status is not None:
            request.status = status
        is_sending, params = transfer.request_finished(request)
        self.finished_req_ids.add(req_id)
        if self.finished_by_client is not None:
            self.finished_by_client[request.client_index].add(req_id)
        if is_loading or is_sending:
            transfer.hold(req_id, is_loading + is_sending)
        else:
            self._forget(request)
        return params

    def take_transfers(self, news: KVConnectorOutput) -> None:
        """Takes in which loads and saves are over."""
        if self.transfer.connector is not None:
            self.transfer.connector.update_connector_output(news)
        loaded = news.finished_recving or set()
        for req_id in loaded | (news.failed_recving or set()):
            request = self.requests.get(req_id)
            if request is None:
                continue
            if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
                self.transfer.finished_recving.add(req_id)
            elif self.transfer.release(req_id):
                self._forget(request)
        for req_id in news.finished_sending or ():
            request = self.requests.get(req_id)
            if request is not None and self.transfer.release(req_id):
                self._forget(request)

    def take_finished_req_ids(self) -> set[str]:
        """Requests that workers may forget."""
        taken, self.finished_req_ids = self.finished_req_ids, set()
        return taken

    def take_finished_by_client(self) -> dict[int, set[str]]:
        """Finished requests for each client that wants to hear of them."""
        if not self.finished_by_client:
            return {}
        taken, self.finished_by_client = self.finished_by_client, defaultdict(set)
        return taken

    def take_ended(self) -> list[tuple[Request, dict[str, Any] | None]]:
        """Requests that `end` ended, with what their clients are told of transfers."""
        taken, self._ended = self._ended, []
        return taken

    def _forget(self, request: Request) -> None:
        self.kv_cache_manager.free(request)
        del self.requests[request.request_id]
