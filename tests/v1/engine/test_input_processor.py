"""What cannot be served is refused before the core sees it, and nothing stays open."""

import time
from typing import Any

import pytest

from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import (
    MAX_BAD_WORDS,
    MAX_LIST_CHARACTERS,
    RequestOutputKind,
    SamplingParams,
)
from vllm.v1.engine.input_processor import InputProcessor, load_tokenizer

MAX_LEN = 64


@pytest.fixture(scope="module")
def processor(tiny_model: str) -> InputProcessor:
    args = EngineArgs(
        model=tiny_model,
        max_model_len=MAX_LEN,
        dtype="float32",
        override_generation_config={"eos_token_id": [1, 5]},
    )
    config = args.create_engine_config()
    return InputProcessor(config, load_tokenizer(config.model_config))


def process(processor: InputProcessor, prompt: Any, **params: Any) -> Any:
    return processor.process_inputs("r", prompt, SamplingParams(**params))


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("hello", "hello"),
        ({"prompt": "hello"}, "hello"),
        ([5, 6, 7], None),
        ({"prompt_token_ids": [5, 6, 7]}, None),
        ({"prompt_token_ids": [5, 6, 7], "prompt": "abc"}, "abc"),
    ],
)
def test_every_form_of_prompt(
    processor: InputProcessor, prompt: Any, text: Any
) -> None:
    got, request = process(processor, prompt)
    ids = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else prompt
    if not isinstance(ids, list):
        ids = processor.tokenizer.encode("hello")
    assert got == text and request.prompt_token_ids == ids


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "prompt is empty"),
        ([], "prompt is empty"),
        ({"prompt_token_ids": []}, "prompt is empty"),
        ([1] * MAX_LEN, f"maximum context length is {MAX_LEN} tokens"),
        ([1, 10_000], "token id 10000 is out of vocabulary"),
        ([1, -1], "token id -1 is out of vocabulary"),
        ([1, "a"], "whole numbers"),
        ({}, "needs prompt"),
        ({"prompt": 3}, "must be text"),
        ({"prompt": "a", "cache_salt": ""}, "cache_salt"),
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, "multi_modal_data"),
        (3.5, "not supported"),
        (b"abc", "type bytes is not supported: expected text, token ids"),
        ("a\ud800", r"'a\\ud800' holds half of a surrogate pair.*valid Unicode"),
        ({"prompt_token_ids": [1], "prompt": "\ud800"}, "half of a surrogate pair"),
        ({"prompt": "a", "cache_salt": "\ud800"}, "cache_salt .* surrogate pair"),
        ({"prompt_token_ids": 5}, "must be a list of token ids, got 5"),
        ({"prompt_token_ids": b"ab"}, "must be a list of token ids, got b'ab'"),
    ],
)
def test_bad_prompts_are_refused(
    processor: InputProcessor, prompt: Any, message: str
) -> None:
    with pytest.raises(VLLMValidationError, match=message):
        process(processor, prompt)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"logprobs": 21}, "logprobs 21 is above the limit of 20"),
        ({"prompt_logprobs": 21}, "prompt_logprobs 21 is above the limit"),
        ({"logprobs": -1}, "above the limit"),
        ({"allowed_token_ids": [10_000]}, "allowed_token_ids"),
        ({"logit_bias": {10_000: 1.0}}, "logit_bias"),
        ({"logit_bias": {"x": 1.0}}, "logit_bias"),
        ({"logprob_token_ids": [10_000]}, "logprob_token_ids"),
        ({"logprob_token_ids": list(range(21))}, "above the limit of 20"),
        ({"flat_logprobs": True}, "flat_logprobs"),
        ({"thinking_token_budget": 3}, "thinking_token_budget"),
        (
            {"extra_args": {"kv_transfer_params": {"do_remote_prefill": True}}},
            r"kv_transfer_params \(do_remote_prefill\).*--kv-transfer-config",
        ),
        ({"extra_args": {"kv_transfer_params": "do_remote_decode"}}, "must map names"),
    ],
)
def test_bad_parameters_are_refused(
    processor: InputProcessor, params: dict[str, Any], message: str
) -> None:
    with pytest.raises(VLLMValidationError, match=message):
        process(processor, [1, 2], **params)


@pytest.mark.parametrize(
    "wish", [None, {}, {"do_remote_prefill": False, "remote_host": None}]
)
def test_a_wish_for_nothing_needs_no_connector(
    processor: InputProcessor, wish: Any
) -> None:
    process(processor, [1, 2], extra_args={"kv_transfer_params": wish})


def test_longest_prompt_leaves_one_token(processor: InputProcessor) -> None:
    _, request = process(processor, [1] * (MAX_LEN - 1), max_tokens=None)
    assert request.sampling_params.max_tokens == 1


def test_open_parameters_are_filled_and_the_callers_stay(
    processor: InputProcessor,
) -> None:
    params = SamplingParams(max_tokens=None, output_kind=RequestOutputKind.DELTA)
    _, request = processor.process_inputs("r", [1, 2, 3], params)
    complete = request.sampling_params
    assert complete.max_tokens == MAX_LEN - 3 and params.max_tokens is None
    assert complete.eos_token_id == processor.tokenizer.eos_token_id == 1
    assert complete.all_stop_token_ids == {1, 5} and complete.stop_token_ids == [5]
    assert not params.all_stop_token_ids


def test_bad_words_are_encoded_with_and_without_space(
    processor: InputProcessor,
) -> None:
    _, request = process(processor, [1], bad_words=["fox"])
    encode = processor.tokenizer.encode
    expected = [
        encode("fox", add_special_tokens=False),
        encode(" fox", add_special_tokens=False),
    ]
    assert request.sampling_params.bad_words_token_ids == expected


def test_bad_words_that_are_spelled_alike_are_encoded_once(
    processor: InputProcessor,
) -> None:
    _, one = process(processor, [1], bad_words=["fox"])
    _, many = process(processor, [1], bad_words=["fox", " fox", "fox"] * 300)
    params = one.sampling_params, many.sampling_params
    assert params[0].bad_words_token_ids == params[1].bad_words_token_ids


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["w"] * 100_000, "bad_words must hold at most 1,024 strings, got 100,000"),
        (["a", ""], "bad_words must be a list of non-empty strings"),
        (["a", 5], "bad_words must be a list of non-empty strings"),
    ],
)
def test_bad_words_that_cannot_be_honoured_are_refused(words: list, expected) -> None:
    with pytest.raises(ValueError, match=expected):
        SamplingParams(bad_words=words)


NO_NUMBERS: list[Any] = ["a", "1", [1], None, True, float("nan"), float("inf")]
NO_LISTS: list[Any] = [5, 0, "ab", b"ab", {"a": 1}, [None], [True], [1.5]]
NO_FORMS: list[Any] = ["a", 5, [], {"regex": 5}, {"choice": ["a", 1]}, {"no": "a"}]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", NO_NUMBERS),
        ("top_p", [*NO_NUMBERS, 0, 1.5]),
        ("min_p", NO_NUMBERS),
        ("presence_penalty", NO_NUMBERS),
        ("frequency_penalty", NO_NUMBERS),
        ("repetition_penalty", [*NO_NUMBERS, 0]),
        ("n", [*NO_NUMBERS, 1.0]),
        ("top_k", [*NO_NUMBERS, 1.0]),
        ("min_tokens", [*NO_NUMBERS, 1.0]),
        *[
            (name, [value for value in [*NO_NUMBERS, 1.0] if value is not None])
            for name in ("max_tokens", "seed", "logprobs", "prompt_logprobs")
        ],
        ("stop", [value for value in NO_LISTS if value != "ab"]),
        ("stop", [[""], [5], [b"a"], ["\ud800"]]),
        ("bad_words", [*NO_LISTS, [""], [5], [b"a"], ["\ud800"]]),
        ("stop_token_ids", [*NO_LISTS, ["5"]]),
        ("allowed_token_ids", [*NO_LISTS, ["5"]]),
        ("logprob_token_ids", [*NO_LISTS, ["5"]]),
        ("logit_bias", [*NO_LISTS, *[{5: value} for value in NO_NUMBERS], {1.5: 1}]),
        ("extra_args", [5, "a", [1]]),
        ("structured_outputs", NO_FORMS),
    ],
)
def test_every_parameter_names_itself_and_the_value_that_it_cannot_be(
    name: str, values: list[Any]
) -> None:
    for value in values:
        with pytest.raises(VLLMValidationError, match=rf"^{name}\b.+") as caught:
            SamplingParams(**{name: value})
        assert caught.value.parameter == name
        (shown,) = value.values() if isinstance(value, dict) else (value,)
        if isinstance(shown, list) and name == "structured_outputs" and shown:
            shown = shown[-1]
        assert repr(shown) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_list_may_be_any_collection() -> None:
    params = SamplingParams(stop=("a", "b"), stop_token_ids={3}, bad_words=None)
    assert (params.stop, params.stop_token_ids, params.bad_words) == (
        ["a", "b"],
        [3],
        [],
    )
    assert SamplingParams(stop="ab").stop == ["ab"]


def test_text_logit_bias_keys_become_numbers(processor: InputProcessor) -> None:
    _, request = process(processor, [1], logit_bias={"7": 2})
    assert request.sampling_params.logit_bias == {7: 2.0}


@pytest.mark.parametrize(("keep", "kept"), [(3, 3), (-1, MAX_LEN - 1)])
def test_truncation_keeps_the_end(
    processor: InputProcessor, keep: int, kept: int
) -> None:
    prompt = list(range(100, 200))
    _, request = processor.process_inputs(
        "r",
        prompt,
        SamplingParams(),
        tokenization_kwargs={"truncate_prompt_tokens": keep},
    )
    assert request.prompt_token_ids == prompt[-kept:]


def test_salt_and_priority_travel(
    processor: InputProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = {"prompt": "a", "cache_salt": "s"}
    with pytest.raises(VLLMValidationError, match="--scheduling-policy") as caught:
        processor.process_inputs("r", prompt, SamplingParams(), priority=3)
    assert caught.value.parameter == "priority"
    monkeypatch.setattr(processor, "policy", "priority")
    _, request = processor.process_inputs("r", prompt, SamplingParams(), priority=3)
    assert (request.cache_salt, request.priority) == ("s", 3)


def test_bad_words_are_counted_and_take_time_that_grows_as_their_number(
    processor: InputProcessor,
) -> None:
    words = [f"word{i}" for i in range(MAX_BAD_WORDS)]
    started = time.process_time()
    _, request = process(processor, "a", bad_words=[*words[1:], words[1]])
    assert time.process_time() - started < 10.0  # compared one by one, minutes
    found = request.sampling_params.bad_words_token_ids
    assert len({tuple(ids) for ids in found}) == len(found) >= MAX_BAD_WORDS - 1
    with pytest.raises(VLLMValidationError, match="at most 1,024 strings, got 1,025"):
        SamplingParams(bad_words=[*words, "one more"])


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_strings_of_a_request_are_short(name: str) -> None:
    half = "x" * (MAX_LIST_CHARACTERS // 2)
    assert getattr(SamplingParams(**{name: [half, half]}), name) == [half, half]
    with pytest.raises(VLLMValidationError, match="at most 16,384 characters in all"):
        SamplingParams(**{name: [half, half, "x"]})


@pytest.mark.parametrize(
    "given",
    [
        {"stop_token_ids": [5] * 2000},
        {"allowed_token_ids": [5] * 2000},
        {"logit_bias": dict.fromkeys(range(300), 1.0), "stop_token_ids": [5] * 500},
        {"bad_words": ["ab"] * 1000},
        {"stop": ["a" * 2000]},
        {"extra_args": {"a": "b" * 2000}},
        {"structured_outputs": {"choice": ["a" * 2000]}},
        {"structured_outputs": {"json": {"enum": ["a" * 2000]}}},
    ],
)
def test_each_continuation_has_its_own_values(
    processor: InputProcessor, given: dict[str, Any]
) -> None:
    """Not only their number is limited: so is what all of them hold."""
    assert process(processor, "a", n=2, **given)
    with pytest.raises(VLLMValidationError, match="16,384 continuations of") as caught:
        process(processor, "a", n=16384, **given)
    assert caught.value.parameter == "n"
