"""Tiny random models, one per variation of the decoder that a config can ask for."""

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PretrainedConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from vllm.config import ModelConfig, VllmConfig

_SIZES: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "rms_norm_eps": 1e-5,
}


def _sizes(**changes: Any) -> dict[str, Any]:
    return _SIZES | changes


# name -> (config, model class)
FAMILIES: dict[str, tuple[PretrainedConfig, type]] = {
    "llama": (LlamaConfig(**_sizes()), LlamaForCausalLM),
    "llama-tied": (
        LlamaConfig(**_sizes(tie_word_embeddings=True)),
        LlamaForCausalLM,
    ),
    "llama-biases": (
        LlamaConfig(**_sizes(attention_bias=True, mlp_bias=True)),
        LlamaForCausalLM,
    ),
    "llama-head-dim": (LlamaConfig(**_sizes(head_dim=32)), LlamaForCausalLM),
    "llama-one-kv-head": (
        LlamaConfig(**_sizes(num_key_value_heads=1)),
        LlamaForCausalLM,
    ),
    "mistral": (MistralConfig(**_sizes(sliding_window=None)), MistralForCausalLM),
    "mistral-window": (MistralConfig(**_sizes(sliding_window=7)), MistralForCausalLM),
    "qwen2": (Qwen2Config(**_sizes()), Qwen2ForCausalLM),
    "qwen2-mixed-windows": (
        Qwen2Config(
            **_sizes(use_sliding_window=True, sliding_window=9, max_window_layers=1)
        ),
        Qwen2ForCausalLM,
    ),
    "qwen3": (Qwen3Config(**_sizes(head_dim=32)), Qwen3ForCausalLM),
    "qwen3-tied-biases": (
        Qwen3Config(
            **_sizes(head_dim=16, attention_bias=True, tie_word_embeddings=True)
        ),
        Qwen3ForCausalLM,
    ),
}


_GEMMA: dict[str, Any] = _sizes(
    num_hidden_layers=4, head_dim=32, query_pre_attn_scalar=24, sliding_window=9
)
FAMILIES["gemma2"] = (
    Gemma2Config(
        **_GEMMA | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 7.0}
    ),
    Gemma2ForCausalLM,
)
FAMILIES["gemma3"] = (
    Gemma3TextConfig(**_GEMMA, sliding_window_pattern=3),
    Gemma3ForCausalLM,
)
FAMILIES["gemma3-linear-rope"] = (
    Gemma3TextConfig(
        **_GEMMA,
        sliding_window_pattern=2,
        final_logit_softcapping=9.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    ),
    Gemma3ForCausalLM,
)


_EXPERTS: dict[str, Any] = {"num_local_experts": 5, "num_experts_per_tok": 2}
FAMILIES["mixtral"] = (
    MixtralConfig(**_sizes(**_EXPERTS, sliding_window=None)),
    MixtralForCausalLM,
)
FAMILIES["mixtral-window"] = (
    MixtralConfig(**_sizes(**_EXPERTS, sliding_window=11)),
    MixtralForCausalLM,
)
for _norm in (True, False):
    FAMILIES[f"qwen3-moe-norm-{_norm}".lower()] = (
        Qwen3MoeConfig(
            **_sizes(head_dim=16, num_experts=6, num_experts_per_tok=3),
            moe_intermediate_size=24,
            norm_topk_prob=_norm,
            mlp_only_layers=[1],
        ),
        Qwen3MoeForCausalLM,
    )
FAMILIES["gpt-oss"] = (
    GptOssConfig(
        **_sizes(**_EXPERTS, head_dim=16, sliding_window=10),
        swiglu_limit=2.0,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 32,
        },
    ),
    GptOssForCausalLM,
)
FAMILIES["llama4"] = (
    Llama4TextConfig(
        **_sizes(num_hidden_layers=4, head_dim=16, num_local_experts=5),
        num_experts_per_tok=2,
        intermediate_size_mlp=80,
        moe_layers=[1, 3],
        no_rope_layer_interval=2,
        attention_chunk_size=16,
        floor_scale=4,
    ),
    Llama4ForCausalLM,
)


_LLAMA4 = FAMILIES["llama4"][0].to_dict()
FAMILIES["llama4-one-expert"] = (
    Llama4TextConfig(
        **_LLAMA4 | {"num_experts_per_tok": 1, "use_qk_norm": False},
    ),
    Llama4ForCausalLM,
)


def hf_model(name: str, seed: int = 0) -> torch.nn.Module:
    """A random float32 model with biases and norms away from their defaults."""
    config, model_cls = copy.deepcopy(FAMILIES[name])
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = model_cls(config).eval()
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.dim() == 1 or name.endswith("bias"):
                param.add_(torch.randn_like(param) * 0.2)
    return model


def saved(model: torch.nn.Module, folder: Path, **how: Any) -> Path:
    """Saves a model as safetensors; `how` goes to save_pretrained."""
    model.save_pretrained(folder, **how)
    return folder


def engine_config(
    folder: Path | str, dtype: str = "float32", **model: Any
) -> VllmConfig:
    """A config that serves the model in `folder` on the CPU."""
    return VllmConfig(model_config=ModelConfig(model=str(folder), dtype=dtype, **model))
