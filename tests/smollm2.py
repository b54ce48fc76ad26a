"""SmolLM2 as Hugging Face computes it, and real English to feed it.

The reference model is filled from the embedded GGUF file by the gguf package's reader
and name table alone; nothing of vllm touches its weights.
"""

from functools import cache
from pydoc_data.topics import topics

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.initialization import no_init_weights

from vllm.transformers_utils.config import get_config
from vllm.transformers_utils.source import resolve_model
from vllm.transformers_utils.tokenizer import get_tokenizer

MODEL = "smollm2-135m"
_TOPICS = ("assignment", "class", "function", "import", "exprlists", "try", "with")


def gguf_names(arch: str, num_layers: int) -> dict[str, str]:
    """Hugging Face name -> GGUF name, from the gguf package's own table."""
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], num_layers)
    return {
        name: found
        for name in _hf_names(num_layers)
        if (found := table.get_name(name, try_suffixes=(".weight", ".bias")))
    }


def _hf_names(num_layers: int) -> list[str]:
    parts = ["input_layernorm", "post_attention_layernorm"]
    parts += [f"mlp.{p}_proj" for p in ("gate", "up", "down")]
    parts += [f"self_attn.{p}" for p in ("q_proj", "k_proj", "v_proj", "o_proj")]
    parts += ["self_attn.q_norm", "self_attn.k_norm"]
    names = ["model.embed_tokens", "model.norm", "lm_head"]
    names += [f"model.layers.{i}.{part}" for i in range(num_layers) for part in parts]
    return [f"{name}.{leaf}" for name in names for leaf in ("weight", "bias")]


@cache
def hf_smollm2() -> LlamaForCausalLM:
    """The reference in float32; one instance per process, so leave it as it is."""
    source = resolve_model(MODEL)
    config = LlamaConfig(**get_config(source).to_dict())
    config._attn_implementation = "sdpa"
    with no_init_weights():
        model = LlamaForCausalLM(config).eval()
    names = {v: k for k, v in gguf_names("llama", config.num_hidden_layers).items()}
    state = {}
    for tensor in gguf.GGUFReader(source.path).tensors:
        data = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        heads = {
            "attn_q": config.num_attention_heads,
            "attn_k": config.num_key_value_heads,
        }.get(tensor.name.split(".")[-2])
        if heads:  # llama.cpp keeps the two halves of a rotation side by side
            halves = data.reshape(heads, -1, 2, data.shape[-1]).swapaxes(1, 2)
            data = halves.reshape(data.shape)
        state[names[tensor.name]] = torch.from_numpy(np.array(data))
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    return model.requires_grad_(False)


def english_text() -> str:
    """Some 60,000 characters of prose: Python's help topics, on every machine."""
    return "\n".join(topics[name] for name in _TOPICS)


@cache
def english_token_ids() -> tuple[int, ...]:
    """The prose in some 15,000 tokens of SmolLM2."""
    return tuple(get_tokenizer(resolve_model(MODEL)).encode(english_text()))
