"""Config keys of Gemma 2 and 3 that GGUF states in other words, or not at all.

Knows the constants that converters leave out; `gguf_config` calls it for these models.
"""

from typing import Any

from vllm.transformers_utils.gguf import GGUFFile

# Architecture -> every n-th layer attends to all tokens.
_PATTERN = {"gemma2": 2, "gemma3": 6}
# (architecture, layers) of the models that scale attention by hidden size / heads
# instead of the head size: the files do not say so.
_SCALED_BY_WIDTH = {("gemma2", 46), ("gemma3", 62)}
_LOCAL_ROPE_BASE = 10000.0


def gemma_keys(
    gguf: GGUFFile, sizes: dict[str, Any], rope: dict[str, Any]
) -> dict[str, Any]:
    """The keys beyond those of every decoder; `rope` is that of unwindowed layers."""
    arch, layers = gguf.architecture, sizes["num_hidden_layers"]
    scalar = sizes["head_dim"]
    if (arch, layers) in _SCALED_BY_WIDTH:
        scalar = sizes["hidden_size"] // sizes["num_attention_heads"]
    keys = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window": gguf.get(".attention.sliding_window"),
        "layer_types": _layer_types(gguf, layers),
        "attn_logit_softcapping": gguf.get(".attn_logit_softcapping"),
        "final_logit_softcapping": gguf.get(".final_logit_softcapping"),
    }
    if arch == "gemma3":
        local = float(gguf.get(".rope.freq_base_swa", _LOCAL_ROPE_BASE))
        keys["rope_parameters"] = {
            "full_attention": rope,
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        }
    return keys


def _layer_types(gguf: GGUFFile, layers: int) -> list[str]:
    stated = gguf.get(".attention.sliding_window_pattern", _PATTERN[gguf.architecture])
    if isinstance(stated, int):
        windowed = [bool((i + 1) % stated) for i in range(layers)]
    else:
        windowed = [bool(flag) for flag in stated]
    return ["sliding_attention" if w else "full_attention" for w in windowed]
