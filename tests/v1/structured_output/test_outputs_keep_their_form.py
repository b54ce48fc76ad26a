"""Outputs keep the form that was asked for, whatever else is asked, and a form that
cannot be kept is refused before anything is computed."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.smollm2 import MODEL
from vllm import LLM, SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
}
PROMPTS = ["A person as JSON: ", "Alice is 30 years old. In JSON: "]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    llm = LLM(MODEL, max_model_len=256, kv_cache_memory_bytes="32MiB")
    yield llm
    llm.shutdown()


def texts(llm: LLM, form: dict[str, Any], **settings: Any) -> list[str]:
    params = SamplingParams(
        structured_outputs=StructuredOutputsParams(**form),
        **{"temperature": 0.0, "max_tokens": 64, **settings},
    )
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


def is_person(text: str) -> bool:
    person = json.loads(text)
    return set(person) == {"name", "age"} and 0 <= person["age"] <= 150


FORMS: list[tuple[dict[str, Any], Any]] = [
    ({"json": SCHEMA}, is_person),
    ({"json": json.dumps(SCHEMA), "disable_any_whitespace": True}, is_person),
    ({"regex": r"\d{3}-\d{4}"}, re.compile(r"\d{3}-\d{4}").fullmatch),
    ({"choice": ["yes", 'he said "no"']}, {"yes", 'he said "no"'}.__contains__),
    ({"choice": ["a\U0001f600b"]}, "a\U0001f600b".__eq__),
    ({"choice": ["\n\u2028\x01\\"]}, "\n\u2028\x01\\".__eq__),
    ({"regex": r"[^\x00-\x1fa-z]\\x00"}, lambda text: text[1:] == r"\x00"),
    ({"grammar": r'root ::= "a" [^\x00b] "\\0"'}, lambda text: text[2:] == r"\0"),
    ({"grammar": 'root ::= "a" ("b" | "c") "d"'}, {"abd", "acd"}.__contains__),
]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("form", "holds"), FORMS, ids=lambda x: str(x)[:24])
def test_output_has_the_form(
    llm: LLM, form: dict[str, Any], holds: Any, temperature: float
) -> None:
    for text in texts(llm, form, temperature=temperature, seed=7):
        assert holds(text), text


def test_json_object_is_an_object_as_far_as_it_gets(llm: LLM) -> None:
    assert all(t.startswith("{") for t in texts(llm, {"json_object": True}))


def test_rows_with_and_without_a_form_do_not_disturb_each_other(llm: LLM) -> None:
    free = SamplingParams(temperature=0.0, max_tokens=12)
    form = StructuredOutputsParams(choice=["yes", "no"])
    bound = SamplingParams(temperature=0.0, max_tokens=12, structured_outputs=form)
    alone = [llm.generate([p], free, use_tqdm=False)[0] for p in PROMPTS]
    mixed = llm.generate(
        [PROMPTS[0], PROMPTS[0], PROMPTS[1]], [free, bound, free], use_tqdm=False
    )
    assert mixed[0].outputs[0].token_ids == alone[0].outputs[0].token_ids
    assert mixed[1].outputs[0].text in {"yes", "no"}
    assert mixed[2].outputs[0].token_ids == alone[1].outputs[0].token_ids


def test_a_form_wins_over_settings_that_contradict_it(llm: LLM) -> None:
    form = {"choice": ["yes"]}
    assert texts(llm, form, allowed_token_ids=[1000]) == ["yes"] * 2
    assert texts(llm, form, min_tokens=6, max_tokens=6) == ["yes"] * 2
    assert texts(llm, form, ignore_eos=True, max_tokens=6) == ["yes"] * 2


INVALID: list[dict[str, Any]] = [
    {"json": "{"},
    {"json": {"type": "no such type"}},
    {"regex": "("},
    {"choice": []},
    {"choice": ["a", ""]},
    {"choice": ["a\0b"]},
    {"regex": r"a\0b"},
    {"regex": r"\\\x00"},
    {"regex": r"[\x00]\u{0}"},
    {"grammar": r'root ::= "a\u0000b"'},
    {"grammar": r'root ::= [a] "\\\x0" # "'},
    {"grammar": "no root"},
    {"structural_tag": "{}"},
    {"regex": "a", "whitespace_pattern": " "},
]


@pytest.mark.parametrize("form", INVALID, ids=str)
def test_an_invalid_form_is_refused(llm: LLM, form: dict[str, Any]) -> None:
    with pytest.raises(VLLMValidationError, match="structured_outputs") as caught:
        texts(llm, form)
    assert "/project/" not in str(caught.value)
    assert not llm.llm_engine.has_unfinished_requests()


def test_a_form_that_the_core_refuses_is_an_error_and_others_keep_their_output(
    llm: LLM,
) -> None:
    engine = llm.llm_engine
    no_text = StructuredOutputsParams(grammar="root ::= root")
    refused = SamplingParams(max_tokens=4, structured_outputs=no_text)
    plain = SamplingParams(temperature=0.0, max_tokens=4)
    with pytest.raises(ValueError, match="no text"):
        llm.generate(PROMPTS, [plain, refused], use_tqdm=False)
    assert not engine.has_unfinished_requests()
    wanted = llm.generate(PROMPTS[0], plain, use_tqdm=False)[0].outputs[0].token_ids

    engine.add_request("plain", PROMPTS[0], plain)
    for name in ("refused", "refused too"):
        engine.add_request(name, PROMPTS[1], refused)
    num_refused, found = 0, []
    while engine.has_unfinished_requests():
        try:
            found += [output for output in engine.step() if output.finished]
        except ValueError:
            num_refused += 1
    assert num_refused == 2
    assert [output.request_id for output in found] == ["plain"]
    assert list(found[0].outputs[0].token_ids) == list(wanted)
