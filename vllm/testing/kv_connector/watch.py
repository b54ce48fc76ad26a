"""Listens to what a connector answers, on both sides, and holds it to the interface.

Knows the rules of KVConnectorBase_V1. Knows nothing of bytes.
"""

from collections.abc import Callable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
    supports_hma,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.testing.kv_connector.report import Report


def _replace(connector: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Puts a listener in the place of a method of one object."""
    setattr(connector, name, make(getattr(connector, name)))


def _as_seen(step: Any) -> Any:
    """What a connector must leave as it is."""
    cached = step.scheduled_cached_reqs
    return (
        [
            (new.req_id, new.block_ids, new.num_computed_tokens)
            for new in step.scheduled_new_reqs
        ],
        list(cached.req_ids),
        [blocks and tuple(map(tuple, blocks)) for blocks in cached.new_block_ids],
        list(cached.num_computed_tokens),
        dict(step.num_scheduled_tokens),
        step.total_num_scheduled_tokens,
        set(step.finished_req_ids),
    )


class SchedulerWatch:
    """The scheduler side: promises, allocations and endings of requests."""

    def __init__(self, connector: Any, report: Report) -> None:
        self.report = report
        #: Requests whose blocks are kept, and those that wait for a load.
        self.kept: set[str] = set()
        self.awaited: set[str] = set()
        #: Tokens that a load promised, by request.
        self.loaded: dict[str, range] = {}
        self._local: dict[str, int] = {}
        self._is_async: dict[str, bool] = {}
        _replace(connector, "get_num_new_matched_tokens", self._matched)
        _replace(connector, "update_state_after_alloc", self._allocated)
        _replace(connector, "build_connector_meta", self._built)
        name = "request_finished"
        if supports_hma(connector):
            name = "request_finished_all_groups"
        _replace(connector, name, self._finished)

    def _matched(self, ask: Any) -> Any:
        def listen(request: Any, num_computed_tokens: int) -> Any:
            answer = ask(request, num_computed_tokens)
            again = ask(request, num_computed_tokens)
            who = f"get_num_new_matched_tokens of request {request.request_id}"
            add = self.report.add
            if answer != again and None not in (answer[0], again[0]):
                add(
                    "side effects",
                    f"{who} says {answer}, and asked again at once {again}: it may be "
                    "asked any number of times, and must not change anything",
                )
            num_tokens, is_async = again
            if not num_tokens:
                if is_async:
                    add(
                        "bad answer",
                        f"{who} says {again}: without tokens there is no load, so the "
                        "second value must be False",
                    )
            elif (
                num_tokens < 0 or num_computed_tokens + num_tokens > request.num_tokens
            ):
                add(
                    "bad answer",
                    f"{who} promises {num_tokens} tokens after {num_computed_tokens}, "
                    f"but it has {request.num_tokens}",
                )
            self._local[request.request_id] = num_computed_tokens
            self._is_async[request.request_id] = bool(is_async)
            self.report.num_promised += num_tokens or 0
            return again

        return listen

    def _allocated(self, tell: Any) -> Any:
        def listen(request: Any, blocks: Any, num_external_tokens: int) -> None:
            request_id = request.request_id
            if num_external_tokens:
                start = self._local[request_id]
                self.loaded[request_id] = range(start, start + num_external_tokens)
                self.report.num_loaded += num_external_tokens
                if self._is_async[request_id]:
                    self.awaited.add(request_id)
            else:
                self.loaded.pop(request_id, None)
            tell(request, blocks, num_external_tokens)

        return listen

    def _built(self, build: Any) -> Any:
        def listen(scheduler_output: Any) -> Any:
            before = _as_seen(scheduler_output)
            orders = build(scheduler_output)
            if _as_seen(scheduler_output) != before:
                self.report.add(
                    "changed input",
                    "build_connector_meta changed the SchedulerOutput, which is what "
                    "the workers go by",
                )
            if not isinstance(orders, KVConnectorMetadata):
                self.report.add(
                    "bad answer",
                    f"build_connector_meta returns {type(orders).__name__}: expected "
                    "a KVConnectorMetadata, also where there is nothing to do",
                )
            return orders

        return listen

    def _finished(self, tell: Any) -> Any:
        def listen(request: Any, block_ids: Any) -> Any:
            answer = tell(request, block_ids)
            is_pair = isinstance(answer, tuple) and len(answer) == 2
            if not is_pair or not isinstance(answer[1], dict | None):
                self.report.add(
                    "bad answer",
                    f"the end of request {request.request_id} is answered by "
                    f"{answer!r}: expected (keep the blocks, kv_transfer_params)",
                )
                return False, None
            if answer[0]:
                self.kept.add(request.request_id)
            return answer

        return listen


class WorkerWatch:
    """The worker side: which transfers are over, and what it tells of itself."""

    def __init__(self, connector: Any, report: Report) -> None:
        self.connector, self.report = connector, report
        self.sent: list[str] = []
        self.received: list[str] = []
        _replace(connector, "get_transfer_results", self._results)
        _replace(connector, "get_kv_connector_stats", self._stats)
        _replace(connector, "build_connector_worker_meta", self._news)

    def _results(self, ask: Any) -> Any:
        def listen(finished_req_ids: set[str]) -> Any:
            results = ask(finished_req_ids)
            self.sent += results.finished_sending
            self.received += results.finished_recving | results.failed_recving
            return results

        return listen

    def _stats(self, ask: Any) -> Any:
        def listen() -> Any:
            stats = ask()
            if stats is None:
                return None
            if not isinstance(stats, KVConnectorStats):
                self.report.add(
                    "bad answer",
                    f"get_kv_connector_stats returns {type(stats).__name__}: expected "
                    "KVConnectorStats or None",
                )
                return None
            rebuilt = type(self.connector).build_kv_connector_stats(stats.to_dict())
            if rebuilt is None or rebuilt.reduce() != stats.reduce():
                self.report.add(
                    "lost statistics",
                    "build_kv_connector_stats does not give back what to_dict gave: "
                    "they would not reach /metrics",
                )
            return stats

        return listen

    def _news(self, ask: Any) -> Any:
        def listen() -> Any:
            news = ask()
            if news is not None and not isinstance(news, KVConnectorWorkerMetadata):
                self.report.add(
                    "bad answer",
                    f"build_connector_worker_meta returns {type(news).__name__}: "
                    "expected a KVConnectorWorkerMetadata or None",
                )
            return news

        return listen

    def check(self, scheduler: SchedulerWatch) -> None:
        """Compares both sides, once all transfers are over."""
        for what, named, expected in (
            ("sent", self.sent, scheduler.kept),
            ("received", self.received, scheduler.awaited),
        ):
            for request_id in sorted(expected - set(named)):
                self.report.add(
                    "endless transfer",
                    f"request {request_id} was never named as {what} by "
                    "get_finished: its blocks stay taken for ever",
                )
            for request_id in sorted(set(named) - expected):
                self.report.add(
                    "unasked transfer",
                    f"get_finished names request {request_id} as {what}, but nothing "
                    "waits for it",
                )

    def shut_down(self) -> None:
        for _ in range(2):
            try:
                self.connector.shutdown()
            except Exception as error:
                self.report.add(
                    "bad end", f"shutdown fails, or cannot be called twice: {error!r}"
                )
