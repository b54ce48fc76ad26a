"""Models that nothing here implements run through transformers' own code, on our pages;
what pages cannot serve is refused by name."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BloomConfig,
    Cohere2Config,
    FalconConfig,
    GPT2Config,
    GraniteConfig,
    Llama4TextConfig,
    MistralConfig,
    Olmo2Config,
    OlmoeConfig,
    OPTConfig,
    Phi3Config,
    PretrainedConfig,
    RecurrentGemmaConfig,
    Starcoder2Config,
)

from tests.e2e.tiny import (
    SIZES,
    engine,
    greedy,
    hf_greedy,
    prompts_of,
    save_tiny,
    vocabulary,
)
from vllm.config import ModelConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.cli.kv_plan import plan_without_weights
from vllm.model_executor.models.transformers_probe import reach_of

NUM_TOKENS = 8
LENGTHS = [5, 40, 90]
_VOCAB = {"vocab_size": vocabulary()}
_SIZES = SIZES | _VOCAB
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [float(i) for i in range(1, 9)],
    "original_max_position_embeddings": 64,
}

# name -> (config, windows of the layers)
SERVED: dict[str, tuple[PretrainedConfig, list[int | None]]] = {
    "olmo2": (Olmo2Config(**_SIZES), [None] * 4),
    "starcoder2": (Starcoder2Config(**_SIZES, sliding_window=24), [24] * 4),
    "phi3": (Phi3Config(**_SIZES, sliding_window=None), [None] * 4),
    "cohere2": (Cohere2Config(**_SIZES, sliding_window=24), [24, 24, 24, None]),
    "granite": (
        GraniteConfig(
            **_SIZES,
            logits_scaling=3.0,
            embedding_multiplier=2.0,
            attention_multiplier=0.2,
            residual_multiplier=0.7,
        ),
        [None] * 4,
    ),
    "gpt2": (
        GPT2Config(
            **_VOCAB, n_embd=64, n_layer=2, n_head=4, n_positions=256, eos_token_id=None
        ),
        [None] * 2,
    ),
    "opt": (
        OPTConfig(
            **_VOCAB,
            hidden_size=64,
            ffn_dim=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=256,
            word_embed_proj_dim=64,
        ),
        [None] * 2,
    ),
    "olmoe": (OlmoeConfig(**_SIZES, num_experts=4, num_experts_per_tok=2), [None] * 4),
}


@pytest.mark.parametrize("name", SERVED)
def test_tokens_equal_hugging_face(name: str, tmp_path: Path) -> None:
    config, windows = SERVED[name]
    model = save_tiny(config, tmp_path)
    prompts = prompts_of(LENGTHS)
    expected = hf_greedy(model, prompts, NUM_TOKENS)
    with engine(tmp_path, max_num_batched_tokens=64) as llm:
        assert windows_of(llm) == windows
        assert greedy(llm, prompts, NUM_TOKENS) == expected
        assert greedy(llm, prompts, NUM_TOKENS) == expected


def windows_of(llm: Any) -> list[int | None]:
    config = llm.llm_engine.engine_core.engine_core.vllm_config
    layers = config.compilation_config.static_forward_context.values()
    return [layer.sliding_window for layer in layers]


def test_an_implemented_architecture_can_be_run_that_way(tmp_path: Path) -> None:
    config = MistralConfig(**_SIZES, sliding_window=24)
    model, prompts = save_tiny(config, tmp_path), prompts_of(LENGTHS)
    expected = hf_greedy(model, prompts, NUM_TOKENS)
    found = {}
    for impl in ("vllm", "transformers"):
        with engine(tmp_path, model_impl=impl) as llm:
            found[llm.model_config.architecture] = greedy(llm, prompts, NUM_TOKENS)
    assert found == {
        "MistralForCausalLM": expected,
        "TransformersForCausalLM": expected,
    }


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "int8_per_token_head"])
def test_packed_formats_give_the_same_tokens_either_way(
    tmp_path: Path, kv_cache_dtype: str
) -> None:
    save_tiny(MistralConfig(**_SIZES, sliding_window=24), tmp_path)
    found = []
    for impl in ("vllm", "transformers"):
        settings = {"model_impl": impl, "kv_cache_dtype": kv_cache_dtype}
        with engine(tmp_path, **settings) as llm:
            found.append(greedy(llm, prompts_of(LENGTHS), NUM_TOKENS))
    assert found[0] == found[1]


def test_rotations_that_vary_with_the_length_are_those_of_the_longest(
    tmp_path: Path,
) -> None:
    """A short prompt rotates as a long one does, since its keys stay in the cache."""
    config = Phi3Config(
        **_SIZES,
        sliding_window=None,
        rope_parameters=_LONG,
        original_max_position_embeddings=64,
    )
    model = save_tiny(config, tmp_path)
    prompts = prompts_of([10, 100])
    rotary = model.model.rotary_emb
    with torch.no_grad():
        rotary.original_inv_freq.div_(torch.tensor(_LONG["long_factor"]))
    expected = hf_greedy(model, prompts, 4)
    with engine(tmp_path) as llm:
        assert greedy(llm, prompts, 4) == expected


def test_random_weights_need_no_checkpoint(tmp_path: Path) -> None:
    save_tiny(Olmo2Config(**_SIZES), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with engine(tmp_path, load_format="dummy") as llm:
        assert len(greedy(llm, prompts_of([5]), 3)[0]) == 3


# config -> what the refusal says
REFUSED_BY_CONFIG: dict[str, tuple[PretrainedConfig, str]] = {
    "states": (RecurrentGemmaConfig(**_SIZES), "keep recurrent states"),
    "temperature": (Llama4TextConfig(**_SIZES), "count positions"),
}
REFUSED_ON_LOADING: dict[str, tuple[PretrainedConfig, str]] = {
    "alibi": (
        BloomConfig(**_VOCAB, hidden_size=64, n_layer=2, n_head=4),
        "0 times, not once each",
    ),
    "own-classes": (
        FalconConfig(
            **_VOCAB, hidden_size=64, num_hidden_layers=2, num_attention_heads=4
        ),
        "cannot be built that way",
    ),
}


@pytest.mark.parametrize("case", REFUSED_BY_CONFIG)
def test_what_the_config_rules_out_is_refused_before_loading(
    case: str, tmp_path: Path
) -> None:
    config, why = REFUSED_BY_CONFIG[case]
    config.architectures = [type(config).__name__.replace("Config", "ForCausalLM")]
    if case == "temperature":
        config.architectures = ["Llama4ForCausalLM"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"{config.architectures[0]}.*{why}"):
        ModelConfig(model=str(tmp_path), model_impl="transformers")


@pytest.mark.parametrize("case", REFUSED_ON_LOADING)
def test_attention_that_cannot_be_replaced_is_refused_on_loading(
    case: str, tmp_path: Path
) -> None:
    config, why = REFUSED_ON_LOADING[case]
    save_tiny(config, tmp_path)
    name = type(config).__name__.replace("Config", "ForCausalLM")
    with pytest.raises(ValueError, match=f"{name}.*{why}"), engine(tmp_path):
        pass


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    save_tiny(Olmo2Config(**_SIZES), tmp_path)
    config = Olmo2Config(**_SIZES | {"num_hidden_layers": 5})
    config.architectures = ["Olmo2ForCausalLM"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"missing keys.*layers\.4"), engine(tmp_path):
        pass


def test_an_unknown_implementation_lists_the_known_ones(tmp_path: Path) -> None:
    save_tiny(Olmo2Config(**_SIZES), tmp_path)
    with pytest.raises(ValueError, match="auto, vllm, transformers"):
        ModelConfig(model=str(tmp_path), model_impl="terratorch")
    with pytest.raises(ValueError, match=r"Olmo2ForCausalLM.*not supported"):
        ModelConfig(model=str(tmp_path), model_impl="vllm")


@pytest.mark.parametrize("name", ["cohere2", "olmoe", "gpt2"])
def test_the_plan_without_weights_is_the_engines(name: str, tmp_path: Path) -> None:
    save_tiny(SERVED[name][0], tmp_path)
    settings: dict[str, Any] = {"kv_cache_dtype": "fp8"}
    args = EngineArgs(
        model=str(tmp_path), dtype="float32", kv_cache_memory_bytes=16 << 20, **settings
    )
    plan = plan_without_weights(args)
    with engine(tmp_path, **settings) as llm:
        cache = llm.llm_engine.cache_config
        assert plan.num_blocks == cache.num_gpu_blocks
        assert plan.capacity_tokens == cache.kv_cache_size_tokens


class _Chunks:
    attention_chunk_size = 8


def test_masks_are_read_by_asking_them() -> None:
    def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
        return k <= q

    assert reach_of(causal, None).window is None
    for window in (1, 2, 24, 4096):
        found = reach_of(lambda b, h, q, k, w=window: (k <= q) & (k > q - w), None)
        assert (found.window, found.chunk) == (window, None)
    chunks = reach_of(lambda b, h, q, k: (k <= q) & (k // 8 == q // 8), _Chunks)
    assert (chunks.window, chunks.chunk) == (None, 8)
    with pytest.raises(ValueError, match="later"):
        reach_of(lambda b, h, q, k: k <= q + 1, None)
    with pytest.raises(ValueError, match="neither"):
        reach_of(lambda b, h, q, k: (k <= q) & (k // 8 == q // 8), None)
