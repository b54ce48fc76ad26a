"""What one step holds: budgets, order, stops and the messages around it."""

from typing import Any

import numpy as np
import pytest

from tests.v1.core.utils import (
    EOS,
    assert_nothing_leaked,
    full,
    make_engine,
    make_request,
    make_scheduler,
    mamba,
    window,
)
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import RepetitionDetectionParams, SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.sched.utils import check_sequence_repetition, check_stop
from vllm.v1.engine import EngineCoreEventType, EngineCoreRequest, FinishReason
from vllm.v1.outputs import DraftTokenIds, LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.utils import ConstantList


def answer(step: SchedulerOutput, *rows: list[int], **fields: Any) -> ModelRunnerOutput:
    """An output with these rows for the requests of a step, in their order."""
    ids = list(step.num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={req_id: i for i, req_id in enumerate(ids)},
        sampled_token_ids=list(rows),
        **fields,
    )


def add(scheduler: Scheduler, name: str, num_tokens: int, **kwargs: Any) -> Request:
    request = make_request(name, [ord(name[0])] * num_tokens, **kwargs)
    scheduler.add_request(request)
    return request


# --- budgets -------------------------------------------------------------------------


def test_prompts_are_cut_to_the_token_budget() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=32)
    add(scheduler, "a", 40)
    add(scheduler, "b", 40)
    step = scheduler.schedule()
    assert step.num_scheduled_tokens == {"a": 32}
    scheduler.update_from_output(step, answer(step, []))
    step = scheduler.schedule()
    assert step.num_scheduled_tokens == {"a": 8, "b": 24}
    scheduler.update_from_output(step, answer(step, [5], []))
    step = scheduler.schedule()
    assert step.num_scheduled_tokens == {"a": 1, "b": 16}
    assert step.total_num_scheduled_tokens == 17


def test_long_prompts_leave_room_for_others() -> None:
    scheduler = make_scheduler(long_prefill_token_threshold=20)
    for name in "abcd":
        add(scheduler, name, 50)
    step = scheduler.schedule()
    assert step.num_scheduled_tokens == {"a": 20, "b": 20, "c": 20, "d": 4}


def test_without_chunks_prompts_wait_until_they_fit_whole() -> None:
    scheduler = make_scheduler(
        max_num_batched_tokens=64, enable_chunked_prefill=False, max_model_len=64
    )
    add(scheduler, "a", 40)
    add(scheduler, "b", 40)
    add(scheduler, "c", 10)
    step = scheduler.schedule()
    assert step.num_scheduled_tokens == {"a": 40}
    scheduler.update_from_output(step, answer(step, [5]))
    assert scheduler.schedule().num_scheduled_tokens == {"a": 1, "b": 40, "c": 10}


def test_a_prompt_above_the_whole_budget_without_chunks_is_an_error() -> None:
    engine = make_engine(
        max_num_batched_tokens=16, enable_chunked_prefill=False, max_model_len=64
    )
    engine.add(make_request("a", [1] * 20))
    engine.add(make_request("b", [1] * 10))
    engine.run(max_steps=50)
    assert engine.finish_reasons["a"] == FinishReason.ERROR
    assert engine.finish_reasons["b"] == FinishReason.LENGTH


def test_requests_above_the_limit_wait_their_turn() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for name in "abc":
        add(scheduler, name, 4, max_tokens=1)
    step = scheduler.schedule()
    assert list(step.num_scheduled_tokens) == ["a", "b"]
    assert scheduler.get_request_counts() == (2, 1)
    scheduler.update_from_output(step, answer(step, [5], [5]))
    assert list(scheduler.schedule().num_scheduled_tokens) == ["c"]


def test_scheduled_token_limit_may_be_below_the_batch_limit() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=64, max_num_scheduled_tokens=10)
    add(scheduler, "a", 40)
    assert scheduler.schedule().total_num_scheduled_tokens == 10


def test_long_sequences_are_admitted_one_after_another() -> None:
    # 30 of 40 blocks each: the second would be preempted before its prompt is done.
    scheduler = make_scheduler(num_blocks=41, max_num_batched_tokens=16)
    add(scheduler, "a", 120)
    add(scheduler, "b", 120)
    for _ in range(7):
        step = scheduler.schedule()
        assert list(step.num_scheduled_tokens) == ["a"]
        scheduler.update_from_output(step, answer(step, []))
    greedy = make_scheduler(
        num_blocks=41,
        max_num_batched_tokens=16,
        long_prefill_token_threshold=8,
        scheduler_reserve_full_isl=False,
    )
    add(greedy, "a", 120)
    add(greedy, "b", 120)
    assert list(greedy.schedule().num_scheduled_tokens) == ["a", "b"]


def test_blocks_of_prompts_under_way_are_reserved() -> None:
    scheduler = make_scheduler(
        num_blocks=41, max_num_batched_tokens=16, long_prefill_token_threshold=8
    )
    add(scheduler, "a", 120)
    add(scheduler, "b", 44)
    add(scheduler, "c", 40)
    assert list(scheduler.schedule().num_scheduled_tokens) == ["a"]


def test_prompts_can_be_held_back_while_others_run() -> None:
    scheduler = make_scheduler(prefill_schedule_interval=3)
    first = add(scheduler, "a", 4)
    step = scheduler.schedule()
    add(scheduler, "b", 4)
    admitted = []
    for _ in range(3):
        scheduler.update_from_output(step, answer(step, [5], [5]))
        step = scheduler.schedule()
        admitted.append("b" in step.num_scheduled_tokens)
    assert admitted == [False, False, True]
    scheduler.update_from_output(step, answer(step, [5], [5]))
    add(scheduler, "c", 4)
    assert "c" not in scheduler.schedule(throttle_prefills=True).num_scheduled_tokens
    assert first.num_computed_tokens > 4
    idle = make_scheduler()
    add(idle, "a", 4)
    assert "a" in idle.schedule(throttle_prefills=True).num_scheduled_tokens


def test_priority_decides_who_is_admitted_first() -> None:
    scheduler = make_scheduler(policy="priority", max_num_seqs=2)
    add(scheduler, "a", 4, priority=2, arrival_time=0.0)
    add(scheduler, "b", 4, priority=1, arrival_time=2.0)
    add(scheduler, "c", 4, priority=1, arrival_time=1.0)
    assert list(scheduler.schedule().num_scheduled_tokens) == ["c", "b"]


@pytest.mark.parametrize("budget", [3, 10, 16, 64])
def test_chunks_end_where_states_can_be_cached(budget: int) -> None:
    scheduler = make_scheduler(
        full(4), mamba("align", 8), max_num_batched_tokens=budget, max_num_seqs=1
    )
    request = add(scheduler, "a", 44)
    ends = []
    while request.num_computed_tokens < 44:
        step = scheduler.schedule()
        assert step.num_scheduled_tokens["a"] > 0
        ends.append(request.num_computed_tokens)
        scheduler.update_from_output(step, answer(step, []))
    assert 40 in ends
    assert budget < 8 or all(end % 8 == 0 for end in ends[:-1])


# --- messages ------------------------------------------------------------------------


def test_workers_learn_of_new_known_and_finished_requests() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16)
    request = add(scheduler, "a", 20, max_tokens=2)
    step = scheduler.schedule()
    (new,) = step.scheduled_new_reqs
    assert (new.req_id, new.num_computed_tokens) == ("a", 0)
    assert new.block_ids == ([1, 2, 3, 4],)
    assert new.prompt_token_ids == request.prompt_token_ids
    scheduler.update_from_output(step, answer(step, []))
    step = scheduler.schedule()
    cached = step.scheduled_cached_reqs
    assert step.scheduled_new_reqs == []
    assert cached.req_ids == ["a"]
    assert cached.num_computed_tokens == [16]
    assert cached.new_block_ids == [([5],)]
    assert cached.resumed_req_ids == set()
    scheduler.update_from_output(step, answer(step, [7]))
    step = scheduler.schedule()
    assert step.scheduled_cached_reqs.num_output_tokens == [1]
    scheduler.update_from_output(step, answer(step, [7]))
    assert scheduler.has_finished_requests()
    assert not scheduler.has_unfinished_requests()
    step = scheduler.schedule()
    assert step.finished_req_ids == {"a"}
    assert step.total_num_scheduled_tokens == 0
    assert not scheduler.has_requests()
    assert scheduler.schedule().finished_req_ids == set()


def test_known_requests_without_new_blocks_say_none() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 5)
    step = scheduler.schedule()
    scheduler.update_from_output(step, answer(step, [7]))
    assert scheduler.schedule().scheduled_cached_reqs.new_block_ids == [None]


def test_resumed_requests_bring_everything_anew() -> None:
    scheduler = make_scheduler()
    request = add(scheduler, "a", 9)
    step = scheduler.schedule()
    scheduler.update_from_output(step, answer(step, [7]))
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    assert request.status == RequestStatus.PREEMPTED
    step = scheduler.schedule()
    cached = step.scheduled_cached_reqs
    assert step.scheduled_new_reqs == []
    assert cached.resumed_req_ids == {"a"}
    assert cached.all_token_ids == {"a": [ord("a")] * 9 + [7]}
    assert cached.num_computed_tokens == [0]
    assert len(cached.new_block_ids[0][0]) == 3
    assert step.num_scheduled_tokens == {"a": 10}


def test_preempted_requests_are_named() -> None:
    scheduler = make_scheduler(num_blocks=7, scheduler_reserve_full_isl=False)
    add(scheduler, "a", 12)
    add(scheduler, "b", 12)
    step = scheduler.schedule()
    scheduler.update_from_output(step, answer(step, [7], [7]))
    step = scheduler.schedule()
    assert step.preempted_req_ids == {"b"}
    assert list(step.num_scheduled_tokens) == ["a"]


def test_mixed_formats_ask_for_zeroed_blocks() -> None:
    scheduler = make_scheduler(full(4), mamba("none", 256))
    add(scheduler, "a", 6)
    step = scheduler.schedule()
    assert step.new_block_ids_to_zero == [1, 2]
    scheduler.update_from_output(step, answer(step, [7]))
    assert scheduler.schedule().new_block_ids_to_zero is None
    plain = make_scheduler(full(4), window(8))
    add(plain, "a", 6)
    assert plain.schedule().new_block_ids_to_zero is None


def test_news_go_to_the_client_that_asked() -> None:
    scheduler = make_scheduler(include_finished_set=True)
    add(scheduler, "a", 4, client_index=1, max_tokens=1)
    add(scheduler, "b", 4, client_index=2)
    step = scheduler.schedule()
    news = scheduler.update_from_output(step, answer(step, [5], [6]))
    assert [(o.request_id, o.new_token_ids) for o in news[1].outputs] == [("a", [5])]
    assert [(o.request_id, o.new_token_ids) for o in news[2].outputs] == [("b", [6])]
    assert news[1].finished_requests == {"a"}
    assert news[2].finished_requests is None


def test_first_output_tells_what_was_cached_and_what_happened() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a1", 9, max_tokens=1)
    step = scheduler.schedule()
    scheduler.update_from_output(step, answer(step, [5]))
    add(scheduler, "a2", 9, max_tokens=2)
    step = scheduler.schedule()
    (output,) = scheduler.update_from_output(step, answer(step, [5]))[0].outputs
    assert output.num_cached_tokens == 8
    assert [event.type for event in output.events] == [
        EngineCoreEventType.QUEUED,
        EngineCoreEventType.SCHEDULED,
    ]
    step = scheduler.schedule()
    (output,) = scheduler.update_from_output(step, answer(step, [5]))[0].outputs
    assert output.events is None
    assert output.finish_reason == FinishReason.LENGTH


def test_statistics_come_with_every_step() -> None:
    scheduler = make_scheduler(num_blocks=11)
    add(scheduler, "a", 16)
    add(scheduler, "b", 40)
    step = scheduler.schedule()
    stats = scheduler.update_from_output(step, answer(step, [5]))[0].scheduler_stats
    assert (stats.num_running_reqs, stats.num_waiting_reqs) == (1, 1)
    assert stats.kv_cache_usage == pytest.approx(0.4)
    assert stats.prefix_cache_stats.queries == 16
    assert make_scheduler(log_stats=False).make_stats() is None
    idle = make_scheduler()
    step = idle.schedule()
    assert idle.update_from_output(step, answer(step))[0].scheduler_stats is not None


def test_waiting_does_not_inflate_the_hit_rate() -> None:
    scheduler = make_scheduler(num_blocks=11)
    add(scheduler, "a", 30)
    add(scheduler, "b", 30)
    queries = 0
    for _ in range(5):
        step = scheduler.schedule()
        news = scheduler.update_from_output(step, answer(step, [5]))
        queries += news[0].scheduler_stats.prefix_cache_stats.queries
    assert queries == 30


def test_logprobs_follow_their_request() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 4)
    add(scheduler, "b", 4, logprobs=0)
    step = scheduler.schedule()
    logprobs = LogprobsLists(
        np.array([[5], [6]]), np.array([[-0.5], [-0.25]]), np.array([1, 2])
    )
    news = scheduler.update_from_output(step, answer(step, [5], [6], logprobs=logprobs))
    first, second = news[0].outputs
    assert first.new_logprobs is None
    assert second.new_logprobs.logprobs.tolist() == [[-0.25]]


# --- ends ----------------------------------------------------------------------------


def stopped_by(tokens: list[int], max_model_len: int = 256, **sampling: Any) -> Any:
    """Status and length of the output at which a request stops, or None."""
    request = make_request("r", [9] * 4, **{"max_tokens": 100, **sampling})
    for count, token in enumerate(tokens, start=1):
        request.append_output_token_ids(token)
        if check_stop(request, max_model_len):
            return request.status, count, request.stop_reason
    return None


STOPPED = RequestStatus.FINISHED_STOPPED
CAPPED = RequestStatus.FINISHED_LENGTH_CAPPED


@pytest.mark.parametrize(
    ("sampling", "tokens", "expected"),
    [
        ({}, [1, EOS, 2], (STOPPED, 2, None)),
        ({"ignore_eos": True}, [1, EOS, 2], None),
        ({"min_tokens": 3}, [EOS, EOS, EOS], (STOPPED, 3, None)),
        ({"stop_token_ids": [7]}, [1, 7], (STOPPED, 2, 7)),
        ({"stop_token_ids": [7], "min_tokens": 2}, [7, 1, 7], (STOPPED, 3, 7)),
        ({"ignore_eos": True, "stop_token_ids": [EOS]}, [EOS], (STOPPED, 1, EOS)),
        ({"max_tokens": 2}, [1, 2, 3], (CAPPED, 2, None)),
        ({"max_tokens": 2}, [1, EOS], (STOPPED, 2, None)),
        ({"max_tokens": None}, [1] * 300, (CAPPED, 252, None)),
        # The model's length comes before min_tokens.
        ({"min_tokens": 300, "max_tokens": 300}, [1] * 300, (CAPPED, 252, None)),
    ],
)
def test_stops(sampling: dict[str, Any], tokens: list[int], expected: Any) -> None:
    assert stopped_by(tokens, **sampling) == expected


@pytest.mark.parametrize(
    ("tokens", "sizes", "expected"),
    [
        ([1, 1, 1], (1, 1, 3), True),
        ([1, 1], (1, 1, 3), False),
        ([5, 1, 2, 1, 2, 1, 2], (1, 4, 3), True),
        ([1, 2, 1, 2, 1], (2, 2, 2), True),  # 2,1 2,1
        ([1, 2, 1, 2, 3], (1, 2, 2), False),
        ([1, 2, 3, 1, 2, 3], (0, 2, 2), False),
        ([1, 2, 3, 1, 2, 3], (0, 3, 2), True),
        ([1, 1, 1, 1], (3, 4, 2), False),
        ([1, 1], (0, 0, 0), False),
        ([1, 1], (1, 1, 1), False),
        ([], (1, 2, 2), False),
    ],
)
def test_repetition_is_of_whole_patterns_at_the_end(
    tokens: list[int], sizes: tuple[int, int, int], expected: bool
) -> None:
    low, high, count = sizes
    params = RepetitionDetectionParams(
        max_pattern_size=high, min_pattern_size=low, min_count=count
    )
    assert check_sequence_repetition(tokens, params) is expected


def test_repetition_ends_a_request() -> None:
    params = RepetitionDetectionParams(max_pattern_size=2, min_count=3)
    status, count, reason = stopped_by(
        [1, 2, 3, 2, 3, 2, 3], repetition_detection=params
    )
    assert status == RequestStatus.FINISHED_REPETITION
    assert (count, reason) == (7, "repetition_detected")


def test_tokens_after_the_end_are_dropped() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 4)
    step = scheduler.schedule()
    (output,) = scheduler.update_from_output(step, answer(step, [5, EOS, 6]))[0].outputs
    assert output.new_token_ids == [5, EOS]
    assert output.finish_reason == FinishReason.STOP
    assert_nothing_leaked(scheduler)


@pytest.mark.parametrize("state", ["waiting", "prefill", "running", "preempted"])
def test_abort_in_any_state_frees_everything(state: str) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16)
    request = add(scheduler, "a", 20)
    if state != "waiting":
        step = scheduler.schedule()
        scheduler.update_from_output(step, answer(step, []))
    if state in ("running", "preempted"):
        step = scheduler.schedule()
        scheduler.update_from_output(step, answer(step, [5]))
    if state == "preempted":
        scheduler.reset_prefix_cache(reset_running_requests=True)
    aborted = RequestStatus.FINISHED_ABORTED
    assert scheduler.finish_requests(["a", "a", "unknown"], aborted) == [request]
    assert scheduler.finish_requests("a", aborted) == []
    assert request.status == aborted
    assert_nothing_leaked(scheduler)
    assert scheduler.schedule().finished_req_ids == {"a"}


def test_abort_while_a_step_is_under_way_drops_its_output() -> None:
    scheduler = make_scheduler()
    for name in "abc":
        add(scheduler, name, 4)
    step = scheduler.schedule()
    scheduler.finish_requests("b", RequestStatus.FINISHED_ABORTED)
    news = scheduler.update_from_output(step, answer(step, [5], [6], [7]))
    assert [o.request_id for o in news[0].outputs] == ["a", "c"]
    ended = scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    assert [r.request_id for r in ended] == ["a", "c"]
    assert_nothing_leaked(scheduler)


def test_requests_are_not_ended_with_an_unfinished_status() -> None:
    with pytest.raises(ValueError, match="RUNNING"):
        make_scheduler().finish_requests("a", RequestStatus.RUNNING)


def test_requests_that_cannot_be_served_are_refused() -> None:
    scheduler = make_scheduler(max_model_len=32)
    add(scheduler, "a", 32)
    with pytest.raises(ValueError, match="in use"):
        add(scheduler, "a", 4)
    with pytest.raises(ValueError, match="33 tokens"):
        add(scheduler, "b", 33)
    pooling = Request("c", [1], None, PoolingParams())
    with pytest.raises(ValueError, match="pooling"):
        scheduler.add_request(pooling)
    assert list(scheduler.requests) == ["a"]


def test_a_prompt_of_the_models_length_gets_one_token() -> None:
    engine = make_engine(max_model_len=32)
    engine.add(make_request("a", [1] * 32, ignore_eos=True))
    engine.run(max_steps=10)
    assert len(engine.tokens["a"]) == 1
    assert engine.finish_reasons["a"] == FinishReason.LENGTH


# --- one step ahead ------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("max_model_len", [24, 256])
def test_no_step_is_wasted_on_tokens_beyond_a_length_limit(
    depth: int, max_model_len: int
) -> None:
    engine = make_engine(depth=depth, max_model_len=max_model_len)
    request = make_request("a", list(range(1, 14)), max_tokens=20, ignore_eos=True)
    engine.add(request)
    engine.run(max_steps=100)
    assert engine.worker.num_computed == request.num_tokens - 1


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_generated_blocks_are_hit_by_the_next_turn(depth: int) -> None:
    engine = make_engine(depth=depth)
    first = make_request("a", list(range(1, 14)), max_tokens=20, ignore_eos=True)
    engine.add(first)
    engine.run(max_steps=100)
    second = make_request("b", [*first.all_token_ids, 3, 4], max_tokens=1)
    engine.add(second)
    engine.run(max_steps=100)
    # All full blocks of what was computed, which is all but the last token.
    assert second.num_cached_tokens == (first.num_tokens - 1) // 4 * 4


def test_drafts_are_scheduled_and_refused_ones_taken_back() -> None:
    scheduler = make_scheduler()
    request = add(scheduler, "a", 6)
    step = scheduler.schedule()
    scheduler.update_from_output(step, answer(step, [5]))
    scheduler.update_draft_token_ids(DraftTokenIds(["a", "gone"], [[6, 7, 8], [1]]))
    step = scheduler.schedule()
    assert step.num_scheduled_tokens == {"a": 4}
    assert step.scheduled_spec_decode_tokens == {"a": [6, 7, 8]}
    scheduler.update_from_output(step, answer(step, [6, 9]))
    assert request.num_computed_tokens == 8
    assert list(request.output_token_ids) == [5, 6, 9]
    assert scheduler.schedule().num_scheduled_tokens == {"a": 1}


# --- requests ------------------------------------------------------------------------


def test_requests_are_built_from_messages() -> None:
    params = SamplingParams(
        extra_args={"kv_transfer_params": {"x": 1}}, max_tokens=None
    )
    message = EngineCoreRequest(
        "a", [1, 2], None, params, None, 1.5, cache_salt="s", client_index=3, priority=2
    )
    request = Request.from_engine_core_request(message)
    assert request.kv_transfer_params == {"x": 1}
    assert (request.client_index, request.priority) == (3, 2)
    assert (request.cache_salt, request.arrival_time) == ("s", 1.5)
    assert request.max_tokens > 10**9
    assert list(request.all_token_ids) == [1, 2]
    assert request.block_hashes == []
    with pytest.raises(ValueError, match="no prompt"):
        Request("b", None, params, None)
    with pytest.raises(ValueError, match="sampling_params"):
        Request("b", [1], None, None)


@pytest.mark.parametrize("status", RequestStatus)
def test_every_end_has_a_reason_for_clients(status: RequestStatus) -> None:
    finished = RequestStatus.is_finished(status)
    assert finished == status.name.startswith("FINISHED")
    assert (RequestStatus.get_finished_reason(status) is not None) == finished


def test_read_only_lists_follow_their_list() -> None:
    tokens = [1, 2]
    view = ConstantList(tokens)
    tokens.append(3)
    assert (len(view), view[-1], view[1:], list(view)) == (3, 3, [2, 3], [1, 2, 3])
    assert 2 in view and view.index(2) == 1 and view.copy() == tokens
    for change in (
        lambda: view.append(4),
        lambda: view.extend([4]),
        lambda: view.pop(),
        lambda: view.insert(0, 4),
        lambda: view.clear(),
        lambda: view.remove(1),
        lambda: view.__setitem__(0, 4),
        lambda: view.__delitem__(0),
    ):
        with pytest.raises(TypeError, match="read-only"):
            change()
