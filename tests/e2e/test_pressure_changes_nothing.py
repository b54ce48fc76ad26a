"""A pool that is too small costs time, never tokens, and no block is lost."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest
import torch
from prometheus_client import REGISTRY
from transformers import LlamaConfig

from tests.e2e.tiny import (
    SIZES,
    engine,
    greedy,
    hf_greedy,
    prompts_of,
    save_tiny,
    vocabulary,
)
from vllm import LLM, SamplingParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("llama")


@pytest.fixture(scope="module")
def reference(folder: Path) -> torch.nn.Module:
    return save_tiny(LlamaConfig(**SIZES, vocab_size=vocabulary()), folder)


def num_preemptions(folder: Path) -> float:
    labels = {"model_name": str(folder), "engine": "0"}
    found = REGISTRY.get_sample_value("vllm:num_preemptions_total", labels)
    assert found is not None
    return found


@contextmanager
def accounted(folder: Path, **settings: object) -> Iterator[LLM]:
    """An engine whose free blocks are, in the end, what they were at the start."""
    with engine(folder, disable_log_stats=False, **settings) as llm:
        core = llm.llm_engine.engine_core.engine_core
        pool = core.scheduler.kv_cache_manager.block_pool
        free = pool.get_num_free_blocks()
        yield llm
        llm.generate([[3]], SamplingParams(max_tokens=1), use_tqdm=False)
        assert pool.get_num_free_blocks() == free
        assert not core.scheduler.requests
        (worker,) = llm.collective_rpc(lambda worker: worker)
        assert len(worker.model_runner.requests) == 1  # it hears of the end in a step
        assert llm.reset_prefix_cache()
        assert pool.get_num_free_blocks() == free


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("chunk", [8, 16, 64])
def test_two_requests_that_do_not_fit_together(
    folder: Path, reference: torch.nn.Module, caching: bool, chunk: int
) -> None:
    prompts = prompts_of([34, 35])
    with accounted(
        folder,
        max_model_len=96,
        num_gpu_blocks_override=8,  # 7 for requests, one that stands for "none"
        enable_prefix_caching=caching,
        max_num_seqs=8,
        max_num_batched_tokens=chunk,
    ) as llm:
        assert greedy(llm, prompts, 40) == hf_greedy(reference, prompts, 40)
        assert num_preemptions(folder) > 0


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_many_requests_over_few_blocks(
    folder: Path, reference: torch.nn.Module, policy: str
) -> None:
    prompts = prompts_of([5, 16, 17, 30, 33, 48, 60, 64, 65, 80], seed=2)
    prompts += [p[:20] + q for p, q in zip(prompts, prompts[5:], strict=False)]
    expected = hf_greedy(reference, prompts, 20)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    with accounted(
        folder,
        max_model_len=128,
        num_gpu_blocks_override=14,
        max_num_seqs=16,
        max_num_batched_tokens=32,
        scheduling_policy=policy,
    ) as llm:
        priorities = [i % 3 for i in range(len(prompts))] if policy != "fcfs" else None
        for _ in range(2):  # the second time some prefixes are cached
            outputs = llm.generate(prompts, params, use_tqdm=False, priority=priorities)
            assert [list(o.outputs[0].token_ids) for o in outputs] == expected
        assert num_preemptions(folder) > 0


@pytest.mark.parametrize("dtype", ["auto", "turboquant_4bit_nc"])
def test_two_thousand_requests_return_every_block(
    folder: Path, reference: torch.nn.Module, dtype: str
) -> None:
    """Short ones, some alike, some of several continuations, some aborted."""
    random = Random(0)
    alike = prompts_of([40, 40], seed=3)
    with accounted(
        folder,
        kv_cache_dtype=dtype,
        max_model_len=64,
        num_gpu_blocks_override=60,
        max_num_seqs=32,
        max_num_batched_tokens=128,
    ) as llm:
        engine_ = llm.llm_engine
        for number in range(2000):
            length = random.randrange(1, 40)
            prompt = [*random.choice(alike)[:length], random.randrange(2, 300)]
            params = SamplingParams(
                n=2 if number % 50 == 0 else 1,
                seed=number,
                max_tokens=random.randrange(1, 4),
            )
            engine_.add_request(f"r{number}", {"prompt_token_ids": prompt}, params)
            if number % 7 == 0:
                engine_.abort_request([f"r{random.randrange(number + 1)}"])
            if engine_.get_num_unfinished_requests() > 48:
                engine_.step()
        while engine_.has_unfinished_requests():
            engine_.step()
