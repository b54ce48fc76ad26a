"""Tiny models of every kind of KV cache group, and stores of their pages."""

from pathlib import Path
from typing import Any

import pytest
from transformers import BambaConfig, Gemma3TextConfig, LlamaConfig

from tests.e2e.tiny import SIZES, save_tiny, vocabulary
from tests.model_executor.deepseek import deepseek_model


def _llama(folder: Path) -> None:
    sizes = SIZES | {"num_hidden_layers": 4, "head_dim": 32}
    save_tiny(LlamaConfig(**sizes, vocab_size=vocabulary()), folder)


def _window(folder: Path) -> None:
    sizes = SIZES | {"vocab_size": vocabulary(), "num_hidden_layers": 6, "head_dim": 32}
    window: dict[str, Any] = {"sliding_window": 24, "sliding_window_pattern": 3}
    save_tiny(Gemma3TextConfig(**sizes, query_pre_attn_scalar=24, **window), folder)


def _states(folder: Path) -> None:
    config = BambaConfig(
        **SIZES,
        vocab_size=vocabulary(),
        mamba_n_heads=8,
        mamba_n_groups=2,
        mamba_d_state=16,
        mamba_chunk_size=16,
        attn_layer_indices=[1],
    )
    save_tiny(config, folder)


def _latent(folder: Path) -> None:
    deepseek_model("v2-real-latent").save_pretrained(folder)


MODELS = {"full": _llama, "window": _window, "states": _states, "latent": _latent}


class ModelFolders:
    """Folders by kind of model, made on first use."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __getitem__(self, kind: str) -> str:
        folder = self.root / kind
        if not folder.exists():
            folder.mkdir()
            MODELS[kind](folder)
        return str(folder)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> ModelFolders:
    return ModelFolders(tmp_path_factory.mktemp("models"))
