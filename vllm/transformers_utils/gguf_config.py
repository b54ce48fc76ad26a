"""Translates GGUF metadata into the keys of a Hugging Face config.json.

Knows the key names of both worlds; refuses to know tensors' values, except the rope
factors, which GGUF keeps as a tensor.
"""

import math
from typing import Any

from vllm.transformers_utils.gguf import GGUFFile
from vllm.transformers_utils.gguf_gemma import gemma_keys

# GGUF architecture -> (HF model_type, HF architecture)
GGUF_ARCHITECTURES = {
    "gemma2": ("gemma2", "Gemma2ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
}

ROPE_FACTORS = "rope_freqs.weight"
CONTROL_TOKEN = 3

# Tokens that end a turn in the common chat templates.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eot|>", "<|end|>", "<end_of_turn>")


def config_dict(gguf: GGUFFile) -> dict[str, Any]:
    """What config.json of the same model would say. Raises ValueError for what cannot
    be served, naming the file and the key."""
    arch = gguf.architecture
    if arch not in GGUF_ARCHITECTURES:
        raise ValueError(
            f"GGUF file {gguf.path} holds architecture {arch!r}, which is not "
            f"supported; supported are {', '.join(sorted(GGUF_ARCHITECTURES))}"
        )
    if gguf.get(".expert_count"):
        raise ValueError(
            f"GGUF file {gguf.path} is a mixture of {gguf.get('.expert_count')} "
            "experts, which is not supported: use a dense model"
        )
    model_type, architecture = GGUF_ARCHITECTURES[arch]
    window = gguf.get(".attention.sliding_window")
    if window and model_type == "llama":
        model_type, architecture = "mistral", "MistralForCausalLM"
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None:
        raise ValueError(
            f"GGUF file {gguf.path} has no token_embd.weight: it is no language model"
        )
    config = {
        "model_type": model_type,
        "architectures": [architecture],
        "vocab_size": embedding.shape[0],
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "attention_bias": "blk.0.attn_q.bias" in gguf.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in gguf.tensors,
        "rope_parameters": _rope(gguf),
        **_sizes(gguf),
        **_token_ids(gguf),
    }
    if model_type == "mistral":
        config["sliding_window"] = window or None
    if arch.startswith("gemma"):
        config |= gemma_keys(gguf, config, config["rope_parameters"])
    return config


def _required(gguf: GGUFFile, key: str) -> Any:
    value = gguf.get(key)
    if isinstance(value, list):  # one value per layer
        if len(set(value)) != 1:
            raise ValueError(
                f"GGUF file {gguf.path}: {gguf.architecture}{key} differs between "
                f"layers ({value}), which is not supported"
            )
        value = value[0]
    if value is None:
        raise ValueError(
            f"GGUF file {gguf.path} lacks the metadata key {gguf.architecture}{key}: "
            "convert the model again with a current converter"
        )
    return value


def _sizes(gguf: GGUFFile) -> dict[str, Any]:
    heads = _required(gguf, ".attention.head_count")
    hidden = _required(gguf, ".embedding_length")
    head_dim = gguf.get(".attention.key_length") or hidden // heads
    if gguf.get(".attention.value_length", head_dim) != head_dim:
        raise ValueError(
            f"GGUF file {gguf.path}: K heads of {head_dim} and V heads of "
            f"{gguf.get('.attention.value_length')} elements differ, which is not "
            f"supported for architecture {gguf.architecture!r}"
        )
    kv_heads = heads
    if gguf.get(".attention.head_count_kv") is not None:
        kv_heads = _required(gguf, ".attention.head_count_kv")
    return {
        "hidden_size": hidden,
        "intermediate_size": _required(gguf, ".feed_forward_length"),
        "num_hidden_layers": _required(gguf, ".block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": _required(gguf, ".context_length"),
        "rms_norm_eps": _shortest(_required(gguf, ".attention.layer_norm_rms_epsilon")),
    }


def _shortest(value: float) -> float:
    """The decimal that was rounded to float32: 1e-05 rather than 9.999999747e-06."""
    return float(f"{value:.6g}")


def _rope(gguf: GGUFFile) -> dict[str, Any]:
    """`rope_parameters`; explicit factors become a longrope with one set of factors."""
    head_dim = _sizes(gguf)["head_dim"]
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": float(gguf.get(".rope.freq_base", 10000.0)),
    }
    rotary_dim = gguf.get(".rope.dimension_count", head_dim)
    if rotary_dim != head_dim:
        rope["partial_rotary_factor"] = rotary_dim / head_dim
    context = _required(gguf, ".context_length")
    factors = gguf.tensors.get(ROPE_FACTORS)
    if factors is not None:
        values = gguf.dequantize(factors).reshape(-1).tolist()
        return rope | {
            "rope_type": "longrope",
            "short_factor": values,
            "long_factor": values,
            "factor": 1.0,
            "attention_factor": 1.0,
            "original_max_position_embeddings": context,
        }
    kind = gguf.get(".rope.scaling.type", "none")
    factor = float(gguf.get(".rope.scaling.factor", 0.0))
    if kind == "none" or not factor:
        return rope
    if kind == "linear":
        return rope | {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return rope | _yarn(gguf, factor, context)
    raise ValueError(
        f"GGUF file {gguf.path}: rope scaling {kind!r} is not supported for "
        f"{gguf.architecture!r}; supported are linear, yarn and explicit factors"
    )


def _yarn(gguf: GGUFFile, factor: float, context: int) -> dict[str, Any]:
    scaling = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": gguf.get(
            ".rope.scaling.original_context_length", round(context / factor)
        ),
    }
    for key, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
        if gguf.get(f".rope.scaling.{key}") is not None:
            scaling[name] = float(gguf.get(f".rope.scaling.{key}"))
    extra = gguf.get(
        ".rope.scaling.yarn_attn_factor", gguf.get(".rope.scaling.attn_factor", 1.0)
    )
    if extra != 1.0:
        scaling["attention_factor"] = extra * (0.1 * math.log(factor) + 1.0)
    return scaling


def _token_ids(gguf: GGUFFile) -> dict[str, Any]:
    ids = eos_token_ids(gguf)
    return {
        "bos_token_id": gguf.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": ids[0] if len(ids) == 1 else ids or None,
        "pad_token_id": gguf.get("tokenizer.ggml.padding_token_id"),
    }


def eos_token_ids(gguf: GGUFFile) -> list[int]:
    """Tokens that end a generation: those the metadata names, and the control token
    that ends a turn in the file's own chat template."""
    ids = [
        gguf.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")
    ]
    template = gguf.get("tokenizer.chat_template", "")
    tokens = gguf.get("tokenizer.ggml.tokens", [])
    types = gguf.get("tokenizer.ggml.token_type", [])
    for text in _TURN_ENDS:
        if text in template and text in tokens:
            token_id = tokens.index(text)
            if not types or types[token_id] == CONTROL_TOKEN:
                ids.append(token_id)
    return list(dict.fromkeys(i for i in ids if i is not None))


def generation_config(gguf: GGUFFile) -> dict[str, Any]:
    """What generation_config.json would say; GGUF states no sampling defaults."""
    named = {
        "bos_token_id": gguf.get("tokenizer.ggml.bos_token_id"),
        "pad_token_id": gguf.get("tokenizer.ggml.padding_token_id"),
        "eos_token_id": eos_token_ids(gguf) or None,
    }
    return {key: value for key, value in named.items() if value is not None}
