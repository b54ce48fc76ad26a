"""Which requests compute which tokens in the next step.

Knows requests, budgets and queues. Knows no block, no byte and no device: blocks are
the KV cache manager's matter, loads and saves the connector's.
"""

import time
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_events import EventPublisherFactory, KVEventBatch
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_setup import build_kv_cache_manager, resolve_block_sizes
from vllm.v1.core.sched.admission import Admission, Limits, Verdict
from vllm.v1.core.sched.interface import SchedulerInterface
from vllm.v1.core.sched.kv_transfer import KVTransfer, create_connector
from vllm.v1.core.sched.load_failures import LoadFailures
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.output_update import append_tokens, make_output, wrap_outputs
from vllm.v1.core.sched.request_book import RequestBook
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.step import StepPlan
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.metrics.stats import PrefixCacheStats, SchedulerStats
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

logger = init_logger(__name__)


class Scheduler(SchedulerInterface):
    """Continuous batching: every step mixes prompts, in chunks, with decodes.

    Running requests come first, in the order of the policy; when blocks run out, the
    last of them gives its blocks back and waits at the front of the queue. What it
    computed is computed again, or found in the prefix cache.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        structured_output_manager: StructuredOutputManager,
        block_size: int,
        hash_block_size: int | None = None,
        mm_registry: Any = None,
        include_finished_set: bool = False,
        log_stats: bool = False,
    ) -> None:
        self.vllm_config = vllm_config
        self.kv_cache_config = kv_cache_config
        self.structured_output_manager = structured_output_manager
        self.log_stats = log_stats
        self.scheduler_config = config = vllm_config.scheduler_config
        self.max_model_len = vllm_config.model_config.max_model_len
        self.max_num_running_reqs = config.max_num_seqs
        self.max_num_scheduled_tokens = (
            config.max_num_scheduled_tokens or config.max_num_batched_tokens
        )
        self.block_size, self.hash_block_size = resolve_block_sizes(
            vllm_config, kv_cache_config, block_size, hash_block_size
        )
        self.kv_cache_manager = build_kv_cache_manager(
            vllm_config,
            kv_cache_config,
            self.block_size,
            self.hash_block_size,
            log_stats,
        )
        self.transfer = KVTransfer(
            create_connector(vllm_config, kv_cache_config), self.kv_cache_manager
        )
        self.kv_event_publisher = EventPublisherFactory.create(
            vllm_config.kv_events_config, vllm_config.parallel_config.data_parallel_rank
        )
        self.limits = Limits(
            max_model_len=self.max_model_len,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            enable_chunked_prefill=config.enable_chunked_prefill,
            reserve_full_sequence=config.scheduler_reserve_full_isl,
            step_alignment_tokens=self.kv_cache_manager.coordinator.step_alignment_tokens,
        )
        self.admission = Admission(self.limits, self.kv_cache_manager, self.transfer)
        self.policy = SchedulingPolicy(config.policy)
        self.book = RequestBook(
            self.policy, self.kv_cache_manager, self.transfer, include_finished_set
        )
        self.load_failures = LoadFailures(
            vllm_config.kv_transfer_config, self.book, self.admission
        )
        self.requests = self.book.requests
        self.waiting = self.book.waiting
        self.running = self.book.running
        self._num_steps = 0

    @property
    def connector(self) -> Any:
        """The KV connector's scheduler side, or None."""
        return self.transfer.connector

    @connector.setter
    def connector(self, connector: Any) -> None:
        self.transfer.connector = connector

    # --- the next step ----------------------------------------------------------------

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        self.kv_cache_manager.new_step_starts()
        plan = StepPlan(
            token_budget=self.max_num_scheduled_tokens, timestamp=time.monotonic()
        )
        self._grow_running(plan)
        # Blocks are short after a preemption: what is free is for those that run.
        if not plan.preempted and not self._holds_back_prefills(throttle_prefills):
            self._admit_waiting(plan)
        output = plan.to_output(
            num_groups=len(self.kv_cache_config.kv_cache_groups),
            finished_req_ids=self.book.take_finished_req_ids(),
            new_block_ids_to_zero=self.kv_cache_manager.take_new_block_ids(),
        )
        output.kv_connector_metadata = self.transfer.build_meta(output)
        self.transfer.step_is_decided()
        self._num_steps += 1
        for request in plan.scheduled:
            self._count_progress(request, plan.num_tokens[request.request_id])
        return output

    def _grow_running(self, plan: StepPlan) -> None:
        """Gives running requests their next tokens. Victims come last in the order, so
        none of them has been given tokens in this step."""
        if self.policy is SchedulingPolicy.PRIORITY:
            self.running.sort()
        index = 0
        while index < len(self.running) and plan.token_budget > 0:
            request = self.running[index]
            index += 1
            num_new_tokens = self._num_tokens_to_grow(request, plan.token_budget)
            if num_new_tokens == 0:
                continue
            blocks = self._grow(request, num_new_tokens, plan)
            if blocks is None:
                return
            plan.running.append(request)
            plan.take(request, num_new_tokens, blocks)

    def _num_tokens_to_grow(self, request: Request, token_budget: int) -> int:
        """Tokens of a running request for this step; 0 when it waits for outputs under
        way that will end it."""
        under_way = request.num_output_placeholders
        if under_way and (
            request.num_output_tokens + under_way >= request.max_tokens
            or request.num_tokens + under_way >= self.max_model_len
        ):
            return 0
        known = request.num_tokens_with_spec + under_way
        start = request.num_computed_tokens
        return self.limits.chunk(start, known - start, token_budget)

    def _grow(
        self, request: Request, num_new_tokens: int, plan: StepPlan
    ) -> KVCacheBlocks | None:
        """Extends a request's blocks. Until there is room, requests give theirs back in
        the reverse order of the policy: those that wait with loaded blocks, then
        running ones. None when the request had to give back its own."""
        while True:
            blocks = self.kv_cache_manager.allocate_slots(
                request,
                num_new_tokens,
                delay_cache_blocks=self.transfer.is_loading_in_step(request.request_id),
            )
            if blocks is not None:
                return blocks
            if self.admission.reclaims_blocks(self.waiting):
                continue
            victim = self.running[-1]
            self._preempt_request(victim, plan.timestamp)
            plan.preempted.append(victim)
            if victim is request:
                return None

    def _preempt_request(
        self, request: Request, timestamp: float, drop_stale_output: bool = False
    ) -> None:
        """Takes a running request's blocks; it waits at the front of the queue."""
        self.book.preempt(request, drop_stale_output)
        if self.log_stats:
            request.record_event(EngineCoreEventType.PREEMPTED, timestamp)

    def _holds_back_prefills(self, throttle_prefills: bool) -> bool:
        """Says whether running requests have this step to themselves."""
        interval = self.scheduler_config.prefill_schedule_interval
        return bool(self.running) and (
            throttle_prefills or self._num_steps % interval != 0
        )

    def _admit_waiting(self, plan: StepPlan) -> None:
        """Starts waiting requests in the order of the queue while there is room."""
        while (
            self.waiting
            and plan.token_budget > 0
            and len(self.running) < self.max_num_running_reqs
        ):
            request = self.waiting.peek_request()
            if not self.admission.is_ready(request):
                plan.skipped.append(self.waiting.pop_request())
                continue
            verdict, num_new_tokens = self.admission.start(
                request,
                plan.token_budget,
                self._num_reserved_blocks(),
                has_others=bool(self.running),
            )
            if verdict in (Verdict.NO_ROOM, Verdict.NO_BUDGET):
                self.waiting.prepend_requests(plan.skipped)
                plan.skipped.clear()
                if self._makes_room(request):
                    continue
                break
            self.waiting.pop_request()
            if verdict is Verdict.STARTED:
                self._start(request, num_new_tokens, plan)
            else:
                plan.skipped.append(request)
        self.waiting.prepend_requests(plan.skipped)

    def _start(self, request: Request, num_new_tokens: int, plan: StepPlan) -> None:
        self.running.append(request)
        (plan.resumed if request.num_preemptions else plan.new).append(request)
        blocks = self.kv_cache_manager.get_blocks(request.request_id)
        plan.take(request, num_new_tokens, blocks)
        if self.log_stats:
            request.record_event(EngineCoreEventType.SCHEDULED, plan.timestamp)

    def _num_reserved_blocks(self) -> int:
        """Blocks that running requests still need for tokens they have: a request that
        is admitted leaves them alone, or it would be preempted soon."""
        if not self.limits.reserve_full_sequence:
            return 0
        return sum(
            self.kv_cache_manager.num_blocks_short_of(request, request.num_tokens)
            for request in self.running
            if request.num_tokens - request.num_computed_tokens > 1
        )

    def _makes_room(self, request: Request) -> bool:
        """Sees to it that the first waiting request does not wait for ever.

        While anything runs, blocks will come free. Otherwise another waiting request
        whose blocks are loaded gives them up; and when there is none, the request is
        ended if even the whole pool does not hold it. Says whether to go on admitting.
        """
        if self.running:
            return False
        if self.admission.reclaims_blocks(self.waiting, keep=request):
            return True
        if self.admission.may_get_more_blocks(request):
            return False  # transfers under way hold the rest
        logger.error(
            "request %s is ended: its %d tokens do not fit, though nothing else runs "
            "(%d blocks, %d tokens a step). Give the KV cache more memory or lower "
            "--max-model-len",
            request.request_id,
            request.num_tokens,
            self.kv_cache_manager.block_pool.num_usable_blocks,
            self.max_num_scheduled_tokens,
        )
        # What was generated so far stands: the text is cut, as at a length limit.
        self.book.end(
            request,
            RequestStatus.FINISHED_LENGTH_CAPPED
            if request.num_output_tokens
            else RequestStatus.FINISHED_ERROR,
        )
        return True

    def _count_progress(self, request: Request, num_tokens: int) -> None:
        """Counts scheduled tokens as computed: the next step goes on from there."""
        request.num_computed_tokens += num_tokens
        request.is_prefill_chunk = request.num_computed_tokens < (
            request.num_tokens + request.num_output_placeholders
        )

    # --- what a step brought ----------------------------------------------------------

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        transfers = model_runner_output.kv_connector_output
        void = self.load_failures.take_loads(transfers)
        news: defaultdict[int, list[EngineCoreOutput]] = defaultdict(list)
        sampled_rows = model_runner_output.sampled_token_ids
        stopped: list[Request] = []
        for req_id in scheduler_output.num_scheduled_tokens:
            request = self.requests.get(req_id)
            if request is None or request.is_finished():
                continue  # ended from outside while the step was under way
            row = model_runner_output.req_id_to_index[req_id]
            sampled = sampled_rows[row] if sampled_rows else []
            if sampled and request.num_stale_outputs:
                request.num_stale_outputs -= 1
                continue
            if req_id in void:
                continue
            output = self._take_sampled(
                request, sampled, scheduler_output, model_runner_output
            )
            if output is not None:
                news[request.client_index].append(output)
                if output.finish_reason is not None:
                    stopped.append(request)
        self.book.leave_queues(stopped)
        if transfers is not None:
            self.book.take_transfers(transfers)
        for request, params in self.book.take_ended():
            ended = make_output(request, [], kv_transfer_params=params)
            if ended is not None:
                news[request.client_index].append(ended)
        self._publish_events()
        stats = self.make_stats(
            kv_connector_stats=self.transfer.take_connector_stats(transfers)
        )
        return wrap_outputs(news, self.book.take_finished_by_client(), stats)

    def _take_sampled(
        self,
        request: Request,
        sampled: list[int],
        scheduler_output: SchedulerOutput,
        model_runner_output: ModelRunnerOutput,
    ) -> EngineCoreOutput | None:
        """Adds sampled tokens to a request, and lets it go when it ends."""
        drafts = scheduler_output.scheduled_spec_decode_tokens.get(request.request_id)
        if drafts and sampled and request.status == RequestStatus.RUNNING:
            # Refused drafts were counted as computed.
            request.num_computed_tokens -= len(drafts) + 1 - len(sampled)
        new_token_ids = self._append_tokens(request, sampled) if sampled else []
        params = self.book.let_go(request) if request.is_finished() else None
        return make_output(request, new_token_ids, model_runner_output, params)

    def _append_tokens(self, request: Request, sampled: list[int]) -> list[int]:
        """Adds tokens up to the one that ends the request; returns those added."""
        return append_tokens(request, sampled, self.max_model_len)

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        for req_id, drafts in zip(
            draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True
        ):
            request = self.requests.get(req_id)
            if request is None or request.status != RequestStatus.RUNNING:
                continue
            room = self.max_model_len - request.num_tokens - 1
            is_prefill = request.num_computed_tokens < request.num_tokens - 1
            request.spec_token_ids = [] if is_prefill else drafts[: max(room, 0)]

    def _publish_events(self) -> None:
        events = [*self.kv_cache_manager.take_events(), *self.transfer.take_events()]
        if events:
            self.kv_event_publisher.publish(KVEventBatch(ts=time.time(), events=events))

    # --- requests come and go ---------------------------------------------------------

    def add_request(self, request: Request) -> None:
        if request.num_tokens > self.max_model_len:
            raise ValueError(
                f"request {request.request_id!r} has {request.num_tokens} tokens, but "
                f"max_model_len is {self.max_model_len}: shorten the prompt"
            )
        if request.sampling_params is None:
            raise ValueError(
                f"request {request.request_id!r} asks for pooling, which is not built "
                "in: pass sampling_params"
            )
        self.book.add(request)
        if self.log_stats:
            request.record_event(EngineCoreEventType.QUEUED)

    def finish_requests(
        self,
        request_ids: str | Iterable[str] | None,
        finished_status: RequestStatus,
    ) -> list[Request]:
        return self.book.finish(request_ids, finished_status)

    def get_num_unfinished_requests(self) -> int:
        return len(self.waiting) + len(self.running)

    def has_finished_requests(self) -> bool:
        return bool(self.book.finished_req_ids)

    def has_requests(self) -> bool:
        return super().has_requests() or self.transfer.has_pending_work()

    def get_request_counts(self) -> tuple[int, int]:
        return len(self.running), len(self.waiting)

    # --- resets and reports -----------------------------------------------------------

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        if reset_running_requests:
            now = time.monotonic()
            for request in reversed(self.running[:]):
                self._preempt_request(request, now, drop_stale_output=True)
            for request in self.waiting:
                if self.admission.is_ready(request):
                    self.admission.release(request)
        done = self.kv_cache_manager.reset_prefix_cache()
        return (not reset_connector or self.reset_connector_cache()) and done

    def reset_connector_cache(self) -> bool:
        """Empties the connector's cache; False when it refuses."""
        return self.transfer.reset_cache()

    def make_stats(
        self,
        spec_decoding_stats: Any = None,
        kv_connector_stats: Any = None,
        cudagraph_stats: Any = None,
        perf_stats: Any = None,
    ) -> SchedulerStats | None:
        if not self.log_stats:
            return None
        manager = self.kv_cache_manager
        return SchedulerStats(
            num_running_reqs=len(self.running),
            num_waiting_reqs=len(self.waiting),
            step_counter=self._num_steps,
            kv_cache_usage=manager.usage,
            prefix_cache_stats=manager.make_prefix_cache_stats() or PrefixCacheStats(),
            connector_prefix_cache_stats=self.transfer.take_stats(),
            kv_connector_stats=getattr(kv_connector_stats, "data", kv_connector_stats),
        )

    def shutdown(self) -> None:
        self.kv_event_publisher.shutdown()
        self.transfer.shutdown()
