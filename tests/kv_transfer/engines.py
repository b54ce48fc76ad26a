"""Whole engines with a connector, and what two runs of them must have in common."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from vllm import LLM, SamplingParams
from vllm.outputs import RequestOutput

NUM_TOKENS = 6
LOGPROB_TOLERANCE = 2e-4


def example(folder: Path, **more: Any) -> dict[str, Any]:
    """`kv_transfer_config` of an ExampleConnector over a folder."""
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
        **more,
    }


def offloading(**extra: Any) -> dict[str, Any]:
    """`kv_transfer_config` of an OffloadingConnector."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 22, **extra},
    }


def random_prompts(lengths: Sequence[int], seed: int = 1) -> list[list[int]]:
    """Token ids that every tiny model knows."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, 99, (n,), generator=generator).tolist() for n in lengths]


@contextmanager
def engine(folder: str, transfer: Any = None, **settings: Any) -> Iterator[LLM]:
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "kv_cache_memory_bytes": "8MiB",
        "skip_tokenizer_init": True,
        "max_model_len": 256,
        "max_num_seqs": 16,
        "kv_transfer_config": transfer,
    }
    llm = LLM(folder, **(defaults | settings))
    try:
        yield llm
    finally:
        llm.shutdown()


def generate(
    llm: LLM, prompts: list[list[int]], num_tokens: int = NUM_TOKENS, **params: Any
) -> list[RequestOutput]:
    sampling = SamplingParams(
        temperature=0.0, max_tokens=num_tokens, ignore_eos=True, logprobs=1, **params
    )
    return llm.generate(
        [{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False
    )


def run(
    folder: str,
    prompts: list[list[int]],
    transfer: Any = None,
    num_tokens: int = NUM_TOKENS,
    **settings: Any,
) -> list[RequestOutput]:
    """The outputs of an engine that lives for these prompts only."""
    with engine(folder, transfer, **settings) as llm:
        return generate(llm, prompts, num_tokens)


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def cached_of(outputs: list[RequestOutput]) -> list[int]:
    return [output.num_cached_tokens for output in outputs]


def assert_same(found: list[RequestOutput], expected: list[RequestOutput]) -> None:
    """Equal tokens, and logprobs that differ by rounding only."""
    assert tokens_of(found) == tokens_of(expected)
    for one, other in zip(found, expected, strict=True):
        for mine, theirs in zip(
            one.outputs[0].logprobs, other.outputs[0].logprobs, strict=True
        ):
            assert mine.keys() == theirs.keys()
            for token in mine:
                gap = abs(mine[token].logprob - theirs[token].logprob)
                assert gap < LOGPROB_TOLERANCE
