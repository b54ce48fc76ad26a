"""Whether and how a waiting request starts: its hits, its first tokens, its blocks.

Knows one request at a time. The order of requests, and what to do when there is no
room, are the scheduler's matter.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

from vllm.utils.math_utils import round_down
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.sched.kv_transfer import NO_EXTERNAL_HIT, ExternalHit, KVTransfer
from vllm.v1.request import Request, RequestStatus


class Verdict(Enum):
    """What became of a waiting request."""

    STARTED = auto()  # it computes tokens in this step
    LOADING = auto()  # it has blocks, and waits for a connector to fill them
    LATER = auto()  # not now, but others may pass
    NO_ROOM = auto()  # blocks are short: others may not pass
    NO_BUDGET = auto()  # tokens are short: others may not pass


@dataclass(frozen=True, kw_only=True)
class Hit:
    """Tokens of a request that need no computing: cached here, then held elsewhere."""

    blocks: KVCacheBlocks
    num_local: int
    external: ExternalHit = NO_EXTERNAL_HIT


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one step may take, in tokens. Chunks of a prompt had better end at multiples
    of `step_alignment_tokens`: there the result of a step can be cached."""

    max_model_len: int
    long_prefill_token_threshold: int
    enable_chunked_prefill: bool
    reserve_full_sequence: bool
    step_alignment_tokens: int = 1

    def chunk(self, start: int, num_tokens: int, token_budget: int) -> int:
        """How many of `num_tokens` tokens from position `start` on a step takes. 0 when
        chunks are off and the budget is short."""
        if num_tokens == 1:  # a decode
            return min(1, self.max_model_len - start, token_budget)
        if 0 < self.long_prefill_token_threshold < num_tokens:
            num_tokens = self.long_prefill_token_threshold
        num_tokens = min(num_tokens, self.max_model_len - start)
        if num_tokens > token_budget and not self.enable_chunked_prefill:
            return 0
        num_tokens = min(num_tokens, token_budget)
        if num_tokens <= 1:
            return num_tokens
        # A chunk that reaches no aligned position stays as it is.
        end = round_down(start + num_tokens, self.step_alignment_tokens)
        return end - start if end > start else num_tokens


class Admission:
    """Starts waiting requests, one call each."""

    def __init__(
        self, limits: Limits, kv_cache_manager: KVCacheManager, transfer: KVTransfer
    ) -> None:
        self.limits = limits
        self.kv_cache_manager = kv_cache_manager
        self.transfer = transfer

    def is_ready(self, request: Request) -> bool:
        """Says whether a waiting request can be considered at all: no load and no
        output of an earlier run is under way. Takes in a load that is over."""
        if request.num_output_placeholders > 0:
            return False
        if request.status != RequestStatus.WAITING_FOR_REMOTE_KVS:
            return True
        request_id = request.request_id
        if request_id not in self.transfer.finished_recving:
            return False
        self.transfer.finished_recving.discard(request_id)
        request.status = (
            RequestStatus.PREEMPTED
            if request.num_preemptions
            else RequestStatus.WAITING
        )
        if request_id in self.transfer.failed_recving:
            self.transfer.failed_recving.discard(request_id)
            request.skip_external_cache = True
            self.release(request)
            return True
        self.kv_cache_manager.cache_blocks(request, request.num_computed_tokens)
        # The last token is computed again: its logits are wanted.
        request.num_computed_tokens = min(
            request.num_computed_tokens, request.num_tokens - 1
        )
        return True

    def release(self, request: Request) -> None:
        """Takes back the blocks of a waiting request; it starts from nothing again."""
        self.kv_cache_manager.free(request)
        request.num_computed_tokens = 0
        request.num_external_computed_tokens = 0
        if not request.num_preemptions:
            request.num_cached_tokens = -1

    def reclaims_blocks(
        self, waiting: Iterable[Request], keep: Request | None = None
    ) -> bool:
        """Takes back the blocks of the last waiting request that has any, because a
        connector loaded them; it is loaded again later. False when there is none."""
        if self.transfer.connector is None:
            return False
        pool = self.kv_cache_manager.block_pool
        num_free = pool.get_num_free_blocks()
        for request in reversed(list(waiting)):
            if request is not keep and self.is_ready(request):
                self.release(request)
                if pool.get_num_free_blocks() > num_free:
                    return True
        return False

    def may_get_more_blocks(self, request: Request) -> bool:
        """Says whether a waiting request could get more blocks than are free now, once
        others give theirs back."""
        blocks = self.kv_cache_manager.get_blocks(request.request_id).blocks
        own = sum(not block.is_null for group in blocks for block in group)
        pool = self.kv_cache_manager.block_pool
        return pool.get_num_free_blocks() + own < pool.num_usable_blocks

    def start(
        self,
        request: Request,
        token_budget: int,
        reserved_blocks: int,
        has_others: bool,
    ) -> tuple[Verdict, int]:
        """Gives a request its blocks and its first `num_new_tokens` tokens (the second
        value), or says why not, changing nothing."""
        hit = self._find_hit(request)
        if hit is None:
            return Verdict.LATER, 0
        num_external = hit.external.num_tokens
        start = request.num_computed_tokens + hit.num_local + num_external
        num_new_tokens = 0
        if not hit.external.load_async:
            num_new_tokens = self.limits.chunk(
                start, request.num_tokens - start, token_budget
            )
            if num_new_tokens <= 0:
                self._forget_lookup(request, hit)
                return Verdict.NO_BUDGET, 0
        new_blocks = self.kv_cache_manager.allocate_slots(
            request,
            num_new_tokens,
            num_new_computed_tokens=hit.num_local,
            new_computed_blocks=hit.blocks,
            num_external_computed_tokens=num_external,
            # Loaded content is cached when it has come.
            delay_cache_blocks=num_external > 0,
            full_sequence_must_fit=self.limits.reserve_full_sequence,
            reserved_blocks=reserved_blocks,
            has_scheduled_reqs=has_others,
        )
        if new_blocks is None:
            self._forget_lookup(request, hit)
            return Verdict.NO_ROOM, 0
        if request.num_computed_tokens == 0:
            self.transfer.allocated(request, hit.num_local, hit.external)
            request.num_external_computed_tokens = num_external
        request.num_computed_tokens = start
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = start
        if hit.external.load_async:
            request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
            return Verdict.LOADING, 0
        request.status = RequestStatus.RUNNING
        return Verdict.STARTED, num_new_tokens

    def _find_hit(self, request: Request) -> Hit | None:
        """The request's hits; None when the connector cannot tell yet."""
        if request.num_computed_tokens > 0:  # loaded while it waited
            return Hit(blocks=self.kv_cache_manager.empty_kv_cache_blocks, num_local=0)
        blocks, num_local, _ = self.kv_cache_manager.get_computed_blocks(request)
        hit = Hit(blocks=blocks, num_local=num_local)
        external = self.transfer.find(request, num_local)
        if external is None:
            self._forget_lookup(request, hit)
            return None
        return Hit(blocks=blocks, num_local=num_local, external=external)

    def _forget_lookup(self, request: Request, hit: Hit) -> None:
        """A request that waits on is looked up again: only the last time counts."""
        if request.num_computed_tokens == 0:
            self.kv_cache_manager.discard_lookup(request, hit.num_local)
