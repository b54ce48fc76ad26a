"""Gemma from GGUF: config, norms and rotations are those of the model it came from."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.gemma3 import gguf_names
from tests.model_executor.families import engine_config, hf_model
from tests.model_executor.paged import PagedRunner
from tests.transformers_utils.gguf_files import write_gguf
from vllm.model_executor.model_loader import get_model
from vllm.transformers_utils.config import get_config
from vllm.transformers_utils.source import resolve_model

IDS = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26, 43, 38, 32, 79, 50, 28]


def exported(model: torch.nn.Module, path: Path, pattern: int | None) -> Path:
    """Writes a Hugging Face Gemma 3 as its converter would."""
    config = model.config
    tensors = {}
    for theirs, name in gguf_names(model).items():
        data = model.state_dict()[name].numpy()
        plus = 1 if name.endswith("norm.weight") else 0
        tensors[theirs] = np.ascontiguousarray(data + plus)
    values = {
        ".block_count": config.num_hidden_layers,
        ".context_length": config.max_position_embeddings,
        ".attention.key_length": config.head_dim,
        ".attention.value_length": config.head_dim,
        ".attention.sliding_window": config.sliding_window,
        ".attention.sliding_window_pattern": pattern,
        ".rope.freq_base": 1e6,
    }
    return write_gguf(path / "m.gguf", arch="gemma3", tensors=tensors, values=values)


@torch.inference_mode()
def test_an_exported_model_gives_the_same_logits(tmp_path: Path) -> None:
    model = hf_model("gemma3")
    model.config.query_pre_attn_scalar = model.config.head_dim
    for layer in model.model.layers:
        layer.self_attn.scaling = model.config.head_dim**-0.5
    config = engine_config(exported(model, tmp_path, pattern=3))
    runner = PagedRunner(get_model(vllm_config=config), config, len(IDS))
    expected = model(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(runner.step(IDS), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("pattern", "full"), [(None, []), (2, [1, 3])])
def test_every_sixth_layer_attends_to_everything_unless_the_file_says_otherwise(
    tmp_path: Path, pattern: int | None, full: list[int]
) -> None:
    path = exported(hf_model("gemma3"), tmp_path, pattern)
    config = get_config(resolve_model(str(path)))
    kinds = config.layer_types
    assert [i for i, kind in enumerate(kinds) if kind == "full_attention"] == full
    rope = config.rope_parameters
    assert rope["sliding_attention"]["rope_theta"] == 1e4
    assert rope["full_attention"]["rope_theta"] == 1e6
