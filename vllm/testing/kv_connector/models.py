"""Models of a few thousand random weights, one for each kind of KV cache.

Knows Hugging Face configurations. The weights are large, so that a wrong byte of the
cache shows in the tokens.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    DeepseekV2Config,
    Gemma3TextConfig,
    LlamaConfig,
    PretrainedConfig,
)

VOCABULARY = 320
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def _full() -> PretrainedConfig:
    return LlamaConfig(**_SIZES, head_dim=32)


def _window() -> PretrainedConfig:
    return Gemma3TextConfig(
        **(_SIZES | {"num_hidden_layers": 6}),
        head_dim=32,
        query_pre_attn_scalar=24,
        sliding_window=24,
        sliding_window_pattern=3,
    )


def _states() -> PretrainedConfig:
    return BambaConfig(
        **_SIZES,
        mamba_n_heads=8,
        mamba_n_groups=2,
        mamba_d_state=16,
        mamba_chunk_size=16,
        attn_layer_indices=[1],
    )


def _latent() -> PretrainedConfig:
    """With the latent that the packed latent formats are made for."""
    sizes = {"num_hidden_layers": 3, "num_key_value_heads": 4, "initializer_range": 0.1}
    return DeepseekV2Config(
        **(_SIZES | sizes),
        moe_intermediate_size=32,
        n_routed_experts=8,
        n_shared_experts=2,
        num_experts_per_tok=3,
        first_k_dense_replace=1,
        q_lora_rank=48,
        kv_lora_rank=512,
        qk_nope_head_dim=24,
        qk_rope_head_dim=64,
        v_head_dim=20,
        routed_scaling_factor=1.7,
    )


KINDS: dict[str, Callable[[], PretrainedConfig]] = {
    "full": _full,
    "window": _window,
    "states": _states,
    "latent": _latent,
}


def save_model(kind: str, folder: Path) -> None:
    """Writes the config and float32 weights, the same in every run."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(KINDS[kind](), dtype=torch.float32)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.dim() == 1 or name.endswith("bias"):
                param.add_(torch.randn_like(param) * 0.1)  # away from their defaults
    model.save_pretrained(folder)


class ModelFolders:
    """Folders by kind of model, made on first use."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __getitem__(self, kind: str) -> str:
        folder = self.root / kind
        if not folder.exists():
            folder.mkdir(parents=True)
            save_model(kind, folder)
        return str(folder)
