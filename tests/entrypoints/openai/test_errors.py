"""Errors in the OpenAI shape: what they hold of what a client sent, and of what went
wrong. No engine is needed."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from vllm.entrypoints.openai.errors import install_error_handlers
from vllm.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
from vllm.entrypoints.openai.serving import renamed
from vllm.exceptions import EngineGenerateError, VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.utils.text_utils import short_repr, shorten
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine.async_llm import _raise_failure
from vllm.v1.engine.core import EngineCore

HUGE: list[Any] = [
    ["a"] * 300_000,
    [["a" * 1000] * 2000],
    "y\n" * 50_000,
    "9" * 100_000,
    {"k" * 100_000: "v" * 100_000},
    10**5000,
    [[[[[[1] * 1000] * 100] * 100] * 100] * 100] * 100,
]


@pytest.mark.parametrize("value", HUGE, ids=range(len(HUGE)))
def test_a_value_in_a_message_is_short(value: Any) -> None:
    assert 2 < len(short_repr(value)) <= 100


@pytest.mark.parametrize("value", ["5600", -1, None, 1.5, ["a", 1], {"a": [1]}, True])
def test_a_short_value_is_told_as_it_is(value: Any) -> None:
    assert short_repr(value) == repr(value)


def test_a_long_text_keeps_its_ends() -> None:
    assert shorten("a" * 50, 50) == "a" * 50
    text = shorten("begin" + "." * 5000 + "end", 200)
    assert len(text) == 200 and text.startswith("begin") and text.endswith("end")


@pytest.fixture
def client() -> TestClient:
    app = FastAPI()
    install_error_handlers(app)

    @app.post("/completion")
    def completion(body: CompletionRequest) -> None:
        SamplingParams(**body.sampling_values({}))

    @app.post("/chat")
    def chat(body: ChatCompletionRequest) -> None:
        SamplingParams(**body.sampling_values({}))

    @app.post("/fails")
    def fails() -> None:
        output: Any = SimpleNamespace(
            request_id="cmpl-1",
            outputs=[SimpleNamespace(finish_reason="error", stop_reason="why")],
        )
        _raise_failure(output)

    # An error that is not handled would be raised here, and logged by a server.
    return TestClient(app)


BODIES: list[tuple[str, dict[str, Any]]] = [
    ("completion", {"prompt": "a", "max_tokens": "x" * 100_000}),
    ("completion", {"prompt": "a", "kv_transfer_params": "x" * 100_000}),
    ("completion", {"prompt": "a", "stop": [["x"] * 10_000]}),
    ("completion", {"prompt": "a", "logit_bias": {"x" * 100_000: 1}}),
    ("completion", {"prompt": "a", "response_format": {"type": "x" * 100_000}}),
    ("completion", {"prompt": "a", "structured_outputs": {"x" * 100_000: 1}}),
    ("chat", {"messages": [{"role": ["x"] * 100_000, "content": "a"}]}),
    (
        "chat",
        {"messages": [{"role": "user", "content": "a"}], "tool_choice": "x" * 100_000},
    ),
]


@pytest.mark.parametrize("path, body", BODIES, ids=lambda part: str(part)[:40])
def test_a_body_is_not_told_back_whole(
    client: TestClient, path: str, body: dict[str, Any]
) -> None:
    answer = client.post(f"/{path}", json={"model": "m", **body})
    assert answer.status_code == 400
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert len(answer.content) < 1000


def test_a_request_on_which_the_engine_failed_is_told_why_and_not_logged_again(
    client: TestClient,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    answer = client.post("/fails")
    assert answer.status_code == 500
    assert answer.json()["error"] == {
        "message": "request cmpl-1 failed: why",
        "type": "InternalServerError",
        "param": None,
        "code": 500,
    }
    assert "vllm" not in {record.name.split(".")[0] for record in caplog.records}


def test_the_field_at_fault_of_a_refused_request_is_told() -> None:
    core: Any = SimpleNamespace(_failures={0: []})
    errors = [
        VLLMValidationError("no" * 10_000, parameter="kv_transfer_params"),
        ValueError("no"),
        EngineGenerateError("no"),
    ]
    for error in errors:
        EngineCore._refuse(core, "r", 0, error)
    told: list[EngineCoreOutput] = core._failures[0]
    assert [one.refused_parameter for one in told] == ["kv_transfer_params", None, None]
    assert [one.refused for one in told] == [True, True, False]
    assert {one.finish_reason for one in told} == {FinishReason.ERROR}
    assert len(str(told[0].stop_reason)) <= 2000


@pytest.mark.parametrize(
    ("field", "message", "told"),
    [
        (
            "logprobs",
            "logprobs 21 is above the limit of 20: raise --max-logprobs (-1: no limit)",
            "top_logprobs 21 is above the limit of 20: raise --max-logprobs (-1: no "
            "limit)",
        ),
        ("logprobs", "see --logprobs-mode", "see --logprobs-mode"),
        ("logprobs", "prompt_logprobs or logprobs", "prompt_logprobs or top_logprobs"),
        ("prompt", "the prompt is long", "the prompt is long"),
    ],
)
def test_fields_are_told_as_the_client_names_them_and_options_as_the_server_does(
    field: str, message: str, told: str
) -> None:
    names = {"prompt": "messages", "logprobs": "top_logprobs"}
    with pytest.raises(VLLMValidationError) as caught, renamed(names):
        raise VLLMValidationError(message, parameter=field)
    assert str(caught.value) == told
    assert caught.value.parameter == names[field]
