"""From a model's output to the news of a request and of a client. Knows no queue and no
block."""

from typing import Any

from vllm.v1.core.sched.utils import check_stop
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request


def append_tokens(
    request: Request, token_ids: list[int], max_model_len: int
) -> list[int]:
    """Adds sampled tokens one by one until one of them ends the request, whose status
    then tells why. Returns the tokens added."""
    for count, token_id in enumerate(token_ids, start=1):
        request.append_output_token_ids(token_id)
        if check_stop(request, max_model_len):
            return token_ids[:count]
    return token_ids


def make_output(
    request: Request,
    new_token_ids: list[int],
    runner_output: ModelRunnerOutput | None = None,
    kv_transfer_params: dict[str, Any] | None = None,
) -> EngineCoreOutput | None:
    """The news of a request, or None when there is none: no token, no prompt logprobs
    and no end."""
    logprobs = prompt_logprobs = None
    if runner_output is not None:
        request_id = request.request_id
        prompt_logprobs = runner_output.prompt_logprobs_dict.get(request_id)
        params = request.sampling_params
        wants_logprobs = params is not None and params.logprobs is not None
        if wants_logprobs and new_token_ids and runner_output.logprobs is not None:
            logprobs = runner_output.logprobs.slice_request(
                runner_output.req_id_to_index[request_id], len(new_token_ids)
            )
    finish_reason = request.get_finished_reason() if request.is_finished() else None
    if not new_token_ids and prompt_logprobs is None and finish_reason is None:
        return None
    return EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=new_token_ids,
        new_logprobs=logprobs,
        new_prompt_logprobs_tensors=prompt_logprobs,
        finish_reason=finish_reason,
        stop_reason=request.stop_reason,
        events=request.take_events(),
        kv_transfer_params=kv_transfer_params,
        trace_headers=dict(request.trace_headers) if request.trace_headers else None,
        num_cached_tokens=max(request.num_cached_tokens, 0),
        num_external_computed_tokens=request.num_external_computed_tokens,
    )


def wrap_outputs(
    news: dict[int, list[EngineCoreOutput]],
    finished_by_client: dict[int, set[str]],
    stats: SchedulerStats | None,
) -> dict[int, EngineCoreOutputs]:
    """One message for each client index with news; statistics go to one client."""
    wrapped = {
        client: EngineCoreOutputs(outputs=outputs) for client, outputs in news.items()
    }
    for client, finished in finished_by_client.items():
        message = wrapped.setdefault(client, EngineCoreOutputs(outputs=[]))
        message.finished_requests = finished
    if stats is not None:
        if not wrapped:
            wrapped[0] = EngineCoreOutputs(outputs=[])
        next(iter(wrapped.values())).scheduler_stats = stats
    return wrapped
