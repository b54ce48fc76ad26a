"""Turns the news of requests into statistics of a step. Knows clocks, keeps no
state."""

from vllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    FinishReason,
)
from vllm.v1.metrics.stats import (
    FinishedRequestStats,
    IterationStats,
    RequestStateStats,
)


def record_output(
    stats: IterationStats,
    request: RequestStateStats,
    output: EngineCoreOutput,
    core_timestamp: float,
    num_prompt_tokens: int,
    is_prefilling: bool,
) -> None:
    """Counts the tokens of an output. `core_timestamp` is on the core's clock;
    `is_prefilling` says that the request had no output token before."""
    num_new_tokens = len(output.new_token_ids)
    if output.events:
        record_events(stats, request, output.events)
    if num_new_tokens == 0:
        return
    stats.num_generation_tokens += num_new_tokens
    request.num_generation_tokens += num_new_tokens
    if is_prefilling:
        stats.num_prompt_tokens += num_prompt_tokens
        stats.num_cached_prompt_tokens += output.num_cached_tokens
        stats.num_external_prompt_tokens += output.num_external_computed_tokens
        latency = stats.iteration_timestamp - request.arrival_time
        stats.time_to_first_tokens_iter.append(latency)
        request.first_token_latency = latency
        request.first_token_ts = core_timestamp
    else:
        gap = (core_timestamp - request.last_token_ts) / num_new_tokens
        stats.inter_token_latencies_iter.extend([gap] * num_new_tokens)
    request.last_token_ts = core_timestamp


def record_events(
    stats: IterationStats, request: RequestStateStats, events: list[EngineCoreEvent]
) -> None:
    """Keeps when the request was queued and first scheduled; counts preemptions."""
    for event in events:
        if event.type == EngineCoreEventType.QUEUED:
            request.queued_ts = event.timestamp
        elif event.type == EngineCoreEventType.SCHEDULED:
            if request.scheduled_ts == 0.0:  # not again after a preemption
                request.scheduled_ts = event.timestamp
        elif event.type == EngineCoreEventType.PREEMPTED:
            stats.num_preempted_reqs += 1


def record_finished(
    stats: IterationStats,
    request: RequestStateStats,
    finish_reason: FinishReason,
    num_prompt_tokens: int,
    num_cached_tokens: int,
    max_tokens_param: int | None,
    n_param: int = 1,
) -> None:
    """Adds the totals of a request that has ended."""
    decode_time = request.last_token_ts - request.first_token_ts
    num_gaps = request.num_generation_tokens - 1
    stats.finished_requests.append(
        FinishedRequestStats(
            finish_reason=str(finish_reason),
            e2e_latency=stats.iteration_timestamp - request.arrival_time,
            num_prompt_tokens=num_prompt_tokens,
            num_generation_tokens=request.num_generation_tokens,
            max_tokens_param=max_tokens_param,
            n_param=n_param,
            queued_time=_span(request.queued_ts, request.scheduled_ts),
            prefill_time=_span(request.scheduled_ts, request.first_token_ts),
            inference_time=_span(request.scheduled_ts, request.last_token_ts),
            decode_time=decode_time,
            mean_time_per_output_token=decode_time / num_gaps if num_gaps > 0 else 0.0,
            num_cached_tokens=num_cached_tokens,
        )
    )


def _span(start: float, end: float) -> float:
    """Seconds from start to end; 0 when the request never got that far."""
    return max(0.0, end - start) if start and end else 0.0
