"""`vllm kv-plan` prices DeepSeek-V3 from its config alone, and quickly."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.cli.kv_plan import plan_without_weights
from vllm.utils.mem_constants import GiB_bytes

LAYERS = 61
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": LAYERS,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "vocab_size": 129280,
    "torch_dtype": "bfloat16",
    # As the published weights are; a plan does not read them.
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
BYTES_PER_TOKEN_AND_LAYER = {
    "auto": 1152,
    "bfloat16": 1152,
    "fp8": 576,
    "fp8_ds_mla": 656,
    "nvfp4_ds_mla": 352,
    "int8_per_token_head": 584,
    "fp8_per_token_head": 584,
    "int4_per_token_head": 296,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deepseek_v3")
    (folder / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    return folder


def arguments(folder: Path, cache_dtype: str, **how: Any) -> EngineArgs:
    return EngineArgs(
        model=str(folder),
        kv_cache_dtype=cache_dtype,
        kv_cache_memory_bytes=64 * GiB_bytes,
        **how,
    )


@pytest.mark.parametrize("cache_dtype", BYTES_PER_TOKEN_AND_LAYER)
def test_every_latent_format_is_priced_by_its_record(
    cache_dtype: str, folder: Path
) -> None:
    started = time.perf_counter()
    plan = plan_without_weights(arguments(folder, cache_dtype))
    assert time.perf_counter() - started < 20
    per_layer = BYTES_PER_TOKEN_AND_LAYER[cache_dtype]
    (group,) = plan.groups
    assert group.layers == f"0-{LAYERS - 1}"
    assert (group.head_slots, group.state_bytes) == (1, per_layer)
    assert plan.bytes_per_token == LAYERS * per_layer
    assert plan.saving == pytest.approx(1152 / per_layer)
    assert group.backend == "CPU_MLA"


def test_skipped_layers_are_priced_dense(folder: Path) -> None:
    asked = arguments(folder, "fp8_ds_mla", kv_cache_dtype_skip_layers=["0", "60"])
    plan = plan_without_weights(asked)
    assert plan.bytes_per_token == (LAYERS - 2) * 656 + 2 * 1152


@pytest.mark.parametrize("cache_dtype", ["nvfp4", "turboquant_4bit_nc"])
def test_formats_for_heads_are_refused_by_name(cache_dtype: str, folder: Path) -> None:
    with pytest.raises(ValueError, match=f"{cache_dtype} .*one latent per token"):
        plan_without_weights(arguments(folder, cache_dtype))
