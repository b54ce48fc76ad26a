"""Tiny random DeepSeek models, one per variation that a config can ask for."""

import copy
from typing import Any

import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    PretrainedConfig,
)

VOCABULARY = 99
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "routed_scaling_factor": 1.7,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
}
_GROUPS = {"n_group": 4, "topk_group": 2}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
}
# The latent that DeepSeek's own records are made for.
REAL_LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}


def _v2(**changes: Any) -> tuple[PretrainedConfig, type]:
    return DeepseekV2Config(**(_SIZES | changes)), DeepseekV2ForCausalLM


def _v3(**changes: Any) -> tuple[PretrainedConfig, type]:
    return DeepseekV3Config(**(_SIZES | _GROUPS | changes)), DeepseekV3ForCausalLM


# name -> (config, model class)
DEEPSEEK: dict[str, tuple[PretrainedConfig, type]] = {
    "v2": _v2(),
    "v2-lite": _v2(q_lora_rank=None, routed_scaling_factor=1.0),
    "v2-groups": _v2(topk_method="group_limited_greedy", **_GROUPS),
    "v2-yarn": _v2(rope_parameters=_YARN),
    "v2-biases": _v2(attention_bias=True, mlp_bias=False),
    "v2-dense": _v2(first_k_dense_replace=3),
    "v2-real-latent": _v2(**REAL_LATENT),
    "v3": _v3(),
    "v3-yarn": _v3(rope_parameters=_YARN),
    "v3-halves": _v3(rope_interleave=False),
    "v3-unnormalised": _v3(norm_topk_prob=False, q_lora_rank=None),
    "v3-real-latent": _v3(**REAL_LATENT, rope_parameters=_YARN),
}


def deepseek_model(
    name: str, seed: int = 0, changes: dict[str, Any] | None = None
) -> torch.nn.Module:
    """A random float32 model whose biases and norms are away from their defaults."""
    config, model_cls = copy.deepcopy(DEEPSEEK[name])
    for key, value in (changes or {}).items():
        setattr(config, key, value)
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = model_cls(config).eval()
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() == 1:
                param.add_(torch.randn_like(param) * 0.2)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn_like(buffer) * 0.2)
    return model
