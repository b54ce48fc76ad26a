"""DeepSeek through the whole engine: greedy tokens equal Hugging Face's, whatever the
batch, the chunks and the prefix cache."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model_executor.deepseek import VOCABULARY, deepseek_model
from tests.model_executor.families import saved
from tests.model_executor.test_deepseek import (
    LATENT_FORMATS,
    hf_logits,
    hf_logits_with_stored_latents,
)
from vllm import LLM, SamplingParams
from vllm.outputs import RequestOutput

NEW_TOKENS = 6
GREEDY = SamplingParams(
    temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=1
)
MODELS = ["v2", "v2-lite", "v2-real-latent", "v3", "v3-real-latent"]


def engine(folder: Path | str, **how: Any) -> LLM:
    settings = {
        "dtype": "float32",
        "kv_cache_memory_bytes": "16MiB",
        "max_num_seqs": 16,
        "skip_tokenizer_init": True,
    }
    return LLM(str(folder), **(settings | how))


def prompts(lengths: list[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randint(0, VOCABULARY, (n,), generator=generator).tolist()
        for n in lengths
    ]


def generate(llm: LLM, asked: list[list[int]]) -> list[RequestOutput]:
    return llm.generate(
        [{"prompt_token_ids": ids} for ids in asked], GREEDY, use_tqdm=False
    )


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def logprobs_of(output: RequestOutput) -> list[float]:
    completion = output.outputs[0]
    return [
        step[token].logprob
        for step, token in zip(completion.logprobs, completion.token_ids, strict=True)
    ]


def greedy(model: torch.nn.Module, ids: list[int]) -> list[int]:
    tokens = list(ids)
    for _ in range(NEW_TOKENS):
        tokens.append(int(hf_logits(model, tokens)[-1].argmax()))
    return tokens[len(ids) :]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("batched_tokens", [1024, 48], ids=["whole", "chunked"])
def test_greedy_tokens_equal_hf_alone_in_a_batch_and_after_a_prefix_hit(
    name: str, batched_tokens: int, tmp_path: Path
) -> None:
    model = deepseek_model(name)
    llm = engine(saved(model, tmp_path), max_num_batched_tokens=batched_tokens)
    asked = prompts([100, 3, 17, 64, 1, 33, 90, 16]) * 2
    expected = [greedy(model, ids) for ids in asked[:8]] * 2
    (alone,) = generate(llm, asked[:1])
    assert alone.num_cached_tokens == 0
    assert tokens_of([alone]) == expected[:1]
    outputs = generate(llm, asked)
    assert tokens_of(outputs) == expected
    assert outputs[0].num_cached_tokens == 96  # six blocks, written by the first run
    hits = generate(llm, asked)
    assert tokens_of(hits) == expected
    assert [hit.num_cached_tokens for hit in hits] == [
        (len(ids) - 1) // 16 * 16 for ids in asked
    ]
    llm.shutdown()


@pytest.fixture(scope="module")
def real_latent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    model = deepseek_model("v2-real-latent")
    yield model, saved(model, tmp_path_factory.mktemp("deepseek"))


@pytest.mark.parametrize("cache_dtype", LATENT_FORMATS)
def test_every_format_gives_the_logits_of_decoded_latents_on_a_hit_as_on_a_miss(
    cache_dtype: str, real_latent: Any
) -> None:
    model, folder = real_latent
    llm = engine(folder, kv_cache_dtype=cache_dtype, max_num_batched_tokens=64)
    (ids,) = prompts([100])
    (miss,) = generate(llm, [ids])
    (hit,) = generate(llm, [ids])
    assert (miss.num_cached_tokens, hit.num_cached_tokens) == (0, 96)
    assert tokens_of([miss]) == tokens_of([hit])
    assert logprobs_of(hit) == pytest.approx(logprobs_of(miss), abs=2e-3)
    (tokens,) = tokens_of([miss])
    logits = hf_logits_with_stored_latents(model, ids + tokens, cache_dtype)
    expected = logits[len(ids) - 1 : -1].log_softmax(-1)
    found = [float(row[t]) for row, t in zip(expected, tokens, strict=True)]
    assert logprobs_of(miss) == pytest.approx(found, abs=2e-3)
    assert tokens == expected.argmax(-1).tolist()
    llm.shutdown()


@pytest.mark.parametrize("cache_dtype", ["fp8_ds_mla", "int4_per_token_head"])
def test_skipped_layers_stay_dense_beside_packed_ones(
    cache_dtype: str, real_latent: Any
) -> None:
    _, folder = real_latent
    skipped = {"kv_cache_dtype_skip_layers": ["0", "2"]}
    llm = engine(folder, kv_cache_dtype=cache_dtype, **skipped)
    asked = prompts([100, 20])
    found = tokens_of(generate(llm, asked))
    assert found == tokens_of(generate(llm, asked))
    llm.shutdown()


@pytest.mark.parametrize("cache_dtype", ["nvfp4", "nvfp4_4over6", "turboquant_k8v4"])
def test_formats_for_heads_are_refused_by_name_before_loading(
    cache_dtype: str, real_latent: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, folder = real_latent
    _forbid_loading(monkeypatch)
    with pytest.raises(ValueError, match=f"{cache_dtype} .*one latent per token.*fp8"):
        engine(folder, kv_cache_dtype=cache_dtype)


@pytest.mark.parametrize("cache_dtype", ["fp8_ds_mla", "nvfp4_ds_mla"])
def test_deepseeks_records_are_refused_for_another_latent_before_loading(
    cache_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(deepseek_model("v3"), tmp_path)
    _forbid_loading(monkeypatch)
    with pytest.raises(ValueError, match=f"{cache_dtype}.*head_size=48.*512 . 64"):
        engine(folder, kv_cache_dtype=cache_dtype)


def _forbid_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(**_: Any) -> None:
        raise AssertionError("a refused model was loaded")

    for module in ("model_loader", "model_loader.base"):
        monkeypatch.setattr(
            f"vllm.model_executor.{module}.BaseModelLoader.load_model", load
        )
