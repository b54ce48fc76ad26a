"""What a body may not hold. No engine is needed to say so."""

import gzip
import logging
import math
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from vllm.entrypoints.openai.errors import install_error_handlers
from vllm.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from vllm.exceptions import VLLMValidationError

MESSAGES = [{"role": "user", "content": "hi"}]
BODIES: dict[type, dict[str, Any]] = {
    CompletionRequest: {"prompt": "a"},
    ChatCompletionRequest: {"messages": MESSAGES},
    TokenizeRequest: {"messages": MESSAGES},
    DetokenizeRequest: {"tokens": [1]},
}


def kinds(schema: dict[str, Any]) -> set[str]:
    """JSON types that a field takes, at its top level."""
    return {part.get("type", "") for part in schema.get("anyOf", [schema])}


def numeric_fields(model: type) -> list[str]:
    fields = model.model_json_schema()["properties"]  # type: ignore[attr-defined]
    return [n for n, schema in fields.items() if kinds(schema) & {"integer", "number"}]


def lists_of_numbers(model: type) -> list[str]:
    fields = model.model_json_schema()["properties"]  # type: ignore[attr-defined]
    return [
        name
        for name, schema in fields.items()
        for part in schema.get("anyOf", [schema])
        if part.get("type") == "array" and kinds(part["items"]) & {"integer"}
    ]


@pytest.fixture(scope="module")
def client() -> TestClient:
    """Routes that take the bodies and answer what they have understood."""
    app = FastAPI()
    install_error_handlers(app)
    for model in BODIES:

        def take(body: model) -> dict[str, Any]:  # type: ignore[valid-type]
            return body.model_dump()

        app.post(f"/{model.__name__}")(take)
    return TestClient(app)


def refused(client: TestClient, model: type, **change: Any) -> dict[str, Any]:
    answer = client.post(f"/{model.__name__}", json=BODIES[model] | change)
    assert answer.status_code == 400, (change, answer.text)
    error = answer.json()["error"]
    assert error["type"] == "BadRequestError" and error["code"] == 400
    return error


@pytest.mark.parametrize("model", BODIES, ids=lambda model: model.__name__)
def test_no_boolean_is_a_number(client: TestClient, model: type) -> None:
    for name in numeric_fields(model):
        for value, spelled in ((True, "true"), (False, "false")):
            error = refused(client, model, **{name: value})
            assert error["param"] == name
            assert error["message"].startswith(f"{name}: expected a number")
            assert error["message"].endswith(f"got {spelled}")
    for name in lists_of_numbers(model):
        assert refused(client, model, **{name: [5, True]})["param"] == name


def test_the_fields_that_are_looked_at() -> None:
    both = {"n", "seed", "max_tokens", "temperature", "top_p", "top_k", "min_tokens"}
    assert both | {"logprobs", "best_of"} <= set(numeric_fields(CompletionRequest))
    assert both | {"top_logprobs"} <= set(numeric_fields(ChatCompletionRequest))
    assert "logprobs" not in numeric_fields(ChatCompletionRequest)
    assert lists_of_numbers(DetokenizeRequest) == ["tokens"]
    assert "prompt" in lists_of_numbers(CompletionRequest)


def test_numbers_inside_are_looked_at(client: TestClient) -> None:
    refused(client, CompletionRequest, prompt=[[1, True]])
    assert (
        "logit_bias"
        in refused(client, CompletionRequest, logit_bias={"5": True})["message"]
    )


def test_numbers_and_booleans_in_their_places_are_taken(client: TestClient) -> None:
    body = BODIES[ChatCompletionRequest] | {
        "temperature": 0,
        "top_p": 1,
        "max_tokens": 5,
        "logprobs": True,
        "top_logprobs": 2,
        "stream": False,
        "logit_bias": {"5": -1},
        "stop_token_ids": [0, 1],
    }
    answer = client.post("/ChatCompletionRequest", json=body)
    assert answer.status_code == 200 and answer.json()["max_tokens"] == 5


@pytest.mark.parametrize("model", [ChatCompletionRequest, TokenizeRequest])
@pytest.mark.parametrize("role", [None, 1, True, "", "  ", ["user"], {"a": 1}])
def test_a_role_is_text(client: TestClient, model: type, role: Any) -> None:
    message = {"role": role, "content": "x"}
    error = refused(client, model, messages=[*MESSAGES, message])
    assert error["param"] == "messages[1].role"
    refused(client, model, messages=[{"content": "x"}])
    refused(client, model, messages=[])


@pytest.mark.parametrize("role", ["user", "tool", "developer", "Schiedsrichter"])
def test_which_roles_there_are_a_template_says(client: TestClient, role: str) -> None:
    body = {"messages": [{"role": role, "content": "x"}]}
    for model in (ChatCompletionRequest, TokenizeRequest):
        assert client.post(f"/{model.__name__}", json=body).status_code == 200


def optional_fields(model: type) -> list[str]:
    fields = model.model_fields  # type: ignore[attr-defined]
    return [name for name, field in fields.items() if not field.is_required()]


@pytest.mark.parametrize(
    ("model", "name"),
    [(m, n) for m in BODIES for n in optional_fields(m) if n not in BODIES[m]],
    ids=lambda part: getattr(part, "__name__", part),
)
def test_null_means_not_given(client: TestClient, model: type, name: str) -> None:
    answers = [
        client.post(f"/{model.__name__}", json=BODIES[model] | change)
        for change in ({}, {name: None})
    ]
    assert [answer.status_code for answer in answers] == [200, 200], answers[1].text
    default, found = (answer.json() for answer in answers)
    if name == "max_tokens" and model is CompletionRequest:
        assert found.pop(name) is None  # as many as fit, which 16 are not
        default.pop(name)
    for ids in (default, found):
        ids.pop("request_id", None)
    # false, 0 and null all say that nothing is wished.
    assert {k: v or None for k, v in found.items()} == {
        k: v or None for k, v in default.items()
    }


def test_a_required_field_is_not_null(client: TestClient) -> None:
    for model, name in (
        (ChatCompletionRequest, "messages"),
        (DetokenizeRequest, "tokens"),
    ):
        assert refused(client, model, **{name: None})["param"] == name


NOT_READ = [
    (b'{"prompt": "\xff"}', {}, "not valid UTF-8: byte 0xff at position 12"),
    (b'{"a": ' + b"[" * 200_000, {}, "nested too deeply"),
    (b'{"n": ' + b"1" * 5000 + b"}", {}, "thousands of digits"),
    (gzip.compress(b"{}"), {"Content-Encoding": "gzip"}, "Content-Encoding 'gzip'"),
    (gzip.compress(b'{"prompt": "a"}'), {}, "compressed with gzip"),
    (b'{"prompt": ', {}, "not valid JSON: Expecting value at line 1, column 12"),
    (b'{"a": 1,\n "b" 2}', {}, "':' delimiter at line 2, column 6"),
]


@pytest.mark.parametrize(("body", "headers", "words"), NOT_READ, ids=range(7))
def test_why_a_body_cannot_be_read_is_said(
    client: TestClient, body: bytes, headers: dict[str, str], words: str
) -> None:
    headers = {"Content-Type": "application/json", **headers}
    answer = client.post("/CompletionRequest", content=body, headers=headers)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize("levels", [101, 200, 900])
def test_a_body_is_not_nested_without_bound(client: TestClient, levels: int) -> None:
    deep: Any = 1
    for _ in range(levels):
        deep = [deep]
    error = refused(client, CompletionRequest, vllm_xargs={"a": deep})
    assert error["param"] == "vllm_xargs" and "nested" in error["message"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"reasoning_effort": "nope"}, "reasoning_effort"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": "auto", "tools": []}, "tool_choice"),
    ],
)
def test_what_means_nothing_is_refused(
    client: TestClient, change: dict[str, Any], param: str
) -> None:
    assert refused(client, ChatCompletionRequest, **change)["param"] == param


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"prompt": ["a", 1]}, "prompt[1]: Input should be a valid string, got 1"),
        ({"prompt": [1, "a"]}, "prompt[1]: Input should be a valid integer, got 'a'"),
        ({"prompt": [[1, "a"]]}, "prompt[0][1]: Input should be a valid integer, got"),
        ({"stop": [None]}, "stop[0]: Input should be a valid string, got null"),
        ({"seed": []}, "seed: Input should be a valid integer, got []"),
        (
            {"stream": True, "stream_options": {"include_usage": 7}},
            "stream_options.include_usage: Input should be a valid boolean",
        ),
        (
            {"structured_outputs": {"choice": ["a", 1]}},
            "structured_outputs.choice[1]: Input should be a valid string, got 1",
        ),
        (
            {"structured_outputs": {"regex": 5}},
            "structured_outputs.regex: Input should be a valid string, got 5",
        ),
    ],
)
def test_what_is_wrong_is_told_with_its_place_and_value(
    client: TestClient, change: dict[str, Any], told: str
) -> None:
    error = refused(client, CompletionRequest, **change)
    assert error["message"].startswith(told)
    assert error["param"] == list(change)[-1]


@pytest.mark.parametrize(
    "given", ["", "a" * 257, "a\nINFO forged", "a\x1b[2K", "\x85", "\u2028"]
)
def test_an_id_is_short_and_printable(client: TestClient, given: str) -> None:
    error = refused(client, CompletionRequest, request_id=given)
    assert error["param"] == "request_id"
    assert "must have 1 to 256 printable characters" in error["message"]
    for good in ("a" * 256, "é 1"):
        assert CompletionRequest(prompt="a", request_id=good).request_id == good


def test_only_what_is_ignored_is_said_to_be(
    client: TestClient,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    for name in ("functions", "function_call", "audio"):
        error = refused(client, ChatCompletionRequest, **{name: ["a"], "odd_one": 1})
        assert error["param"] == name
    assert "ignored" not in caplog.text
    body = BODIES[ChatCompletionRequest] | {"odd_one": 1}
    assert client.post("/ChatCompletionRequest", json=body).status_code == 200
    assert "odd_one are unknown and ignored" in caplog.text


def test_answers_are_text(client: TestClient) -> None:
    error = refused(client, ChatCompletionRequest, modalities=["text", "audio"])
    assert error["param"] == "modalities"
    body = BODIES[ChatCompletionRequest] | {"modalities": ["text"]}
    assert client.post("/ChatCompletionRequest", json=body).status_code == 200


def test_a_wrong_method_is_told_the_right_one(client: TestClient) -> None:
    answer = client.get("/CompletionRequest")
    assert (answer.status_code, answer.headers["Allow"]) == (405, "POST")
    assert answer.json()["error"]["type"] == "MethodNotAllowedError"


@pytest.mark.parametrize("bias", [100.5, -101, math.inf, -math.inf, math.nan])
def test_a_bias_is_within_its_bounds(bias: float) -> None:
    request = CompletionRequest(prompt="a", logit_bias={"5": bias})
    with pytest.raises(VLLMValidationError, match="from -100 to 100"):
        request.sampling_values({})
    for good in (-100, 100):
        request = CompletionRequest(prompt="a", logit_bias={"5": good})
        assert request.sampling_values({})["logit_bias"] == {5: good}


def test_stop_strings_are_counted() -> None:
    request = CompletionRequest(prompt="a", stop=["x"] * 5000)
    with pytest.raises(VLLMValidationError, match="at most 64 strings, got 5,000"):
        request.to_sampling_params({}, 5)
