"""One tiny model of each kind through the whole engine: tokens are Hugging Face's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    GptOssConfig,
    Llama4TextConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen3MoeConfig,
)

from tests.e2e.tiny import (
    SIZES,
    engine,
    greedy,
    hf_greedy,
    prompts_of,
    save_tiny,
    vocabulary,
)
from vllm.v1.kv_cache_interface import KVCacheSpecKind as Kind
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

NUM_TOKENS = 10
LENGTHS = [6, 31, 64, 120]
_SIZES = SIZES | {"vocab_size": vocabulary(), "head_dim": 16}

MODELS: dict[str, tuple[PretrainedConfig, set[Kind]]] = {
    "mixtral": (
        MixtralConfig(**_SIZES, num_local_experts=4, sliding_window=None),
        {Kind.FULL_ATTENTION},
    ),
    "qwen3-moe": (
        Qwen3MoeConfig(
            **_SIZES,
            num_experts=6,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            norm_topk_prob=True,
        ),
        {Kind.FULL_ATTENTION},
    ),
    "gpt-oss": (
        GptOssConfig(
            **_SIZES,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=24,
            swiglu_limit=3.0,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 4.0,
                "truncate": False,
                "original_max_position_embeddings": 64,
            },
        ),
        {Kind.FULL_ATTENTION, Kind.SLIDING_WINDOW},
    ),
    "llama4": (
        Llama4TextConfig(
            **_SIZES,
            num_local_experts=4,
            intermediate_size_mlp=80,
            no_rope_layer_interval=2,
            attention_chunk_size=32,
            floor_scale=8,
        ),
        {Kind.FULL_ATTENTION, Kind.CHUNKED_LOCAL_ATTENTION},
    ),
}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"disable_hybrid_kv_cache_manager": True, "block_size": 32},
    {"max_num_batched_tokens": 40, "num_gpu_blocks_override": 48},
    {"enable_prefix_caching": False},
]


@pytest.fixture(scope="module", params=MODELS)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, torch.nn.Module]:
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, folder, save_tiny(MODELS[request.param][0], folder)


@pytest.fixture(scope="module")
def expected(model: tuple[str, Path, torch.nn.Module]) -> list[list[int]]:
    return hf_greedy(model[2], prompts_of(LENGTHS), NUM_TOKENS)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_tokens_equal_hugging_face_on_a_miss_and_on_a_hit(
    model: tuple[str, Path, torch.nn.Module],
    expected: list[list[int]],
    settings: dict[str, Any],
) -> None:
    name, folder, _ = model
    with engine(folder, **settings) as llm:
        assert greedy(llm, prompts_of(LENGTHS), NUM_TOKENS) == expected
        assert greedy(llm, prompts_of(LENGTHS), NUM_TOKENS) == expected
        config = llm.llm_engine.engine_core.engine_core.kv_cache_config
        kinds = {
            get_kv_cache_spec_kind(g.kv_cache_spec) for g in config.kv_cache_groups
        }
    one_kind = "disable_hybrid_kv_cache_manager" in settings
    assert kinds == ({Kind.FULL_ATTENTION} if one_kind else MODELS[name][1])


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "int8_per_token_head"])
def test_a_hit_equals_a_miss_in_packed_formats(
    model: tuple[str, Path, torch.nn.Module], kv_cache_dtype: str
) -> None:
    prompts = prompts_of(LENGTHS)
    with engine(model[1], kv_cache_dtype=kv_cache_dtype) as llm:
        miss = greedy(llm, prompts, NUM_TOKENS)
        assert greedy(llm, prompts, NUM_TOKENS) == miss
    whole = {"kv_cache_dtype": kv_cache_dtype, "disable_hybrid_kv_cache_manager": True}
    with engine(model[1], **whole) as llm:
        assert greedy(llm, prompts, NUM_TOKENS) == miss
