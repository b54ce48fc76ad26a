"""The step under construction: what was taken so far, and the message it becomes."""

from dataclasses import dataclass, field

from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import (
    CachedRequestData,
    NewRequestData,
    SchedulerOutput,
)
from vllm.v1.request import Request


@dataclass(kw_only=True)
class StepPlan:
    """Requests of one step by what workers must be told about them.

    `new`: seen for the first time. `resumed`: known, with new blocks for everything.
    `running`: known, with the blocks that this step adds. `blocks` holds all blocks of
    the first two and the added ones of the third.
    """

    token_budget: int
    timestamp: float
    new: list[Request] = field(default_factory=list)
    resumed: list[Request] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    # Waiting requests that cannot start yet and let others pass.
    skipped: list[Request] = field(default_factory=list)
    num_tokens: dict[str, int] = field(default_factory=dict)
    blocks: dict[str, KVCacheBlocks] = field(default_factory=dict)
    drafts: dict[str, list[int]] = field(default_factory=dict)

    def take(self, request: Request, num_tokens: int, blocks: KVCacheBlocks) -> None:
        """Counts a request's tokens against the budget."""
        self.num_tokens[request.request_id] = num_tokens
        self.blocks[request.request_id] = blocks
        self.token_budget -= num_tokens
        if not request.spec_token_ids:
            return
        num_drafts = request.num_computed_tokens + num_tokens - request.num_tokens
        if num_drafts > 0:
            self.drafts[request.request_id] = request.spec_token_ids[:num_drafts]
        request.spec_token_ids = []

    @property
    def scheduled(self) -> list[Request]:
        """All requests that compute tokens in this step."""
        return [*self.running, *self.resumed, *self.new]

    def to_output(
        self,
        *,
        num_groups: int,
        finished_req_ids: set[str],
        new_block_ids_to_zero: list[int],
    ) -> SchedulerOutput:
        """The message to the workers. Comes before progress is counted: workers are
        told how many tokens are computed when the step starts."""
        new = [
            NewRequestData.from_request(r, self.blocks[r.request_id].get_block_ids())
            for r in self.new
        ]
        return SchedulerOutput(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=self._cached_request_data(),
            num_scheduled_tokens=self.num_tokens,
            total_num_scheduled_tokens=sum(self.num_tokens.values()),
            scheduled_spec_decode_tokens=self.drafts,
            scheduled_encoder_inputs={},
            num_common_prefix_blocks=[0] * num_groups,
            finished_req_ids=finished_req_ids,
            free_encoder_mm_hashes=[],
            preempted_req_ids={request.request_id for request in self.preempted},
            new_block_ids_to_zero=new_block_ids_to_zero or None,
        )

    def _cached_request_data(self) -> CachedRequestData:
        requests = [*self.running, *self.resumed]
        ids = [request.request_id for request in requests]
        resumed_ids = {request.request_id for request in self.resumed}
        return CachedRequestData(
            req_ids=ids,
            resumed_req_ids=resumed_ids,
            # Workers append what they sample themselves.
            new_token_ids=[[] for _ in requests],
            all_token_ids={
                request.request_id: request.all_token_ids.copy()
                for request in self.resumed
            },
            new_block_ids=[
                self.blocks[req_id].get_block_ids(allow_none=req_id not in resumed_ids)
                for req_id in ids
            ],
            num_computed_tokens=[request.num_computed_tokens for request in requests],
            num_output_tokens=[
                request.num_output_tokens + request.num_output_placeholders
                for request in requests
            ],
        )
