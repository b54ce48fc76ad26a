"""DeepSeek's logits equal Hugging Face's, and quantised latents do what they say."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.model_executor.deepseek import DEEPSEEK, VOCABULARY, deepseek_model
from tests.model_executor.families import engine_config, saved
from tests.model_executor.paged import PagedRunner
from vllm.config import CacheConfig, ModelConfig, VllmConfig
from vllm.forward_context import set_forward_context
from vllm.model_executor.model_loader import get_model
from vllm.v1.kv_formats import all_formats, by_name

NUM_TOKENS = 100  # long enough for the expanded form of the small latent


@pytest.fixture(scope="module")
def ids() -> list[int]:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(0, VOCABULARY, (NUM_TOKENS,), generator=generator).tolist()


@torch.inference_mode()
def hf_logits(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize("name", DEEPSEEK)
def test_logits_equal_hf_in_one_prefill_in_chunks_and_in_decode(
    name: str, ids: list[int], tmp_path: Path
) -> None:
    model = deepseek_model(name)
    config = engine_config(saved(model, tmp_path))
    ours = get_model(vllm_config=config)
    whole = PagedRunner(ours, config, NUM_TOKENS).step(ids)
    expected = hf_logits(model, ids)
    torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-4)
    runner = PagedRunner(ours, config, NUM_TOKENS)
    parts = [runner.step(ids[:80]), runner.step(ids[80:96])]
    parts += [runner.step([token]) for token in ids[96:]]
    torch.testing.assert_close(torch.cat(parts), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["v2", "v3", "v2-real-latent", "v3-real-latent"])
def test_bf16_stays_close_to_hf(name: str, ids: list[int], tmp_path: Path) -> None:
    model = deepseek_model(name)
    config = engine_config(saved(model, tmp_path), dtype="bfloat16")
    ours = get_model(vllm_config=config)
    found = PagedRunner(ours, config, NUM_TOKENS).step(ids)
    assert found.dtype == torch.bfloat16
    exact = hf_logits(model, ids)
    theirs = hf_logits(model.to(torch.bfloat16), ids)
    scale = exact.square().mean().sqrt()
    error = (found.float() - exact).square().mean().sqrt() / scale
    their_error = (theirs.float() - exact).square().mean().sqrt() / scale
    assert error < max(3 * their_error, 0.02)  # experts flip near ties


# --- formats ------------------------------------------------------------------------

LATENT_FORMATS = [fmt.name for fmt in all_formats() if fmt.latent_capable]


def quantised(folder: Path, cache_dtype: str, **cache: Any) -> VllmConfig:
    return VllmConfig(
        model_config=ModelConfig(model=str(folder), dtype="float32"),
        cache_config=CacheConfig(cache_dtype=cache_dtype, **cache),
    )


@torch.inference_mode()
def hf_logits_with_stored_latents(
    model: torch.nn.Module, ids: list[int], cache_dtype: str
) -> torch.Tensor:
    """Hugging Face's own arithmetic over latents that went through the format."""
    fmt = by_name(cache_dtype)
    lora = model.config.kv_lora_rank
    hooks = []
    for layer in model.model.layers:
        attention = layer.self_attn
        expand = attention.expand_kv

        def stored(nope: Any, rope: Any, expand: Any = expand) -> Any:
            state = torch.cat([nope, rope], dim=-1)[0].transpose(0, 1)
            state, _ = fmt.resolve(torch.float32).roundtrip(state, None)
            state = state.transpose(0, 1)[None]
            return expand(state[..., :lora], state[..., lora:])

        attention.expand_kv = stored
        hooks.append(attention)
    try:
        return model(torch.tensor([ids])).logits[0]
    finally:
        for attention in hooks:
            del attention.expand_kv


# A rotation of pairs leaves V2's keys where they are; V3 moves them in Hugging Face.
@pytest.mark.parametrize("cache_dtype", LATENT_FORMATS)
def test_every_format_equals_a_run_over_decoded_latents(
    cache_dtype: str, ids: list[int], tmp_path: Path
) -> None:
    model = deepseek_model("v2-real-latent")
    config = quantised(saved(model, tmp_path), cache_dtype)
    ours = get_model(vllm_config=config)
    expected = hf_logits_with_stored_latents(model, ids, cache_dtype)
    runner = PagedRunner(ours, config, NUM_TOKENS)
    parts = [runner.step(ids[:70]), runner.step(ids[70:97])]
    parts += [runner.step([token]) for token in ids[97:]]
    found = torch.cat(parts)
    lossless = by_name(cache_dtype).resolve(torch.float32).tolerance.key == 0
    # A code next to a tie may fall either way after another order of summation.
    tolerance = 1e-4 if lossless else 5e-3
    scale, error = expected.abs().max(), (found - expected).abs()
    assert error.max() <= tolerance * scale
    assert error.mean() <= 0.05 * tolerance * scale
    loss = (expected - hf_logits(model, ids)).abs()
    assert lossless or error.mean() < 0.2 * loss.mean()


@pytest.mark.parametrize("cache_dtype", LATENT_FORMATS)
def test_chunks_and_decode_see_what_one_prefill_sees(
    cache_dtype: str, ids: list[int], tmp_path: Path
) -> None:
    config = quantised(saved(deepseek_model("v3-real-latent"), tmp_path), cache_dtype)
    ours = get_model(vllm_config=config)
    for layer in config.compilation_config.static_forward_context.values():
        layer.impl.absorb_up_to = 1  # all of it expanded
    whole = PagedRunner(ours, config, NUM_TOKENS).step(ids)
    runner = PagedRunner(ours, config, NUM_TOKENS)
    parts = [runner.step(ids[:70]), runner.step(ids[70:97])]
    parts += [runner.step([token]) for token in ids[97:]]
    scale = whole.abs().max()
    error = (torch.cat(parts) - whole).abs()
    assert error.max() <= 2e-2 * scale and error.mean() <= 1e-3 * scale


def test_a_run_without_attention_metadata_gives_finite_hidden_states(
    tmp_path: Path,
) -> None:
    config = engine_config(saved(deepseek_model("v3"), tmp_path))
    model = get_model(vllm_config=config)
    with set_forward_context(None, config), torch.inference_mode():
        hidden = model(torch.zeros(5, dtype=torch.long), torch.arange(5))
    assert hidden.shape == (5, 64)
    assert hidden.isfinite().all()


# --- checkpoints --------------------------------------------------------------------


def test_layers_past_the_last_one_are_left_out(tmp_path: Path, ids: list[int]) -> None:
    model = deepseek_model("v3")
    folder = saved(model, tmp_path)
    config = VllmConfig(
        model_config=ModelConfig(
            model=str(folder), dtype="float32", hf_overrides={"num_hidden_layers": 2}
        )
    )
    ours = get_model(vllm_config=config)
    assert len(ours.model.layers) == 2
    del model.model.layers[2]
    model.config.num_hidden_layers = 2
    found = PagedRunner(ours, config, NUM_TOKENS).step(ids)
    torch.testing.assert_close(found, hf_logits(model, ids), rtol=1e-4, atol=1e-4)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    file = saved(deepseek_model("v2"), tmp_path) / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.experts.7.gate_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"experts\.7\.gate_proj\.weight \[32, 64\]"):
        get_model(vllm_config=engine_config(tmp_path))


def test_an_unknown_choice_of_experts_is_refused(tmp_path: Path) -> None:
    folder = saved(deepseek_model("v2"), tmp_path)
    config = VllmConfig(
        model_config=ModelConfig(
            model=str(folder), dtype="float32", hf_overrides={"topk_method": "lottery"}
        )
    )
    with pytest.raises(ValueError, match=r"lottery.*greedy"):
        get_model(vllm_config=config)
