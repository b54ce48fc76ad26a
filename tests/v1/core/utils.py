"""Schedulers without an engine, and workers that check every KV slot they read.

`SimulatedWorker` knows only what SchedulerOutput tells. It stores in each slot the hash
of the tokens up to that position, and on every read compares. The next token is a
function of the whole prefix, so a stale, missing or foreign slot shows as an error, and
any loss of tokens as another text than `reference_tokens`.
"""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from vllm.config import (
    CacheConfig,
    KVEventsConfig,
    KVTransferConfig,
    ParallelConfig,
    SchedulerConfig,
)
from vllm.config.observability import ObservabilityConfig, StructuredOutputsConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_hash import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.metrics.stats import PrefixCacheStats
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

EOS = 0
POISON = -1
POISONED_TOKEN = 999
VOCAB = 50
HEADS: dict[str, Any] = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}

init_none_hash(sha256)


# --- specs and configs ----------------------------------------------------------------


def full(block_size: int = 4) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block_size, **HEADS)


def window(size: int, block_size: int = 4) -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size=block_size, sliding_window=size, **HEADS)


def chunked(size: int, block_size: int = 4) -> ChunkedLocalAttentionSpec:
    return ChunkedLocalAttentionSpec(
        block_size=block_size, attention_chunk_size=size, **HEADS
    )


def mamba(mode: str, block_size: int = 4) -> MambaSpec:
    return MambaSpec(
        block_size=block_size,
        shapes=((2, 4),),
        dtypes=(torch.float32,),
        mamba_cache_mode=mode,
    )


def make_kv_cache_config(num_blocks: int, *specs: KVCacheSpec) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"layer.{i}"], spec) for i, spec in enumerate(specs)]
    return KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups
    )


def make_vllm_config(
    max_model_len: int = 256,
    enable_prefix_caching: bool = True,
    load_failure_policy: str = "recompute",
    kv_events: KVEventsConfig | None = None,
    **scheduler: Any,
) -> Any:
    settings = {"max_num_batched_tokens": 64, "max_num_seqs": 16, **scheduler}
    transfer = KVTransferConfig(kv_load_failure_policy=load_failure_policy)
    config = SchedulerConfig(max_model_len=0, **settings)
    return SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=max_model_len),
        scheduler_config=config,
        cache_config=CacheConfig(enable_prefix_caching=enable_prefix_caching),
        parallel_config=ParallelConfig(),
        observability_config=ObservabilityConfig(),
        structured_outputs_config=StructuredOutputsConfig(),
        kv_events_config=kv_events,
        kv_transfer_config=transfer,
        max_in_flight_tokens=2 * config.max_num_batched_tokens,
    )


def make_scheduler(
    *specs: KVCacheSpec,
    num_blocks: int = 100,
    asynchronous: bool = False,
    connector: Any = None,
    log_stats: bool = True,
    include_finished_set: bool = False,
    **config: Any,
) -> Scheduler:
    vllm_config = make_vllm_config(**config)
    cls = AsyncScheduler if asynchronous else Scheduler
    scheduler = cls(
        vllm_config,
        make_kv_cache_config(num_blocks, *(specs or (full(),))),
        StructuredOutputManager(vllm_config),
        block_size=4,
        log_stats=log_stats,
        include_finished_set=include_finished_set,
    )
    if connector is not None:
        scheduler.connector = connector
    return scheduler


def make_request(
    request_id: str,
    prompt: list[int],
    hash_block_size: int = 4,
    priority: int = 0,
    cache_salt: str | None = None,
    arrival_time: float | None = None,
    client_index: int = 0,
    lora_request: Any = None,
    **sampling: Any,
) -> Request:
    params = SamplingParams(**{"max_tokens": 8, "temperature": 0.0, **sampling})
    params._eos_token_id = EOS
    return Request(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling_params=params,
        pooling_params=None,
        priority=priority,
        cache_salt=cache_salt,
        arrival_time=arrival_time,
        client_index=client_index,
        lora_request=lora_request,
        block_hasher=get_request_block_hasher(hash_block_size, sha256),
    )


def num_free(scheduler: Scheduler) -> int:
    return scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


def num_usable(scheduler: Scheduler) -> int:
    return scheduler.kv_cache_manager.block_pool.num_usable_blocks


def assert_nothing_leaked(scheduler: Scheduler) -> None:
    """Every block is free, queued once, and nothing remembers a request."""
    manager = scheduler.kv_cache_manager
    pool = manager.block_pool
    queued = pool.free_block_queue.get_all_free_blocks()
    assert len(queued) == num_free(scheduler) == num_usable(scheduler)
    assert len({block.block_id for block in queued}) == len(queued)
    assert all(block.ref_cnt == 0 for block in queued)
    for single in manager.coordinator.single_type_managers:
        assert not single.req_to_blocks
        assert not single.num_cached_block
        assert not single._num_skipped_blocks
    assert not scheduler.requests
    assert not scheduler.running
    assert not scheduler.waiting
    assert not scheduler.transfer.awaited
    assert not scheduler.transfer.finished_recving
    assert not scheduler.transfer.failed_recving


# --- the model ------------------------------------------------------------------------


def extend(state: int, token: int) -> int:
    """The hash of a prefix, from the hash of the prefix before its last token."""
    return hash((state, token))


def sample(state: int, eos_share: int = 0) -> int:
    """The token that follows a prefix; the end of text one time in `eos_share`."""
    if eos_share and state % eos_share == 0:
        return EOS
    return 1 + state % (VOCAB - 1)


def root_state(salt: str | None) -> int:
    """The hash of nothing, equal in every run."""
    return int.from_bytes((salt or "").encode(), "big")


def states_of(tokens: list[int], salt: str | None = None) -> list[int]:
    """Hashes of all prefixes; entry i covers tokens up to and with position i."""
    states, state = [], root_state(salt)
    for token in tokens:
        state = extend(state, token)
        states.append(state)
    return states


def reference_tokens(request: Request, max_model_len: int, eos_share: int) -> list[int]:
    """The output of a request that runs alone."""
    params = request.sampling_params
    tokens = list(request.prompt_token_ids or [])
    state = states_of(tokens, request.cache_salt)[-1]
    output: list[int] = []
    while True:
        token = sample(state, eos_share)
        output.append(token)
        tokens.append(token)
        state = extend(state, token)
        if token == EOS and len(output) >= params.min_tokens and not params.ignore_eos:
            return output
        if len(output) >= params.max_tokens or len(tokens) >= max_model_len:
            return output


@dataclass
class _Known:
    """What a worker knows of a request."""

    tokens: list[int]
    num_prompt_tokens: int
    block_ids: list[list[int]]
    salt: str | None
    states: list[int] = field(default_factory=list)

    def refresh(self) -> None:
        state = self.states[-1] if self.states else root_state(self.salt)
        for token in self.tokens[len(self.states) :]:
            state = extend(state, token)
            self.states.append(state)


class SimulatedWorker:
    """Computes steps over simulated slots; AssertionError where a read is wrong."""

    def __init__(self, specs: list[KVCacheSpec], eos_share: int = 0) -> None:
        self.specs = specs
        self.eos_share = eos_share
        self.slots: dict[tuple[int, int], int] = {}
        self.known: dict[str, _Known] = {}
        self.salts: dict[str, str | None] = {}
        self.num_computed = 0
        # After a load failed, and until the scheduler hears of it, requests may read
        # such slots and compute nonsense from them.
        self.num_poisoned_steps = 0
        self.poisoned: set[str] = set()

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        for req_id in step.finished_req_ids:
            self.known.pop(req_id, None)
        for block_id in step.new_block_ids_to_zero or ():
            for key in [key for key in self.slots if key[0] == block_id]:
                del self.slots[key]
        starts = self._take_in(step)
        self.load(step)
        spans = {
            req_id: (starts[req_id], starts[req_id] + num_tokens)
            for req_id, num_tokens in step.num_scheduled_tokens.items()
        }
        # States are read before, slots after anything of this step is written.
        self._each(spans, self._read_states)
        self._each(spans, self._write)
        self._each(spans, self._read_slots)
        self._spread_poison(spans)
        rows = []
        for req_id, (start, end) in spans.items():
            self.num_computed += end - start
            request = self.known[req_id]
            assert end <= len(request.tokens), (
                "a token was scheduled before it was known"
            )
            rows.append(self._sample(request) if end == len(request.tokens) else [])
            if rows[-1] and req_id in self.poisoned:
                rows[-1] = request.tokens[-1:] = [POISONED_TOKEN]
        self.poisoned.clear()
        self.num_poisoned_steps = max(self.num_poisoned_steps - 1, 0)
        return ModelRunnerOutput(
            req_ids=list(spans),
            req_id_to_index={req_id: i for i, req_id in enumerate(spans)},
            sampled_token_ids=rows,
            kv_connector_output=self.report(),
        )

    def load(self, step: SchedulerOutput) -> None:
        """A connector's worker side would load here."""

    def report(self) -> KVConnectorOutput | None:
        """And report here."""
        return None

    def _spread_poison(self, spans: dict[str, tuple[int, int]]) -> None:
        """Spoils what poisoned requests wrote, and whoever reads that."""
        spread: set[str] = set()
        while spread != self.poisoned:
            for req_id in self.poisoned - spread:
                spread.add(req_id)
                ids, (start, end) = self.known[req_id].block_ids, spans[req_id]
                for group, spec in zip(ids, self.specs, strict=True):
                    for position in range(start, end):
                        slot = (
                            group[position // spec.block_size],
                            position % spec.block_size,
                        )
                        self.slots[slot] = POISON
            self._each(spans, self._read_slots)

    def _take_in(self, step: SchedulerOutput) -> dict[str, int]:
        starts = {}
        for new in step.scheduled_new_reqs:
            assert new.req_id not in self.known, "a known request came as new"
            prompt = list(new.prompt_token_ids or [])
            self.known[new.req_id] = _Known(
                prompt,
                len(prompt),
                [list(g) for g in new.block_ids],
                self.salts[new.req_id],
            )
            starts[new.req_id] = new.num_computed_tokens
        cached = step.scheduled_cached_reqs
        for i, req_id in enumerate(cached.req_ids):
            request = self.known[req_id]
            blocks = cached.new_block_ids[i]
            if req_id in cached.resumed_req_ids:
                request.tokens = list(cached.all_token_ids[req_id])
                request.states = []
                request.block_ids = [list(group) for group in blocks]
            elif blocks is not None:
                for group, ids in zip(request.block_ids, blocks, strict=True):
                    group.extend(ids)
            starts[req_id] = cached.num_computed_tokens[i]
        for req_id in starts:
            self.known[req_id].refresh()
        return starts

    def _each(self, spans: dict[str, tuple[int, int]], act: Any) -> None:
        for req_id, (start, end) in spans.items():
            request = self.known[req_id]
            for group, spec in enumerate(self.specs):
                act(request, request.block_ids[group], spec, start, end, req_id)

    def _write(
        self,
        request: _Known,
        ids: list[int],
        spec: KVCacheSpec,
        start: int,
        end: int,
        who: str,
    ) -> None:
        size = spec.block_size
        if isinstance(spec, MambaSpec):
            for position in _state_positions(spec, start, end):
                block = 0 if spec.mamba_cache_mode == "none" else position // size
                assert ids[block] != 0, f"{who} writes a state to the null block"
                self.slots[ids[block], 0] = request.states[position]
            return
        for position in range(start, end):
            block_id = ids[position // size]
            assert block_id != 0, f"{who} writes position {position} to the null block"
            self.slots[block_id, position % size] = request.states[position]

    def _read_states(
        self,
        request: _Known,
        ids: list[int],
        spec: KVCacheSpec,
        start: int,
        end: int,
        who: str,
    ) -> None:
        if not isinstance(spec, MambaSpec) or start == 0:
            return
        block = 0 if spec.mamba_cache_mode == "none" else (start - 1) // spec.block_size
        found = self.slots.get((ids[block], 0))
        assert found == request.states[start - 1], f"{who} starts from a wrong state"

    def _read_slots(
        self,
        request: _Known,
        ids: list[int],
        spec: KVCacheSpec,
        start: int,
        end: int,
        who: str,
    ) -> None:
        if isinstance(spec, MambaSpec):
            return
        first = 0
        if isinstance(spec, SlidingWindowSpec):
            first = max(0, start - spec.sliding_window + 1)
        elif isinstance(spec, ChunkedLocalAttentionSpec):
            first = start // spec.attention_chunk_size * spec.attention_chunk_size
        for position in range(first, end):
            block_id = ids[position // spec.block_size]
            found = self.slots.get((block_id, position % spec.block_size))
            if found == POISON and self.num_poisoned_steps:
                self.poisoned.add(who)
                continue
            assert found == request.states[position], (
                f"{who} reads a wrong slot at position {position} (block {block_id})"
            )

    def _sample(self, request: _Known) -> list[int]:
        token = sample(request.states[-1], self.eos_share)
        request.tokens.append(token)
        return [token]


def _state_positions(spec: MambaSpec, start: int, end: int) -> list[int]:
    """Positions after which the state is stored."""
    if spec.mamba_cache_mode != "all":
        return [end - 1]
    ends = [p for p in range(start, end) if (p + 1) % spec.block_size == 0]
    return [*ends, end - 1]


class Engine:
    """Steps a scheduler with a worker; outputs come `depth - 1` steps late."""

    def __init__(
        self, scheduler: Scheduler, worker: SimulatedWorker, depth: int = 1
    ) -> None:
        self.scheduler = scheduler
        self.worker = worker
        self.depth = depth
        self.under_way: list[tuple[SchedulerOutput, ModelRunnerOutput]] = []
        self.tokens: dict[str, list[int]] = {}
        self.finish_reasons: dict[str, Any] = {}
        self.num_steps = 0
        self.lookups = PrefixCacheStats()

    def add(self, request: Request) -> None:
        self.worker.salts[request.request_id] = request.cache_salt
        self.scheduler.add_request(request)

    def step(self) -> SchedulerOutput:
        step = self.scheduler.schedule()
        self.num_steps += 1
        total = sum(step.num_scheduled_tokens.values())
        assert total == step.total_num_scheduled_tokens
        assert total <= self.scheduler.max_num_scheduled_tokens
        assert len(self.scheduler.running) <= self.scheduler.max_num_running_reqs
        self.under_way.append((step, self.worker.execute(step)))
        while len(self.under_way) >= self.depth:
            self.take_oldest()
        return step

    def take_oldest(self) -> None:
        step, computed = self.under_way.pop(0)
        for news in self.scheduler.update_from_output(step, computed).values():
            if news.scheduler_stats is not None:
                _add_up(self.lookups, news.scheduler_stats.prefix_cache_stats)
            for output in news.outputs:
                tokens = self.tokens.setdefault(output.request_id, [])
                tokens.extend(output.new_token_ids)
                if output.finish_reason is not None:
                    assert output.request_id not in self.finish_reasons
                    self.finish_reasons[output.request_id] = output.finish_reason

    def run(self, max_steps: int = 20_000) -> None:
        """Steps until nothing is left to do; AssertionError when that never comes."""
        for _ in range(max_steps):
            if not self.scheduler.has_requests() and not self.under_way:
                return
            self.step()
            if not self.scheduler.has_unfinished_requests():
                while self.under_way:
                    self.take_oldest()
        counts = self.scheduler.get_request_counts()
        raise AssertionError(
            f"no end after {max_steps} steps: running, waiting {counts}"
        )


def _add_up(total: PrefixCacheStats, part: PrefixCacheStats) -> None:
    for name, value in vars(part).items():
        setattr(total, name, getattr(total, name) + value)


def make_engine(
    *specs: KVCacheSpec, eos_share: int = 0, depth: int = 1, **scheduler: Any
) -> Engine:
    specs = specs or (full(),)
    built = make_scheduler(*specs, asynchronous=depth > 1, **scheduler)
    return Engine(built, SimulatedWorker(list(specs), eos_share), depth)
