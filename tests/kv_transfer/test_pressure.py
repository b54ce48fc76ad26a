"""A pool of two requests' size, slow saves, loads and files, aborts at any time."""

import random
import time
from pathlib import Path
from typing import Any

import pytest

from tests.kv_transfer.engines import (
    engine,
    offloading,
    random_prompts,
    run,
    tokens_of,
)
from tests.kv_transfer.test_offloading_connector import (
    end_transfers,
    num_free,
    scheduler_of,
)
from vllm import LLM, SamplingParams
from vllm.testing.kv_connector.models import ModelFolders

NUM_TOKENS = 12
_MOST_SECONDS_A_REQUEST = 0.5


def slow_down(llm: LLM, rng: random.Random) -> None:
    """Lets every block take up to some milliseconds on each of its ways."""
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    worker = executor.driver_worker.model_runner.connector.connector.worker
    for name in ("_save", "_load", "_spill", "_fetch"):
        act = getattr(worker, name)

        def slow(move: Any, act: Any = act) -> bool:
            time.sleep(rng.random() * 0.004)
            return act(move)

        setattr(worker, name, slow)


def serve_with_aborts(
    llm: LLM, prompts: list[list[int]], rng: random.Random
) -> tuple[dict[str, list[int]], int]:
    """Adds requests as others go and aborts up to a third at random times; the tokens
    of those that ended by themselves, and how many were aborted."""
    aborts_left = most_aborts = len(prompts) // 3
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    waiting, alive, found = list(enumerate(prompts)), set[str](), dict[str, list[int]]()
    deadline = time.monotonic() + 60 + _MOST_SECONDS_A_REQUEST * len(prompts)
    while waiting or alive:
        assert time.monotonic() < deadline, f"{len(alive)} requests make no progress"
        while waiting and len(alive) < 6:
            index, prompt = waiting.pop(0)
            llm.llm_engine.add_request(str(index), {"prompt_token_ids": prompt}, params)
            alive.add(str(index))
        for output in llm.llm_engine.step():
            if output.finished:
                found[output.request_id] = list(output.outputs[0].token_ids)
                alive.discard(output.request_id)
        if alive and aborts_left and rng.random() < 0.05:
            victim = rng.choice(sorted(alive))
            llm.llm_engine.abort_request([victim])
            alive.discard(victim)
            aborts_left -= 1
    return found, most_aborts - aborts_left


@pytest.mark.parametrize(
    "num_requests", [150, pytest.param(2000, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("tiers", ["memory", "arc and disk"])
@pytest.mark.parametrize("kind", ["full", "window"])
def test_nothing_is_lost_or_wrong_or_stuck(
    folders: ModelFolders, tmp_path: Path, kind: str, tiers: str, num_requests: int
) -> None:
    rng = random.Random(f"{kind}{tiers}")
    shared = random_prompts([30, 50, 64], seed=7)
    tails = random_prompts([rng.randrange(1, 30) for _ in range(num_requests)], seed=8)
    prompts = [rng.choice(shared) + tail for tail in tails]
    # As many blocks as two requests need at their longest.
    per_group = -(-(64 + 30 + NUM_TOKENS) // 16)
    blocks = 1 + 2 * per_group * (1 if kind == "full" else 3)
    settings = {"num_gpu_blocks_override": blocks, "max_model_len": 112}
    extra: dict[str, Any] = {"num_cpu_blocks": 24}
    if tiers != "memory":
        size = {"disk_path": str(tmp_path), "disk_bytes_to_use": 200 * 40_000}
        extra |= {"eviction_policy": "arc", **size}
    expected = tokens_of(run(folders[kind], prompts, num_tokens=NUM_TOKENS))
    with engine(folders[kind], offloading(**extra), **settings) as llm:
        free = num_free(llm)
        slow_down(llm, rng)
        found, num_aborted = serve_with_aborts(llm, prompts, rng)
        end_transfers(llm)
        assert num_free(llm) == free
        scheduler = scheduler_of(llm).connector.scheduler
        assert scheduler.slots.is_idle and not scheduler.has_jobs
        assert not scheduler._num_local and not scheduler._fetched_keys
        assert not scheduler_of(llm).requests
        assert num_aborted > num_requests / 20
        assert len(found) == num_requests - num_aborted
        for request_id, tokens in found.items():
            assert tokens == expected[int(request_id)]
