"""One capacity: start-up, `/metrics`, `vllm kv-plan` and the format's table agree."""

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import REGISTRY
from transformers import LlamaConfig, Qwen2Config

from tests.e2e.tiny import SIZES, save_tiny, vocabulary
from vllm import LLM
from vllm.entrypoints.cli.main import main
from vllm.utils.math_utils import cdiv
from vllm.v1.kv_formats import KVFormat, all_formats, by_name

FORMATS = [fmt for fmt in all_formats() if not fmt.latent]
MEMORY, MEMORY_BYTES = "256MiB", 256 << 20
MAX_LEN, BLOCK = 200, 16
HEADS, HEAD_SIZE, LAYERS = 2, 16, 6
MODELS = {
    "llama": LlamaConfig(**SIZES | {"num_hidden_layers": LAYERS}, vocab_size=512),
    # Windowed layers need fewer blocks of a long request than the others.
    "windowed": Qwen2Config(
        **SIZES,
        vocab_size=vocabulary(),
        use_sliding_window=True,
        sliding_window=24,
        max_window_layers=2,
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {name: tmp_path_factory.mktemp(name) for name in MODELS}
    for name, config in MODELS.items():
        save_tiny(config, folders[name])
    return folders


class _Lines(logging.Handler):
    """Everything that vllm says."""

    def __init__(self) -> None:
        super().__init__()
        self.text: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.text.append(record.getMessage())

    def number(self, pattern: str) -> float:
        (found,) = {m[1] for line in self.text if (m := re.search(pattern, line))}
        return float(found.replace(",", ""))


@pytest.fixture
def lines() -> Iterator[_Lines]:
    logger, handler = logging.getLogger("vllm"), _Lines()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


def cache_config_labels() -> dict[str, str]:
    (labels,) = [
        sample.labels
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name == "vllm:cache_config_info"
    ]
    return labels


def reports(folder: Path, dtype: str, lines: _Lines, capsys: Any) -> dict[str, Any]:
    """What start-up, the config, the metric and the planner say, checked for equality
    where they say the same."""
    llm = LLM(
        str(folder),
        dtype="bfloat16",
        kv_cache_dtype=dtype,
        kv_cache_memory_bytes=MEMORY,
        max_model_len=MAX_LEN,
        disable_log_stats=False,
    )
    cache = llm.llm_engine.cache_config
    llm.shutdown()
    labels = cache_config_labels()
    args = [str(folder), "--kv-cache-dtype", dtype, "--memory", MEMORY]
    args += ["--dtype", "bfloat16", "--max-model-len", str(MAX_LEN), "--json"]
    assert main(["kv-plan", *args]) == 0
    plan = json.loads(capsys.readouterr().out)

    said = lines.number(r"KV cache size: ([\d,]+) tokens")
    assert said == cache.kv_cache_size_tokens == plan["capacity_tokens"]
    assert labels["kv_cache_size_tokens"] == str(cache.kv_cache_size_tokens)
    assert labels["num_gpu_blocks"] == str(cache.num_gpu_blocks)
    assert labels["block_size"] == str(cache.block_size)
    assert labels["cache_dtype"] == dtype == plan["cache_dtype"]
    assert cache.num_gpu_blocks == plan["num_blocks"]
    assert cache.kv_cache_max_concurrency == plan["max_concurrency"]
    said = lines.number(r"Maximum concurrency for 200 tokens per request: ([\d.,]+)x")
    assert said == round(plan["max_concurrency"], 2)
    assert plan["capacity_tokens"] == int(plan["max_concurrency"] * MAX_LEN)
    return plan


def block_bytes(fmt: KVFormat) -> int:
    """Bytes of one block of all layers, from the table alone."""
    total = 0
    for layer in range(LAYERS):
        at_an_end = layer < 2 or layer >= LAYERS - 2
        dense = fmt.mode.is_turboquant and at_an_end
        stored = by_name("bfloat16") if dense else fmt
        packing = stored.packing(HEADS, HEAD_SIZE, HEAD_SIZE, torch.bfloat16)
        total += packing.head_slots * packing.state_bytes * BLOCK
    return total


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_the_reports_agree_with_the_table(
    fmt: KVFormat, folders: dict[str, Path], lines: _Lines, capsys: Any
) -> None:
    plan = reports(folders["llama"], fmt.name, lines, capsys)
    assert plan["block_size"] == BLOCK
    assert plan["num_blocks"] == MEMORY_BYTES // block_bytes(fmt)
    assert plan["bytes_per_token"] == block_bytes(fmt) / BLOCK
    blocks = cdiv(MAX_LEN, BLOCK)
    assert plan["capacity_tokens"] == int(plan["num_blocks"] / blocks * MAX_LEN)
    assert plan["pool_bytes"] == plan["num_blocks"] * block_bytes(fmt)


@pytest.mark.parametrize("dtype", ["auto", "int8_per_token_head"])
def test_the_reports_agree_over_windowed_layers(
    dtype: str, folders: dict[str, Path], lines: _Lines, capsys: Any
) -> None:
    plan = reports(folders["windowed"], dtype, lines, capsys)
    assert len(plan["groups"]) == 2


def test_attention_only_capacity_grows_as_elements_shrink(
    folders: dict[str, Path], capsys: Any
) -> None:
    """fp8 holds exactly twice what bfloat16 does."""
    plans = {}
    for dtype in ("bfloat16", "fp8"):
        args = [str(folders["llama"]), "--kv-cache-dtype", dtype, "--memory", MEMORY]
        main(["kv-plan", *args, "--dtype", "bfloat16", "--json"])
        plans[dtype] = json.loads(capsys.readouterr().out)
    assert plans["fp8"]["num_blocks"] == 2 * plans["bfloat16"]["num_blocks"]
