"""Windowed layers that give pages back compute what they compute when they keep them:
the hybrid manager changes memory, never tokens."""

from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Config

from tests.e2e.tiny import SIZES, engine, greedy, prompts_of, save_tiny, vocabulary

WINDOW = 20
PROMPTS = prompts_of([4, WINDOW, 61, 150])
SETTINGS: list[dict[str, Any]] = [
    {},
    {"max_num_batched_tokens": 24},
    {"block_size": 32, "enable_prefix_caching": False},
    {"async_scheduling": True},
    {"num_gpu_blocks_override": 40, "max_num_seqs": 3},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers that see everything, then two with a window."""
    folder = tmp_path_factory.mktemp("qwen2")
    config = Qwen2Config(
        **(SIZES | {"vocab_size": vocabulary()}),
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=2,
    )
    save_tiny(config, folder)
    return folder


def run(folder: Path, off: bool, **settings: Any) -> tuple[list[Any], int]:
    """Tokens of a first and of a second round, and the number of groups."""
    with engine(folder, disable_hybrid_kv_cache_manager=off, **settings) as llm:
        rounds = [greedy(llm, PROMPTS, 10) for _ in range(2)]
        core = llm.llm_engine.engine_core.engine_core
        pool = core.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_usable_blocks
        return rounds, len(core.kv_cache_config.kv_cache_groups)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_tokens_do_not_depend_on_the_manager(
    folder: Path, settings: dict[str, Any]
) -> None:
    hybrid, groups = run(folder, off=False, **settings)
    whole, one = run(folder, off=True, **settings)
    assert (groups, one) == (2, 1)
    assert hybrid == whole
    assert hybrid[0] == hybrid[1]  # the second round hits what the first left


@pytest.mark.parametrize("skip", ["sliding_window", "1"])
@pytest.mark.parametrize("name", ["fp8", "int8_per_token_head", "turboquant_4bit_nc"])
def test_neither_do_they_where_formats_are_mixed(
    folder: Path, name: str, skip: str
) -> None:
    settings = {"kv_cache_dtype": name, "kv_cache_dtype_skip_layers": ["none", skip]}
    hybrid, _ = run(folder, off=False, **settings)
    assert hybrid == run(folder, off=True, **settings)[0]
    assert hybrid[0] == hybrid[1]
