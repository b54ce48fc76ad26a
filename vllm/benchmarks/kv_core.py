"""`vllm bench kv-core`: what blocks, hashes and steps cost the engine core.

No model and no page: only the bookkeeping of one full-attention group. Every figure is
CPU time of this process, the best of some repetitions: a busy machine only adds to it.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import count
from types import SimpleNamespace
from typing import Any

import torch
from tqdm.auto import tqdm

from vllm.config import CacheConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.argparse_utils import at_least
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.utils.math_utils import cdiv
from vllm.v1.core.block_hash import get_request_block_hasher, init_none_hash
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

_BATCH_BLOCKS = 512
_POOL_ROUNDS = 2000  # calls in one repetition of the shortest acts
_TOKEN_ID = 7  # sampled by every request; ends none


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Sizes of the measured acts, in tokens, blocks and requests."""

    block_size: int
    hash_algo: str
    hash_tokens: int
    prompt_tokens: int
    requests: int
    steps: int
    repetitions: int


@dataclass(frozen=True)
class Figure:
    """One measured value, and what it counts."""

    value: float
    unit: str
    what: str


class Bench:
    """Builds what is measured; each method gives one repetition's CPU seconds."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        hash_fn = get_hash_fn_by_name(settings.hash_algo)
        init_none_hash(hash_fn)
        self.hasher = get_request_block_hasher(settings.block_size, hash_fn)
        self._ids = count()

    def request(self, num_tokens: int, max_tokens: int = 1) -> Request:
        """A request with a prompt that no other one shares a block with."""
        number = next(self._ids)
        return Request(
            request_id=str(number),
            prompt_token_ids=[number, *range(1, num_tokens)],
            sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            pooling_params=None,
            block_hasher=self.hasher,
        )

    def config(self, num_blocks: int) -> KVCacheConfig:
        spec = FullAttentionSpec(
            block_size=self.settings.block_size,
            num_kv_heads=1,
            head_size=64,
            dtype=torch.bfloat16,
        )
        return KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        )

    def manager(self, num_tokens: int) -> KVCacheManager:
        """With room for one request of so many tokens."""
        size = self.settings.block_size
        return KVCacheManager(
            self.config(cdiv(num_tokens, size) + 2),
            max_model_len=num_tokens + 1,
            scheduler_block_size=size,
            hash_block_size=size,
        )

    # --- one repetition each ----------------------------------------------------------

    def pool_rounds(self, batch: int) -> float:
        """CPU seconds of taking and freeing `batch` blocks, `_POOL_ROUNDS` times."""
        rounds = max(_POOL_ROUNDS // batch, 50)
        pool = BlockPool(4 * batch + 1, True, self.settings.block_size)

        def act() -> None:
            for _ in range(rounds):
                pool.free_blocks(pool.get_new_blocks(batch))

        return cpu_seconds(act) / rounds

    def hashing(self) -> float:
        """CPU seconds of hashing a prompt."""
        request = self.request(self.settings.hash_tokens)
        request.block_hashes.clear()
        return cpu_seconds(request.update_block_hashes)

    def allocating(self) -> float:
        """CPU seconds of giving a prompt its blocks and caching them."""
        num_tokens = self.settings.prompt_tokens
        manager, request = self.manager(num_tokens), self.request(num_tokens)
        return cpu_seconds(lambda: manager.allocate_slots(request, num_tokens))

    def looking_up(self) -> float:
        """CPU seconds of finding a whole prompt in the cache."""
        num_tokens = self.settings.prompt_tokens
        manager, request = self.manager(num_tokens), self.request(num_tokens)
        manager.allocate_slots(request, num_tokens)
        manager.free(request)
        return cpu_seconds(lambda: manager.get_computed_blocks(request))

    def steps(self) -> tuple[float, float]:
        """CPU seconds of `schedule()` and of `update_from_output()`, a step of which
        every running request decodes one token; the mean over steps."""
        scheduler = self.running_scheduler()
        schedule = update = 0.0
        for _ in range(self.settings.steps):
            start = time.process_time()
            output = scheduler.schedule()
            middle = time.process_time()
            sampled = sampled_by(output)
            resumed = time.process_time()
            scheduler.update_from_output(output, sampled)
            schedule += middle - start
            update += time.process_time() - resumed
        return schedule / self.settings.steps, update / self.settings.steps

    def running_scheduler(self) -> Scheduler:
        """A scheduler whose requests have their prompts behind them."""
        s = self.settings
        prompt_tokens = 2 * s.block_size + 1
        length = prompt_tokens + s.steps + 8
        config = VllmConfig(
            cache_config=CacheConfig(block_size=s.block_size),
            scheduler_config=SchedulerConfig(
                max_num_seqs=s.requests,
                max_num_batched_tokens=s.requests * prompt_tokens,
            ),
        )
        # All that scheduling asks of a model is its length.
        model: Any = SimpleNamespace(max_model_len=length)
        config.model_config = model
        scheduler = Scheduler(
            config,
            self.config(s.requests * cdiv(length, s.block_size) + 1),
            StructuredOutputManager(config),
            block_size=s.block_size,
            log_stats=True,
        )
        for _ in range(s.requests):
            scheduler.add_request(self.request(prompt_tokens, max_tokens=length))
        output = scheduler.schedule()
        scheduler.update_from_output(output, sampled_by(output))
        return scheduler


def cpu_seconds(act: Callable[[], object]) -> float:
    """CPU time of this process that one call takes."""
    start = time.process_time()
    act()
    return time.process_time() - start


def measure(settings: Settings) -> dict[str, Figure]:
    """Every figure by name."""
    bench = Bench(settings)

    def best(repetition: Callable[[], float]) -> float:
        return min(repetition() for _ in range(settings.repetitions))

    s = settings
    hashed = f"{s.hash_tokens} tokens, blocks of {s.block_size}, {s.hash_algo}"
    prompt, running = f"{s.prompt_tokens} tokens", f"{s.requests} requests decode"
    progress = tqdm(total=6, desc="kv-core")
    pairs = 1 / best(lambda: bench.pool_rounds(1))
    progress.update()
    batched = _BATCH_BLOCKS / best(lambda: bench.pool_rounds(_BATCH_BLOCKS))
    progress.update()
    seconds = []
    for act in (bench.hashing, bench.allocating, bench.looking_up):
        seconds.append(best(act))
        progress.update()
    schedule, update = min((bench.steps() for _ in range(s.repetitions)), key=sum)
    progress.close()
    hashing, allocating, looking_up = seconds
    per_request = (schedule + update) / s.requests
    in_batches = f"blocks taken and freed, {_BATCH_BLOCKS} at a time"
    return {
        "block_pairs_per_s": Figure(pairs, "1/s", "one block taken and freed"),
        "batched_blocks_per_s": Figure(batched, "1/s", in_batches),
        "hash_ms": Figure(1e3 * hashing, "ms", f"hashing {hashed}"),
        "allocate_ms": Figure(
            1e3 * allocating, "ms", f"allocating and caching {prompt}"
        ),
        "lookup_ms": Figure(1e3 * looking_up, "ms", f"finding {prompt}"),
        "schedule_ms": Figure(1e3 * schedule, "ms", f"schedule(), {running}"),
        "update_ms": Figure(1e3 * update, "ms", f"update_from_output(), {running}"),
        "step_us_per_request": Figure(
            1e6 * per_request, "us", "both, for each running request"
        ),
    }


def sampled_by(step: SchedulerOutput) -> ModelRunnerOutput:
    """One token for every request of a step."""
    ids = list(step.num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={req_id: index for index, req_id in enumerate(ids)},
        sampled_token_ids=[[_TOKEN_ID] for _ in ids],
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--block-size", type=at_least(1), default=16, help="tokens of a block")
    add("--hash-algo", default="sha256", help="as --prefix-caching-hash-algo")
    add(
        "--hash-tokens",
        type=at_least(1),
        default=8192,
        help="tokens of the hashed prompt",
    )
    add(
        "--prompt-tokens",
        type=at_least(1),
        default=8000,
        help="tokens of the cached prompt",
    )
    add("--requests", type=at_least(1), default=256, help="running requests")
    add("--steps", type=at_least(1), default=64, help="steps of one repetition")
    add("--repetitions", type=at_least(1), default=7, help="the best one counts")
    add("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    settings = Settings(
        block_size=args.block_size,
        hash_algo=args.hash_algo,
        hash_tokens=args.hash_tokens,
        prompt_tokens=args.prompt_tokens,
        requests=args.requests,
        steps=args.steps,
        repetitions=args.repetitions,
    )
    figures = measure(settings)
    if args.json:
        rows = {name: asdict(figure) for name, figure in figures.items()}
        machine = {"python": platform.python_version(), "cpu": platform.machine()}
        report = {"machine": machine, "settings": asdict(settings), "figures": rows}
        print(json.dumps(report, indent=2))
        return 0
    for name, figure in figures.items():
        print(f"{name:22}{figure.value:14,.3f} {figure.unit:4} {figure.what}")
    return 0
