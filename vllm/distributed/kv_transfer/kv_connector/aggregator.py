"""One answer from the connectors of several workers. Knows counts, not transfers."""

from collections import Counter
from dataclasses import replace
from typing import Any

from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput


class KVOutputAggregator:
    """Reports a transfer as over when every worker has said so."""

    def __init__(self, expected_finished_count: int) -> None:
        self._expected = expected_finished_count
        self._sent: Counter[str] = Counter()
        self._received: Counter[str] = Counter()
        self._failed: set[str] = set()
        self._reasons: dict[str, str] = {}

    @classmethod
    def from_connector(cls, connector: Any, world_size: int) -> "KVOutputAggregator":
        """As many reports as the connector says, or one from each worker."""
        return cls(connector.get_finished_count() or world_size)

    def aggregate(
        self, outputs: list[ModelRunnerOutput | None], output_rank: int = 0
    ) -> ModelRunnerOutput | None:
        """The output of `output_rank`, with the connector news of all workers."""
        chosen = outputs[output_rank]
        if chosen is None:
            return None
        news = [
            output.kv_connector_output
            for output in outputs
            if output is not None and output.kv_connector_output is not None
        ]
        if not news:
            return chosen
        return replace(chosen, kv_connector_output=self._combine(news))

    def _combine(self, news: list[KVConnectorOutput]) -> KVConnectorOutput:
        combined = KVConnectorOutput()
        for one in news:
            # A worker may know better how many will report.
            self._expected = one.expected_finished_count or self._expected
            combined.invalid_block_ids |= one.invalid_block_ids
            combined.kv_connector_stats = _together(
                combined.kv_connector_stats, one.kv_connector_stats
            )
            combined.kv_connector_worker_meta = _together(
                combined.kv_connector_worker_meta, one.kv_connector_worker_meta
            )
            combined.kv_cache_events = combined.kv_cache_events or one.kv_cache_events
        combined.finished_sending = self._count(
            self._sent, [one.finished_sending for one in news]
        )
        # A load is over once every worker's is; it failed when any of them did.
        self._failed.update(*(one.failed_recving or () for one in news))
        over = self._count(
            self._received,
            [(n.finished_recving or set()) | (n.failed_recving or set()) for n in news],
        )
        combined.failed_recving = (over or set()) & self._failed or None
        combined.finished_recving = (over or set()) - self._failed or None
        for one in news:
            self._reasons.update(one.failure_reasons)
        combined.failure_reasons = {
            req_id: self._reasons.pop(req_id)
            for req_id in combined.failed_recving or ()
            if req_id in self._reasons
        }
        self._failed -= over or set()
        return combined

    def _count(
        self, counts: Counter[str], reports: list[set[str] | None]
    ) -> set[str] | None:
        for report in reports:
            counts.update(report or ())
        over = {req_id for req_id, count in counts.items() if count >= self._expected}
        for req_id in over:
            del counts[req_id]
        return over or None


def _together(mine: Any, theirs: Any) -> Any:
    if mine is None or theirs is None:
        return theirs if mine is None else mine
    return mine.aggregate(theirs)
