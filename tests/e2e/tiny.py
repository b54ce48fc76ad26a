"""Tiny random models on disk with a tokenizer, and greedy tokens of both sides."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from tests.tiny_model import tiny_tokenizer
from vllm import LLM, SamplingParams

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def vocabulary() -> int:
    return len(tiny_tokenizer())


def save_tiny(config: PretrainedConfig, folder: Path, seed: int = 0) -> torch.nn.Module:
    """Writes config, float32 weights and tokenizer; returns the reference model, whose
    vectors are away from their defaults."""
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.dim() == 1 or name.endswith("bias"):
                param.add_(torch.randn_like(param) * 0.1)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return model


def prompts_of(lengths: list[int], seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    top = vocabulary()
    return [
        torch.randint(2, top, (length,), generator=generator).tolist()
        for length in lengths
    ]


@torch.inference_mode()
def hf_greedy(
    model: torch.nn.Module, prompts: list[list[int]], num_tokens: int
) -> list[list[int]]:
    """Continuations computed from scratch at every step: no cache is trusted."""
    continued = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(num_tokens):
            logits = model(torch.tensor([ids]), use_cache=False).logits
            ids.append(int(logits[0, -1].argmax()))
        continued.append(ids[len(prompt) :])
    return continued


@contextmanager
def engine(folder: Path | str, **settings: Any) -> Iterator[LLM]:
    defaults = {"dtype": "float32", "kv_cache_memory_bytes": "16MiB"}
    llm = LLM(str(folder), **(defaults | settings))
    try:
        yield llm
    finally:
        llm.shutdown()


def greedy(llm: LLM, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    outputs = llm.generate(
        [{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False
    )
    return [list(output.outputs[0].token_ids) for output in outputs]
