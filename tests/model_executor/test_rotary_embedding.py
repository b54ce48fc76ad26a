"""Rotary tables and rotations equal Hugging Face's for every scaling scheme."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from vllm.model_executor.layers.rope_scaling import ROPE_SCHEMES
from vllm.model_executor.layers.rotary_embedding import get_rope

HEAD, MAX_POSITION = 32, 64

SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn-betas": {
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 16,
        "beta_slow": 2,
        "truncate": False,
        "original_max_position_embeddings": 16,
    },
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        "original_max_position_embeddings": 16,
    },
    "yarn-attention-factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "attention_factor": 1.3,
        "original_max_position_embeddings": 16,
    },
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0 + 0.01 * i for i in range(HEAD // 2)],
        "long_factor": [1.0 + 0.5 * i for i in range(HEAD // 2)],
        "original_max_position_embeddings": 32,
    },
}


def config_with(params: dict[str, Any]) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=4 * HEAD,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITION,
        rope_parameters={"rope_theta": 5000.0, **params},
    )


def test_every_scheme_has_a_case() -> None:
    assert {params["rope_type"] for params in SCALINGS.values()} == set(ROPE_SCHEMES)


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("num_positions", [24, MAX_POSITION, 3 * MAX_POSITION])
def test_table_equals_hf_for_a_sequence_of_that_length(
    name: str, num_positions: int
) -> None:
    config = config_with(SCALINGS[name])
    rope = get_rope(
        HEAD,
        MAX_POSITION,
        rope_parameters=config.rope_parameters,
        dtype=torch.float32,
        num_positions=num_positions,
    )
    positions = torch.arange(num_positions)
    # Hugging Face picks the frequencies by the longest position that it has seen.
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    half = HEAD // 2
    torch.testing.assert_close(
        rope.cos_sin_cache[:, :half], cos[0, :, :half], rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(
        rope.cos_sin_cache[:, half:], sin[0, :, :half], rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("name", SCALINGS)
def test_rotation_equals_hf(name: str) -> None:
    config = config_with(SCALINGS[name])
    rope = get_rope(
        HEAD,
        MAX_POSITION,
        rope_parameters=config.rope_parameters,
        dtype=torch.float32,
    )
    positions = torch.tensor([0, 5, 63, 5, 17])
    query, key = torch.randn(5, 4, HEAD), torch.randn(5, 2, HEAD)
    every = torch.arange(MAX_POSITION)[None]
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), every)
    expected = apply_rotary_pos_emb(
        query.transpose(0, 1)[None],
        key.transpose(0, 1)[None],
        cos[:, positions],
        sin[:, positions],
    )
    found = rope(positions, query.flatten(1), key.flatten(1))
    for ours, theirs, heads in zip(found, expected, (4, 2), strict=True):
        theirs = theirs[0].transpose(0, 1).reshape(5, heads * HEAD)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_partial_rotation_leaves_the_rest_of_a_head_alone() -> None:
    params = {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}
    rope = get_rope(HEAD, MAX_POSITION, rope_parameters=params, dtype=torch.float32)
    whole = get_rope(
        HEAD // 2,
        MAX_POSITION,
        rope_parameters={"rope_theta": 1e4, "rope_type": "default"},
        dtype=torch.float32,
    )
    x = torch.randn(3, 2, HEAD)
    positions = torch.tensor([1, 2, 60])
    found = rope.rotate(x, rope.rows(positions))
    half = HEAD // 2
    assert torch.equal(found[..., half:], x[..., half:])
    rotated = whole.rotate(x[..., :half], whole.rows(positions))
    assert torch.equal(found[..., :half], rotated)


def test_interleaved_style_rotates_neighbours() -> None:
    rope = get_rope(
        HEAD,
        MAX_POSITION,
        is_neox_style=False,
        rope_parameters={"rope_theta": 100.0},
        dtype=torch.float32,
    )
    x = torch.randn(4, 3, HEAD)
    positions = torch.tensor([0, 1, 9, 50])
    found = torch.view_as_complex(
        rope.rotate(x, rope.rows(positions)).unflatten(-1, (-1, 2))
    )
    angles = positions[:, None] / 100.0 ** (torch.arange(0, HEAD, 2) / HEAD)
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]
    expected = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turn
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_frequencies_agree_with_the_schemes_that_hf_knows() -> None:
    missing = set(ROPE_INIT_FUNCTIONS) - set(ROPE_SCHEMES)
    assert missing <= {"proportional"}  # of models that are not served


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"rope_type": "spiral"}, "spiral"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "longrope", "original_max_position_embeddings": 8}, "factor"),
        ({"partial_rotary_factor": 0.1}, "odd"),
    ],
)
def test_wrong_parameters_are_named(params: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        get_rope(HEAD, MAX_POSITION, rope_parameters=params)


def test_equal_arguments_share_one_table() -> None:
    first = get_rope(HEAD, MAX_POSITION, rope_parameters={"rope_theta": 7.0})
    assert get_rope(HEAD, MAX_POSITION, rope_parameters={"rope_theta": 7.0}) is first
