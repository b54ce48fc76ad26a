"""`response_format` and `structured_outputs` over HTTP."""

import json
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.entrypoints.openai.conftest import MODEL

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "c", "schema": SCHEMA}}
MESSAGES: Any = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.mark.parametrize("stream", [False, True])
def test_response_format_keeps_the_schema(client: OpenAI, stream: bool) -> None:
    answer: Any = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        temperature=0,
        max_tokens=64,
        response_format=JSON_SCHEMA,
        stream=stream,
    )
    if stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in answer)
    else:
        text = answer.choices[0].message.content
    assert set(json.loads(text)) == {"city"}


def test_completions_take_structured_outputs(client: OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL,
        prompt="Is the sky blue? ",
        extra_body={"structured_outputs": {"choice": ["yes", "no"]}},
    )
    assert answer.choices[0].text in {"yes", "no"}
    assert answer.choices[0].finish_reason == "stop"


REFUSED: list[dict[str, Any]] = [
    {"response_format": {"type": "xml"}},
    {"response_format": {"type": "json_schema"}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}},
    {"structured_outputs": {}},
    {"structured_outputs": {"regex": "("}},
    {"structured_outputs": {"regex": "a", "choice": ["b"]}},
    {"structured_outputs": {"regexp": "a"}},
    {"structured_outputs": {"choice": "yes"}},
    {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
    {"guided_regex": "a"},
    {"structured_outputs": {"json": "{"}},
    {"structured_outputs": {"json": {"type": "string", "minLength": -5}}},
    {"structured_outputs": {"json_object": False}},
    {"structured_outputs": {"grammar": "root ::= root"}},
    {"response_format": {"type": "json_object", "schema": 5}},
    {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"schema": {"not": {}}},
        }
    },
]


@pytest.mark.parametrize("body", REFUSED, ids=str)
def test_a_form_that_cannot_be_kept_is_refused(
    http: httpx.Client, body: dict[str, Any]
) -> None:
    answer = http.post(
        "/v1/chat/completions", json={"model": MODEL, "messages": MESSAGES, **body}
    )
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] in body and error["param"].split("_")[0] in error["message"]
    for leaked in ("Value error", "Check failed", ".cc:", "outputs.:"):
        assert leaked not in error["message"]


def test_a_form_that_is_switched_off_is_not_one_of_two(client: OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL,
        prompt="Is the sky blue? ",
        extra_body={
            "structured_outputs": {"choice": ["yes", "no"], "json_object": False}
        },
    )
    assert answer.choices[0].text in {"yes", "no"}
