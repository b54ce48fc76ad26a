"""Offline generation: one output per prompt, in order, equal to the reference model."""

import gc
import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tqdm import tqdm
from transformers import LlamaForCausalLM

from vllm import LLM, SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.model_executor.layers.panel_weight import PanelWeight
from vllm.outputs import RequestOutput
from vllm.utils.gc_utils import collector_paused

PROMPTS = [
    "The quick brown fox",
    "Once upon a time",
    "What is the capital of France?",
    "jumps",
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_model: str) -> Iterator[LLM]:
    llm = LLM(
        tiny_model,
        dtype="float32",
        kv_cache_memory_bytes="2MiB",
        max_num_seqs=8,
        max_num_batched_tokens=64,
        seed=0,
    )
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def reference(tiny_model: str) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(tiny_model).eval()


def ids_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def greedy(model: LlamaForCausalLM, ids: list[int], count: int) -> list[int]:
    tokens = torch.tensor([ids])
    for _ in range(count):
        with torch.no_grad():
            step = model(tokens).logits[0, -1].argmax()
        tokens = torch.cat([tokens, step.view(1, 1)], dim=1)
    return tokens[0, len(ids) :].tolist()


def test_greedy_tokens_equal_the_reference(
    llm: LLM, reference: LlamaForCausalLM
) -> None:
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = llm.get_tokenizer().encode(prompt)
        assert output.prompt == prompt and output.prompt_token_ids == ids
        completion = output.outputs[0]
        assert completion.token_ids == greedy(reference, ids, 10)
        expected = llm.get_tokenizer().decode(
            ids + completion.token_ids, skip_special_tokens=True
        )
        assert prompt + completion.text == expected
        assert completion.finish_reason == "length" and output.finished


@pytest.mark.parametrize(
    ("prompts", "count"),
    [
        ("one text", 1),
        ([5, 6, 7], 1),
        ({"prompt_token_ids": [5, 6, 7]}, 1),
        ([[5, 6, 7], [8, 9]], 2),
        ([{"prompt": "a"}, "b", [5]], 3),
        ([], 0),
    ],
)
def test_every_form_of_prompts(llm: LLM, prompts: Any, count: int) -> None:
    assert len(llm.generate(prompts, GREEDY, use_tqdm=False)) == count


def test_many_prompts_come_back_in_order_duplicates_included(llm: LLM) -> None:
    prompts = [[10 + i % 30, 11, 12] for i in range(60)]
    params = [
        SamplingParams(temperature=0.0, max_tokens=1 + i % 7, ignore_eos=True)
        for i in range(60)
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [o.prompt_token_ids for o in outputs] == prompts
    assert [len(ids) for ids in ids_of(outputs)] == [1 + i % 7 for i in range(60)]
    for i in range(30):
        first, second = ids_of(outputs)[i], ids_of(outputs)[i + 30]
        common = min(len(first), len(second))
        assert first[:common] == second[:common]


def test_a_cache_hit_gives_the_same_tokens_as_a_miss(llm: LLM) -> None:
    prompt = {"prompt_token_ids": list(range(30, 110))}
    assert llm.reset_prefix_cache()
    miss = llm.generate(prompt, GREEDY, use_tqdm=False)
    hit = llm.generate(prompt, GREEDY, use_tqdm=False)
    assert miss[0].num_cached_tokens == 0 and hit[0].num_cached_tokens >= 64
    assert ids_of(miss) == ids_of(hit)


def test_logprobs_equal_the_reference(llm: LLM, reference: LlamaForCausalLM) -> None:
    ids = list(range(40, 60))
    params = SamplingParams(
        temperature=0.0, max_tokens=3, logprobs=2, prompt_logprobs=1, ignore_eos=True
    )
    for _ in range(2):  # the second time the prompt is cached
        (output,) = llm.generate([ids], params, use_tqdm=False)
        completion = output.outputs[0]
        everything = torch.tensor([ids + completion.token_ids])
        with torch.no_grad():
            expected = reference(everything).logits[0].log_softmax(-1)
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(ids)
        for i, entry in enumerate(output.prompt_logprobs[1:], 1):
            for token, item in entry.items():
                want = expected[i - 1, token].item()
                assert item.logprob == pytest.approx(want, abs=2e-4)
            assert ids[i] in entry
        for i, entry in enumerate(completion.logprobs):
            row = expected[len(ids) + i - 1]
            assert next(iter(entry)) == completion.token_ids[i] and len(entry) == 2
            for token, item in entry.items():
                assert item.logprob == pytest.approx(row[token].item(), abs=2e-4)
                assert item.rank == (row > row[token]).sum().item() + 1
                assert item.decoded_token is not None


def test_logprobs_of_given_tokens(llm: LLM, reference: LlamaForCausalLM) -> None:
    ids = list(range(40, 60))
    params = SamplingParams(
        temperature=0.0, max_tokens=2, logprob_token_ids=[7, 9], ignore_eos=True
    )
    (output,) = llm.generate([ids], params, use_tqdm=False)
    tokens = output.outputs[0].token_ids
    with torch.no_grad():
        expected = reference(torch.tensor([ids + tokens])).logits[0].log_softmax(-1)
    for i, entry in enumerate(output.outputs[0].logprobs):
        assert list(entry) == [tokens[i], 7, 9]
        for token, item in entry.items():
            want = expected[len(ids) + i - 1, token].item()
            assert item.logprob == pytest.approx(want, abs=2e-4)


def test_seeds_repeat_and_differ(llm: LLM) -> None:
    def sample(seed: int) -> list[list[int]]:
        params = SamplingParams(temperature=1.0, max_tokens=8, seed=seed)
        return ids_of(llm.generate(PROMPTS, params, use_tqdm=False))

    assert sample(1) == sample(1) != sample(2)


def test_stop_strings_cut_the_text(llm: LLM) -> None:
    (whole,) = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    text = whole.outputs[0].text
    stop = text[3:6]
    params = SamplingParams(
        temperature=0.0, max_tokens=10, ignore_eos=True, stop=[stop]
    )
    (cut,) = llm.generate(PROMPTS[0], params, use_tqdm=False)
    assert cut.outputs[0].text == text[: text.index(stop)]
    assert cut.outputs[0].finish_reason == "stop"
    assert cut.outputs[0].stop_reason == stop
    assert not llm.llm_engine.has_unfinished_requests()


def test_several_continuations(llm: LLM) -> None:
    params = SamplingParams(n=4, temperature=1.0, seed=3, max_tokens=6)
    (output,) = llm.generate("Once", params, use_tqdm=False)
    assert [c.index for c in output.outputs] == [0, 1, 2, 3]
    assert len({tuple(c.token_ids) for c in output.outputs}) > 1


def test_chat_renders_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    (output,) = llm.chat(messages, GREEDY, use_tqdm=False)
    expected = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert output.prompt == expected
    assert len(llm.chat([messages, messages], GREEDY, use_tqdm=False)) == 2
    (other,) = llm.chat(
        messages, GREEDY, use_tqdm=False, chat_template="{{ messages[0].content }}!"
    )
    assert other.prompt == "Hello!"


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        (b"abc", "type bytes are not supported: expected text.*decode"),
        ([b"abc"], "type bytes is not supported: expected text"),
        ("\ud800", "half of a surrogate pair: expected valid Unicode"),
        (["a", "\ud800"], "half of a surrogate pair: expected valid Unicode"),
        (5, "type int are not supported"),
        (None, "type NoneType are not supported"),
    ],
)
def test_what_is_no_prompt_is_refused(llm: LLM, prompts: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        llm.generate(prompts, use_tqdm=False)


@pytest.mark.parametrize(
    "messages",
    [
        *("hi", ["hi"], [["hi"]], None, 5, [5], [[5]]),
        *({"content": "hi", "role": "user"}, [{"role": "user"}, "hi"]),
    ],
    ids=str,
)
def test_what_is_no_conversation_is_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(ValueError, match="expected a list of messages") as caught:
        llm.chat(messages, use_tqdm=False)
    assert repr(messages) in str(caught.value)


def test_a_conversation_is_valid_unicode(llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"messages .*half of a surrogate pair"):
        llm.chat([{"role": "user", "content": "\ud800"}], use_tqdm=False)


@pytest.mark.parametrize("given", ["a", 5, {"n": 1}, [5]])
def test_what_are_no_parameters_is_refused(llm: LLM, given: Any) -> None:
    with pytest.raises(ValueError, match=r"sampling_params .*expected SamplingParams"):
        llm.generate("a", given, use_tqdm=False)


def test_one_bad_prompt_stops_none_of_the_next_calls(llm: LLM) -> None:
    with pytest.raises(VLLMValidationError, match="maximum context length"):
        llm.generate(["fine", [5] * 300], GREEDY, use_tqdm=False)
    with pytest.raises(ValueError, match="2 sampling_params for 1 prompts"):
        llm.generate("fine", [GREEDY, GREEDY], use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()
    assert len(llm.generate("fine", GREEDY, use_tqdm=False)) == 1


def test_an_interrupted_call_leaves_nothing_running(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = llm.llm_engine.step
    calls = []

    def interrupted() -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.llm_engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    monkeypatch.undo()
    assert not llm.llm_engine.has_unfinished_requests()
    assert len(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == 4


def test_an_interrupted_step_leaves_no_false_cache(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks are known by hash when it is scheduled, and were never computed."""
    prompt = {"prompt_token_ids": list(range(60, 120))}
    expected = ids_of(llm.generate(prompt, GREEDY, use_tqdm=False))
    assert llm.reset_prefix_cache()
    executor = llm.llm_engine.engine_core.engine_core.model_executor

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(executor, "execute_model", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompt, GREEDY, use_tqdm=False)
    monkeypatch.undo()
    (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    assert output.num_cached_tokens == 0 and ids_of([output]) == expected


def test_parameters_of_the_caller_are_not_changed(llm: LLM) -> None:
    params = SamplingParams(max_tokens=None, temperature=0.0)
    before = params.clone()
    llm.generate("a", params, use_tqdm=False)
    assert params == before


def test_progress_tells_token_rates(llm: LLM) -> None:
    bars = []

    def make(**kwargs: Any) -> Any:
        bars.append(tqdm(**kwargs, file=io.StringIO()))
        return bars[0]

    llm.generate(PROMPTS, GREEDY, use_tqdm=make)
    assert bars[0].n == 4 and "tokens/s" in bars[0].postfix


def test_the_cache_reports_its_size(llm: LLM) -> None:
    cache = llm.llm_engine.cache_config
    assert cache.num_gpu_blocks > 0
    assert cache.kv_cache_size_tokens == int(cache.kv_cache_max_concurrency * 256)


def test_tools_look_into_the_model_of_this_process(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    (heads,) = llm.apply_model(lambda model: model.config.num_attention_heads)
    (worker,) = llm.collective_rpc(lambda worker: worker)
    assert heads == worker.get_model().config.num_attention_heads == 4
    monkeypatch.setattr(type(llm.llm_engine), "runs_in_process", False)
    with pytest.raises(ValueError, match="VLLM_ENABLE_V1_MULTIPROCESSING=0"):
        llm.apply_model(lambda model: None)


def test_a_dropped_engine_gives_weights_back_without_the_collector(
    tiny_model: str,
) -> None:
    def count() -> int:
        return sum(type(o) is PanelWeight for o in gc.get_objects())

    gc.collect()
    before = count()
    with collector_paused():
        llm = LLM(tiny_model)
        planned = llm.collective_rpc(lambda w: w.model_runner.plan is not None)
        assert planned == [True] and count() > before
        del llm
        assert count() == before


def test_unknown_arguments_are_named(tiny_model: str) -> None:
    with pytest.raises(ValueError, match="did you mean max_model_len"):
        LLM(tiny_model, max_model_length=3)
    with pytest.raises(ValueError, match="no argument 'zzz': leave it out"):
        LLM(tiny_model, zzz=1)
    with pytest.raises(ValueError, match="beam search is not supported"):
        LLM.beam_search(None)
