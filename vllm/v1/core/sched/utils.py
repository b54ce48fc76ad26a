"""When a request ends by itself."""

from collections.abc import Sequence

from vllm.sampling_params import RepetitionDetectionParams
from vllm.v1.request import Request, RequestStatus


def check_sequence_repetition(
    token_ids: Sequence[int], params: RepetitionDetectionParams
) -> bool:
    """Says whether the tokens end in `min_count` copies of one pattern, whose length is
    between `min_pattern_size` and `max_pattern_size`. False when detection is off."""
    if params.max_pattern_size <= 0 or params.min_count < 2:
        return False
    num_tokens = len(token_ids)
    longest = min(params.max_pattern_size, num_tokens // params.min_count)
    for size in range(max(params.min_pattern_size, 1), longest + 1):
        # Copies side by side: every token equals the one `size` places before it.
        first = num_tokens - size * (params.min_count - 1)
        if all(
            token_ids[i] == token_ids[i - size]
            for i in range(num_tokens - 1, first - 1, -1)
        ):
            return True
    return False


def check_stop(request: Request, max_model_len: int) -> bool:
    """Says whether the token added last ends the request, and sets its status if so.

    The length limits hold whatever `min_tokens` says; everything else waits for it.
    """
    params = request.sampling_params
    if params is None:
        raise ValueError(f"request {request.request_id!r} generates no tokens")
    num_output_tokens = request.num_output_tokens
    if num_output_tokens >= params.min_tokens:
        last = request.output_token_ids[-1]
        if not params.ignore_eos and last == params.eos_token_id:
            request.status = RequestStatus.FINISHED_STOPPED
            return True
        if params.stop_token_ids and last in params.stop_token_ids:
            request.status = RequestStatus.FINISHED_STOPPED
            request.stop_reason = last
            return True
    if request.num_tokens >= max_model_len or num_output_tokens >= request.max_tokens:
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        return True
    repetition = params.repetition_detection
    if (
        repetition is not None
        and num_output_tokens >= params.min_tokens
        and check_sequence_repetition(request.output_token_ids, repetition)
    ):
        request.status = RequestStatus.FINISHED_REPETITION
        request.stop_reason = "repetition_detected"
        return True
    return False
