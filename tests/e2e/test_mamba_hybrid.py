"""Bamba: states and attention pages share a pool; tokens are Hugging Face's."""

from typing import Any

import pytest
import torch
from transformers import BambaConfig

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
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.cli.kv_plan import plan_without_weights
from vllm.v1.kv_cache_interface import KVCacheSpecKind, get_kv_cache_spec_kind
from vllm.v1.kv_formats import all_formats

NUM_TOKENS = 10
LENGTHS = [1, 5, 49, 110]
FORMATS = [fmt.name for fmt in all_formats() if not fmt.latent]
MODES: list[dict[str, Any]] = [
    {"mamba_cache_mode": "none"},
    {"mamba_cache_mode": "align"},
    {"mamba_cache_mode": "all", "mamba_block_size": 16},
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, torch.nn.Module]:
    folder = tmp_path_factory.mktemp("tiny_bamba")
    config = BambaConfig(
        **SIZES,
        vocab_size=vocabulary(),
        mamba_n_heads=8,
        mamba_n_groups=2,
        mamba_d_state=16,
        mamba_chunk_size=16,
        attn_layer_indices=[1],
    )
    return str(folder), save_tiny(config, folder)


@pytest.fixture(scope="module")
def expected(saved: tuple[str, torch.nn.Module]) -> list[list[int]]:
    return hf_greedy(saved[1], prompts_of(LENGTHS), NUM_TOKENS)


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 50},
        {"num_gpu_blocks_override": 14, "max_model_len": 128},
        {"enable_prefix_caching": False},
    ],
    ids=str,
)
def test_tokens_equal_hugging_face_on_a_miss_and_on_a_hit(
    saved: tuple[str, torch.nn.Module],
    expected: list[list[int]],
    mode: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    prompts = prompts_of(LENGTHS)
    with engine(saved[0], **mode, **settings) as llm:
        assert greedy(llm, prompts, NUM_TOKENS) == expected
        assert greedy(llm, prompts, NUM_TOKENS) == expected


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_states_are_found_again_where_a_mode_caches_them(
    saved: tuple[str, torch.nn.Module], mode: dict[str, Any]
) -> None:
    with engine(saved[0], **mode) as llm:
        first, second = (cached_tokens(llm, LENGTHS[-1]) for _ in range(2))
        block = llm.llm_engine.cache_config.block_size
    assert first == 0
    hit = (LENGTHS[-1] - 1) // block * block
    assert second == (0 if mode["mamba_cache_mode"] == "none" else hit)


def cached_tokens(llm: LLM, length: int) -> int:
    params = SamplingParams(temperature=0.0, max_tokens=1)
    prompt = {"prompt_token_ids": prompts_of([length])[0]}
    return llm.generate([prompt], params, use_tqdm=False)[0].num_cached_tokens


@pytest.mark.parametrize("mode", ["none", "align"])
@pytest.mark.parametrize("name", FORMATS)
def test_the_plan_without_weights_is_the_engines(
    saved: tuple[str, torch.nn.Module], name: str, mode: str
) -> None:
    settings: dict[str, Any] = {
        "kv_cache_dtype": name,
        "mamba_cache_mode": mode,
        "kv_cache_memory_bytes": 8 << 20,
    }
    plan = plan_without_weights(EngineArgs(model=saved[0], dtype="float32", **settings))
    with engine(saved[0], **settings) as llm:
        core = llm.llm_engine.engine_core.engine_core
        cache, groups = core.vllm_config.cache_config, core.kv_cache_config
        miss = greedy(llm, prompts_of(LENGTHS), 4)
        assert greedy(llm, prompts_of(LENGTHS), 4) == miss
    assert plan.block_size == cache.block_size
    assert plan.num_blocks == cache.num_gpu_blocks
    assert plan.capacity_tokens == cache.kv_cache_size_tokens
    specs = [group.kv_cache_spec for group in groups.kv_cache_groups]
    assert len({spec.page_size_bytes for spec in specs}) == 1
    states = [
        spec for spec in specs if get_kv_cache_spec_kind(spec) is KVCacheSpecKind.MAMBA
    ]
    sizes = BambaSizes(saved[1].config)
    for spec in states:
        assert spec.unpadded_page_size_bytes == 4 * sizes.state_elements
        assert spec.page_size_bytes == (
            cache.mamba_page_size_padded or 4 * sizes.state_elements
        )


class BambaSizes:
    """Elements of both states of a layer, from the config."""

    def __init__(self, config: Any) -> None:
        inner = config.mamba_n_heads * config.mamba_d_head
        channels = inner + 2 * config.mamba_n_groups * config.mamba_d_state
        conv = channels * (config.mamba_d_conv - 1)
        self.state_elements = conv + inner * config.mamba_d_state
