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
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PretrainedConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
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


def hf_model(name: str, seed: int = 0) -> torch.nn.Module:
    """A random float32 model with biases and norms away from their defaults."""
    config, model_cls = copy.deepcopy(FAMILIES[name])
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = model_cls(config).eval()
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() == 1:
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
