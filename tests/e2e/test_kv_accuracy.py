"""`vllm bench kv-accuracy` reads the logits it says it reads, and counts right."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from tests.e2e.tiny import SIZES, engine, prompts_of, save_tiny, vocabulary
from vllm.benchmarks.kv_accuracy import compare, english_text, prompt_logits
from vllm.entrypoints.cli.main import main
from vllm.v1.kv_formats import by_name

HEADS, HEAD_SIZE, LAYERS = 2, 32, 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("llama")


@pytest.fixture(scope="module")
def reference(folder: Path) -> torch.nn.Module:
    sizes = SIZES | {"num_hidden_layers": LAYERS, "head_dim": HEAD_SIZE}
    return save_tiny(LlamaConfig(**sizes, vocab_size=vocabulary()), folder)


@pytest.mark.parametrize("chunk", [8, 24, 512])
def test_prompt_logits_are_those_of_every_position(
    folder: Path, reference: torch.nn.Module, chunk: int
) -> None:
    with engine(folder, max_num_batched_tokens=chunk, max_num_seqs=4) as llm:
        for token_ids in prompts_of([1, 7, 24, 25, 200]):
            for _ in range(2):  # the prefix cache changes nothing
                found = prompt_logits(llm, token_ids)
                with torch.inference_mode():
                    output = reference(torch.tensor([token_ids]), use_cache=False)
                assert found.dtype == torch.float32
                torch.testing.assert_close(found, output.logits[0], rtol=0, atol=1e-4)


def test_figures_of_a_known_difference() -> None:
    dense = torch.log(torch.tensor([[0.5, 0.5], [0.25, 0.75], [0.5, 0.5]]))
    other = torch.log(torch.tensor([[0.25, 0.75], [0.25, 0.75], [0.9, 0.1]]))
    row = compare("x", 8.0, other, dense, [0, 1, 1])
    kl = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert row.max_kl == pytest.approx(kl)
    assert row.mean_kl == pytest.approx(kl / 2)
    assert row.perplexity == pytest.approx(1 / 0.75)
    assert row.top1_agreement == 0.5


def test_the_table_of_a_model(
    folder: Path, reference: torch.nn.Module, capsys: Any
) -> None:
    names = ["float32", "int8_per_token_head", "turboquant_3bit_nc"]
    args = ["--model", str(folder), "--dtype", "float32", "--num-tokens", "150"]
    assert main(["bench", "kv-accuracy", *args, "--json", "--formats", *names]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["cache_dtype"] for row in rows] == ["auto", *names]
    for row in rows:
        per_layer = [by_name(row["cache_dtype"])] * LAYERS
        if per_layer[0].mode.is_turboquant:
            per_layer = [by_name("auto")] * 2 + per_layer[4:] + [by_name("auto")] * 2
        sizes = HEADS, HEAD_SIZE, HEAD_SIZE, torch.float32
        assert row["bytes_per_token"] == sum(
            fmt.bytes_per_token(*sizes) for fmt in per_layer
        )
    dense, same, int8, three_bits = rows
    assert dense["mean_kl"] == same["mean_kl"] == 0
    assert dense["perplexity"] == same["perplexity"]
    assert 0 < int8["mean_kl"] < three_bits["mean_kl"]
    assert int8["top1_agreement"] > 0.9


def test_the_text_is_long_english() -> None:
    text = english_text()
    assert len(text) > 30_000 and text.count(" the ") > 300
