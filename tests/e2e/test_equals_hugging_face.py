"""Greedy tokens are Hugging Face's, however the engine caches, cuts, batches, preempts.

SmolLM2 in float32: 32 prompts of English, 64 tokens each, over one set of weights. The
two best candidates of every step are at least 8e-4 apart, and float32 programs differ
by some 5e-5, so that no tie decides.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from prometheus_client import REGISTRY

from tests.smollm2 import MODEL, english_token_ids, hf_smollm2
from vllm import LLM, SamplingParams
from vllm.outputs import RequestOutput

NUM_TOKENS = 64
# Prompts by length: shorter than a block, across blocks, longer than a chunk of 64.
LENGTHS = {7: 8, 33: 12, 100: 12}
CHUNK = 64
FEW_BLOCKS = 64  # of 16 tokens; half of the requests together need 130

GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    lengths = [length for length, count in LENGTHS.items() for _ in range(count)]
    text = english_token_ids()
    return [list(text[i * 150 : i * 150 + n]) for i, n in enumerate(lengths)]


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]]) -> list[list[int]]:
    """Hugging Face's continuations. Prompts of one length go together, so that nothing
    is padded."""
    model = hf_smollm2()
    tokens: list[list[int]] = []
    for length in LENGTHS:
        batch = torch.tensor([p for p in prompts if len(p) == length])
        generated = model.generate(
            batch,
            attention_mask=torch.ones_like(batch),
            do_sample=False,
            max_new_tokens=NUM_TOKENS,
            eos_token_id=None,
            pad_token_id=0,
        )
        tokens += generated[:, length:].tolist()
    assert all(len(row) == NUM_TOKENS for row in tokens)
    return tokens


@contextmanager
def engine(**settings: Any) -> Iterator[LLM]:
    defaults = {"kv_cache_memory_bytes": "256MiB", "max_model_len": 256}
    llm = LLM(MODEL, dtype="float32", **(defaults | settings))
    try:
        yield llm
    finally:
        llm.shutdown()


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_all_at_once_and_again_from_the_prefix_cache(
    prompts: list[list[int]], expected: list[list[int]]
) -> None:
    with engine(enable_prefix_caching=True, max_num_seqs=32) as llm:
        miss = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert not any(output.num_cached_tokens for output in miss)
        assert tokens_of(miss) == expected
        few = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
        hit = llm.generate(prompts, few, use_tqdm=False)
        assert tokens_of(hit) == [row[:16] for row in expected]
        for prompt, output in zip(prompts, hit, strict=True):
            assert output.num_cached_tokens == (len(prompt) - 1) // 16 * 16


def test_in_chunks_of_64_without_a_prefix_cache(
    prompts: list[list[int]], expected: list[list[int]]
) -> None:
    with engine(enable_prefix_caching=False, max_num_batched_tokens=CHUNK) as llm:
        assert llm.llm_engine.vllm_config.scheduler_config.max_num_batched_tokens == 64
        assert tokens_of(llm.generate(prompts, GREEDY, use_tqdm=False)) == expected


def num_preemptions() -> float:
    labels = {"model_name": MODEL, "engine": "0"}
    value = REGISTRY.get_sample_value("vllm:num_preemptions_total", labels)
    assert value is not None
    return value


def preempted(
    prompts: list[list[int]], expected: list[list[int]], caching: bool
) -> None:
    with engine(
        enable_prefix_caching=caching,
        num_gpu_blocks_override=FEW_BLOCKS,
        max_num_batched_tokens=CHUNK,
        disable_log_stats=False,
    ) as llm:
        assert llm.llm_engine.cache_config.num_gpu_blocks == FEW_BLOCKS
        assert tokens_of(llm.generate(prompts, GREEDY, use_tqdm=False)) == expected
        assert num_preemptions() > 0


def test_preempted_for_lack_of_blocks(
    prompts: list[list[int]], expected: list[list[int]]
) -> None:
    preempted(prompts[::2], expected[::2], caching=True)


@pytest.mark.slow
@pytest.mark.parametrize("caching", [True, False])
def test_all_preempted_for_lack_of_blocks(
    prompts: list[list[int]], expected: list[list[int]], caching: bool
) -> None:
    preempted(prompts, expected, caching)


def one_by_one(prompts: list[list[int]], expected: list[list[int]]) -> None:
    with engine(max_num_seqs=1) as llm:
        assert tokens_of(llm.generate(prompts, GREEDY, use_tqdm=False)) == expected


def test_one_by_one(prompts: list[list[int]], expected: list[list[int]]) -> None:
    one_by_one(prompts[::13], expected[::13])  # one of each length


@pytest.mark.slow
def test_all_one_by_one(prompts: list[list[int]], expected: list[list[int]]) -> None:
    one_by_one(prompts, expected)
