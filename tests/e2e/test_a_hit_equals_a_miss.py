"""The prefix cache is not seen in any output: not in tokens, not in prompt logprobs."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from tests.e2e.tiny import SIZES, engine, greedy, prompts_of, save_tiny, vocabulary
from vllm import LLM, SamplingParams
from vllm.outputs import RequestOutput
from vllm.v1.kv_formats import KVFormat, all_formats

SERVED = [fmt for fmt in all_formats() if not fmt.latent]
LENGTHS = [1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49]
BLOCK = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("llama")


@pytest.fixture(scope="module")
def reference(folder: Path) -> torch.nn.Module:
    sizes = SIZES | {"num_hidden_layers": 6, "head_dim": 32}
    return save_tiny(LlamaConfig(**sizes, vocab_size=vocabulary()), folder)


@pytest.fixture(scope="module")
def llm(folder: Path, reference: torch.nn.Module) -> Iterator[LLM]:
    with engine(folder) as llm:
        yield llm


@pytest.mark.parametrize("fmt", SERVED, ids=lambda fmt: fmt.name)
def test_tokens_in_every_format(
    folder: Path, reference: torch.nn.Module, fmt: KVFormat
) -> None:
    """Again from the cache, with the cache off, and in chunks of other sizes."""
    prompts = prompts_of([1, 16, 17, 33, 100])
    with engine(folder, kv_cache_dtype=fmt.name) as llm:
        miss = greedy(llm, prompts, 12)
        assert greedy(llm, prompts, 12) == miss
        assert [greedy(llm, [prompt], 12)[0] for prompt in prompts] == miss
    with engine(
        folder,
        kv_cache_dtype=fmt.name,
        enable_prefix_caching=False,
        max_num_batched_tokens=24,
        max_num_seqs=8,
    ) as llm:
        assert greedy(llm, prompts, 12) == miss


def scores(output: RequestOutput) -> list[dict[int, tuple[float, int]]]:
    """Logprob and rank by token id, for every prompt token but the first."""
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    return [
        {token: (item.logprob, item.rank) for token, item in entry.items()}
        for entry in output.prompt_logprobs[1:]
    ]


def scored(llm: LLM, prompts: list[list[int]], count: int) -> list[RequestOutput]:
    params = SamplingParams(
        temperature=0.0, max_tokens=4, prompt_logprobs=count, ignore_eos=True
    )
    return llm.generate(prompts, params, use_tqdm=False)


def check_scores(
    reference: torch.nn.Module, prompt: list[int], output: RequestOutput
) -> None:
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt]), use_cache=False).logits[0]
    wanted = logits.log_softmax(-1)
    found = scores(output)
    assert len(found) == len(prompt) - 1
    for position, entry in enumerate(found):
        assert prompt[position + 1] in entry
        for token, (logprob, _) in entry.items():
            assert logprob == pytest.approx(wanted[position, token].item(), abs=2e-4)


@pytest.mark.parametrize("length", LENGTHS)
def test_prompt_logprobs_twice_around_block_boundaries(
    llm: LLM, reference: torch.nn.Module, length: int
) -> None:
    (prompt,) = prompts_of([length], seed=length)
    (first,) = scored(llm, [prompt], 2)
    (again,) = scored(llm, [prompt], 2)
    for output in (first, again):
        assert output.num_cached_tokens == 0  # all logits are needed
        check_scores(reference, prompt, output)
    assert scores(first) == scores(again)
    assert first.outputs[0].token_ids == again.outputs[0].token_ids
    # The request left a prefix that others hit, with the same tokens.
    (other,) = llm.generate(
        [prompt],
        SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True),
        use_tqdm=False,
    )
    assert other.num_cached_tokens == (length - 1) // BLOCK * BLOCK
    assert other.outputs[0].token_ids == first.outputs[0].token_ids


@pytest.mark.parametrize("chunk", [8, 16, 24, 256])
def test_prompt_logprobs_in_chunks_and_under_pressure(
    folder: Path, reference: torch.nn.Module, chunk: int
) -> None:
    """Prompts that are cut, wait and lose their blocks are scored all the same."""
    prompts = prompts_of([90, 70, 33, 90, 48, 64], seed=7)
    with engine(
        folder,
        max_model_len=128,
        num_gpu_blocks_override=10,
        max_num_seqs=8,
        max_num_batched_tokens=chunk,
    ) as llm:
        for _ in range(2):
            outputs = scored(llm, prompts, 1)
            for prompt, output in zip(prompts, outputs, strict=True):
                check_scores(reference, prompt, output)
