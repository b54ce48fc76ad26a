"""Logits of every family equal Hugging Face's, over real pages."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Llama4Config,
    Llama4ForConditionalGeneration,
    Llama4VisionConfig,
    SiglipVisionConfig,
)

from tests.model_executor.families import FAMILIES, engine_config, hf_model, saved
from tests.model_executor.paged import PagedRunner
from vllm.forward_context import set_forward_context
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.models.registry import ModelRegistry

NUM_TOKENS = 41  # several windows and blocks long


@pytest.fixture(scope="module")
def ids() -> list[int]:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(0, 99, (NUM_TOKENS,), generator=generator).tolist()


@torch.inference_mode()
def hf_logits(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_hf_in_prefill_chunks_and_decode(
    family: str, ids: list[int], tmp_path: Path
) -> None:
    model = hf_model(family)
    config = engine_config(saved(model, tmp_path))
    ours = get_model(vllm_config=config)
    runner = PagedRunner(ours, config, NUM_TOKENS)
    parts = [runner.step(ids[:18]), runner.step(ids[18:36])]
    parts += [runner.step([token]) for token in ids[36:]]
    torch.testing.assert_close(
        torch.cat(parts), hf_logits(model, ids), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(
    "family", ["llama-tied", "qwen3", "gemma3", "mixtral", "gpt-oss", "llama4"]
)
def test_bf16_with_prepacked_weights_stays_close_to_hf(
    family: str, ids: list[int], tmp_path: Path
) -> None:
    model = hf_model(family)
    config = engine_config(saved(model, tmp_path), dtype="bfloat16")
    found = PagedRunner(get_model(vllm_config=config), config, NUM_TOKENS).step(ids)
    assert found.dtype == torch.bfloat16
    exact = hf_logits(model, ids)
    theirs = hf_logits(model.to(torch.bfloat16), ids)
    scale = exact.abs().max()
    error = (found.float() - exact).abs().max() / scale
    their_error = (theirs.float() - exact).abs().max() / scale
    assert error < max(2 * their_error, 0.02)


def test_disabling_the_window_makes_every_layer_attend_to_everything(
    ids: list[int], tmp_path: Path
) -> None:
    model = hf_model("mistral-window")
    config = engine_config(saved(model, tmp_path), disable_sliding_window=True)
    ours = get_model(vllm_config=config)
    assert all(
        layer.sliding_window is None
        for layer in config.compilation_config.static_forward_context.values()
    )
    model.config.sliding_window = None
    found = PagedRunner(ours, config, NUM_TOKENS).step(ids)
    torch.testing.assert_close(found, hf_logits(model, ids), rtol=1e-4, atol=1e-4)


def test_a_run_without_attention_metadata_gives_finite_hidden_states(
    tmp_path: Path,
) -> None:
    config = engine_config(saved(hf_model("llama"), tmp_path))
    model = get_model(vllm_config=config)
    with set_forward_context(None, config), torch.inference_mode():
        hidden = model(torch.zeros(5, dtype=torch.long), torch.arange(5))
    assert hidden.shape == (5, 64)
    assert hidden.isfinite().all()


@pytest.mark.parametrize("family", ["qwen2-mixed-windows", "mistral-window"])
def test_windows_belong_to_the_layers_that_the_config_names(
    family: str, tmp_path: Path
) -> None:
    config = engine_config(saved(hf_model(family), tmp_path))
    get_model(vllm_config=config)
    layers = config.compilation_config.static_forward_context
    windows = [layer.sliding_window for layer in layers.values()]
    expected = {"qwen2-mixed-windows": [None, 9, 9], "mistral-window": [7, 7, 7]}
    assert windows == expected[family]
    assert list(layers) == [f"model.layers.{i}.self_attn.attn" for i in range(3)]


VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


@pytest.mark.parametrize("family", ["gemma3", "llama4"])
def test_checkpoints_that_also_read_pictures_give_their_text_model(
    family: str, ids: list[int], tmp_path: Path
) -> None:
    text = copy.deepcopy(FAMILIES[family][0])
    torch.manual_seed(0)
    if family == "gemma3":
        vision: Any = SiglipVisionConfig(**VISION, image_size=28, patch_size=14)
        config: Any = Gemma3Config(text_config=text, vision_config=vision)
        config.image_token_id = 98
        model: Any = Gemma3ForConditionalGeneration(config)
    else:
        vision = Llama4VisionConfig(**VISION, image_size=28, patch_size=14)
        model = Llama4ForConditionalGeneration(
            Llama4Config(text_config=text, vision_config=vision)
        )
    config = engine_config(saved(model.eval(), tmp_path))
    runner = PagedRunner(get_model(vllm_config=config), config, NUM_TOKENS)
    texts = [i for i in ids if i != 98]
    reference = model if family == "gemma3" else model.language_model
    expected, found = hf_logits(reference, texts), runner.step(texts)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_every_architecture_has_a_row_in_the_documentation() -> None:
    text = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    table = text.partition("## Layers")[0]
    named = set(re.findall(r"`(\w+For(?:CausalLM|ConditionalGeneration))`", table))
    assert named == set(ModelRegistry.get_supported_archs())
