"""What broke connectors elsewhere: preemption, unaligned hits, rejected loads, a pool
that holds less than two requests, children that store what has not come."""

import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kv_transfer.engines import (
    assert_same,
    cached_of,
    engine,
    example,
    generate,
    offloading,
    random_prompts,
    run,
    tokens_of,
)
from tests.kv_transfer.test_offloading_connector import (
    end_transfers,
    forget_prefixes,
    num_free,
    scheduler_of,
)
from tests.kv_transfer.test_pressure import serve_with_aborts, slow_down
from vllm import LLM
from vllm.distributed.kv_transfer.kv_connector.v1.page_store import PageStore
from vllm.testing.kv_connector.models import ModelFolders

NUM_TOKENS = 40


def stored(folder: Path) -> dict[str, bytes]:
    """The pages of a store by block name."""
    found = {}
    for model in folder.iterdir():
        store = PageStore(model)
        for block in store.blocks():
            pages = store.read(block.key)
            assert pages is not None
            found[block.key] = pages.numpy().tobytes()
    return found


def count_preemptions(llm: LLM) -> list[str]:
    book, preempted = scheduler_of(llm).book, list[str]()
    preempt = book.preempt

    def counted(request: Any, *args: Any, **kwargs: Any) -> None:
        preempted.append(request.request_id)
        preempt(request, *args, **kwargs)

    book.preempt = counted
    return preempted


@pytest.mark.parametrize("kind", ["example", "offloading"])
def test_a_resumed_request_saves_nothing_under_a_wrong_name(
    folders: ModelFolders, tmp_path: Path, kind: str
) -> None:
    """Seven blocks, and two requests that need five each before they end."""

    def transfer(name: str) -> dict[str, Any]:
        folder = tmp_path / name
        if kind == "example":
            return example(folder)
        return offloading(disk_path=str(folder))

    prompts = random_prompts([34, 35])
    alone = run(folders["full"], prompts, num_tokens=NUM_TOKENS)
    run(folders["full"], prompts, transfer("calm"), num_tokens=NUM_TOKENS)
    settings = {"num_gpu_blocks_override": 8, "max_model_len": 80}
    with engine(folders["full"], transfer("pressed"), **settings) as llm:
        preempted = count_preemptions(llm)
        assert_same(generate(llm, prompts, NUM_TOKENS), alone)
        assert preempted
        end_transfers(llm)
    calm, pressed = stored(tmp_path / "calm"), stored(tmp_path / "pressed")
    assert pressed and pressed.keys() == calm.keys()
    # A prefix that is computed in other steps may round differently, and only that.
    for key in calm:
        np.testing.assert_allclose(
            np.frombuffer(pressed[key], np.float32),
            np.frombuffer(calm[key], np.float32),
            atol=1e-4,
        )
    again = run(folders["full"], prompts, transfer("pressed"), num_tokens=NUM_TOKENS)
    assert_same(again, alone)
    assert cached_of(again) == [32, 32]


@pytest.mark.parametrize("local", [16, 20, 31, 40])
def test_a_load_begins_where_the_local_hit_ends(
    folders: ModelFolders, tmp_path: Path, local: int
) -> None:
    """Connector blocks are 64 tokens, and the local hit ends within one of them."""
    (prompt,) = random_prompts([150])
    shared = prompt[:local]
    alone = run(folders["full"], [prompt])
    run(folders["full"], [prompt], example(tmp_path))
    with engine(folders["full"], example(tmp_path)) as llm:
        generate(llm, [[*shared, 7, 8, 9]], extra_args=_no_transfer())
        connector = scheduler_of(llm).connector
        asked: list[int] = []
        match = connector.get_num_new_matched_tokens

        def in_chunks(request: Any, num_computed_tokens: int) -> tuple[int, bool]:
            asked.append(num_computed_tokens)
            found, is_async = match(request, num_computed_tokens)
            end = (num_computed_tokens + found) // 64 * 64
            return max(end - num_computed_tokens, 0), is_async

        connector.get_num_new_matched_tokens = in_chunks
        outputs = generate(llm, [prompt])
        assert_same(outputs, alone)
        assert asked == [local // 16 * 16] and cached_of(outputs) == [128]


def _no_transfer() -> dict[str, Any]:
    return {"kv_transfer_params": {"skip_load": True, "skip_save": True}}


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_two_rejected_blocks_cost_one_more_try(
    folders: ModelFolders, policy: str
) -> None:
    prompts = random_prompts([70, 97])
    alone = run(folders["full"], prompts)
    settings = offloading() | {"kv_load_failure_policy": policy}
    with engine(folders["full"], settings) as llm:
        free = num_free(llm)
        generate(llm, prompts)
        forget_prefixes(llm)
        core = llm.llm_engine.engine_core.engine_core
        runner = core.model_executor.driver_worker.model_runner
        worker, loads = runner.connector.connector.worker, list[str]()
        load = worker._load

        def rejected(move: Any) -> bool:
            loads.append(move.key)
            return len(loads) > 2 and load(move)

        worker._load = rejected
        outputs = generate(llm, prompts)
        reasons = sorted(output.outputs[0].finish_reason for output in outputs)
        if policy == "fail":
            assert reasons == ["error", "length"]
            (good,) = [i for i in (0, 1) if outputs[i].outputs[0].token_ids]
            assert_same(outputs[good : good + 1], alone[good : good + 1])
        else:
            assert reasons == ["length", "length"]
            assert_same(outputs, alone)
        assert len(loads) == 4 + 6  # nothing was loaded a second time
        end_transfers(llm)
        assert num_free(llm) == free


@pytest.mark.parametrize("kind", ["full", "window"])
def test_a_pool_of_less_than_two_requests_makes_progress(
    folders: ModelFolders, kind: str
) -> None:
    rng = random.Random(kind)
    shared = random_prompts([30, 50, 64], seed=7)
    tails = random_prompts([rng.randrange(1, 30) for _ in range(40)], seed=8)
    prompts = [rng.choice(shared) + tail for tail in tails]
    per_request = -(-(64 + 30 + 12) // 16) * (1 if kind == "full" else 3)
    settings = {
        "num_gpu_blocks_override": 1 + per_request * 3 // 2,
        "max_model_len": 112,
    }
    expected = tokens_of(run(folders[kind], prompts, num_tokens=12))
    with engine(folders[kind], offloading(num_cpu_blocks=24), **settings) as llm:
        free = num_free(llm)
        slow_down(llm, rng)
        found, num_aborted = serve_with_aborts(llm, prompts, rng)
        end_transfers(llm)
        assert num_free(llm) == free
        assert len(found) == len(prompts) - num_aborted
        for request_id, tokens in found.items():
            assert tokens == expected[int(request_id)]


def test_a_child_stores_only_what_another_has_loaded(
    folders: ModelFolders, tmp_path: Path
) -> None:
    """The first child loads slowly, outside of steps; the second stores in steps."""
    (prompt,) = random_prompts([150])
    alone = run(folders["full"], [prompt])
    run(folders["full"], [prompt], example(tmp_path / "reference"))
    both = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "connectors": [offloading(), example(tmp_path / "second")]
        },
    }
    with engine(folders["full"], both) as llm:
        wish = {"kv_transfer_params": {"skip_save": True}}
        generate(llm, [prompt], extra_args=wish)  # the first child alone stores it
        assert not stored(tmp_path / "second")
        forget_prefixes(llm)
        core = llm.llm_engine.engine_core.engine_core
        runner = core.model_executor.driver_worker.model_runner
        first = runner.connector.connector._children[0].worker
        load = first._load

        def slow(move: Any) -> bool:
            time.sleep(0.01)
            return load(move)

        first._load = slow
        outputs = generate(llm, [prompt])
        assert_same(outputs, alone)
        assert cached_of(outputs) == [144]
        end_transfers(llm)
    assert stored(tmp_path / "second") == stored(tmp_path / "reference")
