"""Scheduling one step ahead: the next step is decided before the last one's tokens are
known. A placeholder stands for each token under way."""

from vllm.v1.core.sched.output_update import append_tokens
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus


class AsyncScheduler(Scheduler):
    """The same policy; outputs are taken in order, some steps late."""

    def _count_progress(self, request: Request, num_tokens: int) -> None:
        super()._count_progress(request, num_tokens)
        if not request.is_prefill_chunk:
            # The step reaches the last token there will be: it samples one.
            request.num_output_placeholders += 1

    def _append_tokens(self, request: Request, sampled: list[int]) -> list[int]:
        request.num_output_placeholders -= len(sampled)
        added = append_tokens(request, sampled, self.max_model_len)
        if request.num_computed_tokens and request.status != RequestStatus.PREEMPTED:
            # Blocks that these tokens complete could not be hashed when scheduled.
            computed = request.num_computed_tokens - request.num_output_placeholders
            self.kv_cache_manager.cache_blocks(
                request, min(computed, request.num_tokens)
            )
        return added
