"""Transfers of several workers are over when all of them say so."""

from types import SimpleNamespace

import pytest

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import TransferStats
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput


def output(rank: int, **news: object) -> ModelRunnerOutput:
    return ModelRunnerOutput(
        req_ids=[f"rank {rank}"],
        req_id_to_index={f"rank {rank}": 0},
        kv_connector_output=KVConnectorOutput(**news) if news else None,
    )


def test_a_transfer_is_over_when_all_workers_have_said_so() -> None:
    aggregator = KVOutputAggregator(2)
    first = aggregator.aggregate(
        [
            output(0, finished_sending={"a", "b"}, invalid_block_ids={1}),
            output(1, finished_sending={"a"}, finished_recving={"c"}),
        ]
    )
    news = first.kv_connector_output
    assert first.req_ids == ["rank 0"] and news.invalid_block_ids == {1}
    assert news.finished_sending == {"a"} and news.finished_recving is None
    second = aggregator.aggregate(
        [output(0, finished_recving={"c"}), output(1, finished_sending={"b"})], 1
    )
    assert second.req_ids == ["rank 1"]
    assert second.kv_connector_output.finished_sending == {"b"}
    assert second.kv_connector_output.finished_recving == {"c"}


def test_a_load_failed_when_it_failed_on_any_worker_and_all_have_ended() -> None:
    aggregator = KVOutputAggregator(2)
    first = aggregator.aggregate(
        [output(0, failed_recving={"a"}, finished_recving={"b"}), output(1)]
    ).kv_connector_output
    assert first.failed_recving is None and first.finished_recving is None
    second = aggregator.aggregate([output(0), output(1, finished_recving={"a", "b"})])
    assert second.kv_connector_output.failed_recving == {"a"}
    assert second.kv_connector_output.finished_recving == {"b"}


def test_numbers_of_workers_add_up_and_silence_changes_nothing() -> None:
    aggregator = KVOutputAggregator.from_connector(
        SimpleNamespace(get_finished_count=lambda: None), 2
    )
    stats = [TransferStats({"saved_blocks": n}) for n in (2, 3)]
    found = aggregator.aggregate(
        [output(i, kv_connector_stats=one) for i, one in enumerate(stats)]
    )
    assert found.kv_connector_output.kv_connector_stats.data == {"saved_blocks": 5}
    silent = output(0)
    assert aggregator.aggregate([silent, output(1)]) is silent
    assert aggregator.aggregate([None, output(1)]) is None


@pytest.mark.parametrize("count", [1, 3])
def test_a_connector_may_know_how_many_report(count: int) -> None:
    aggregator = KVOutputAggregator.from_connector(
        SimpleNamespace(get_finished_count=lambda: count), 2
    )
    both = [output(i, finished_sending={"a"}) for i in range(2)]
    found = aggregator.aggregate(both).kv_connector_output.finished_sending
    assert found == ({"a"} if count == 1 else None)


def test_the_reason_of_a_failed_load_is_told_once_when_it_is_over() -> None:
    aggregator = KVOutputAggregator(2)
    first = aggregator.aggregate(
        [output(0, failed_recving={"a"}, failure_reasons={"a": "why"}), output(1)]
    ).kv_connector_output
    assert first.failure_reasons == {}
    second = aggregator.aggregate([output(0), output(1, finished_recving={"a"})])
    assert second.kv_connector_output.failure_reasons == {"a": "why"}
    third = aggregator.aggregate(
        [output(rank, failed_recving={"a"}) for rank in range(2)]
    )
    assert third.kv_connector_output.failed_recving == {"a"}
    assert third.kv_connector_output.failure_reasons == {}
