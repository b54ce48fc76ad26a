"""From the messages of a request to a prompt: what reaches the template, and whom an
error blames. No engine is needed."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from tests.tiny_model import tiny_tokenizer
from vllm.entrypoints.openai.protocol import ChatCompletionRequest, TokenizeRequest
from vllm.entrypoints.openai.serving import ServingContext, renamed
from vllm.entrypoints.openai.serving_chat import encoded_chat
from vllm.exceptions import VLLMValidationError

HI = [{"role": "user", "content": "hi"}]
SHOWS_CALLS = (
    "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}"
    "<{{ call.function.name }} {{ call.function.arguments | tojson }}>"
    "{% endfor %}{% endfor %}"
)


def context(**settings: Any) -> ServingContext:
    engine: Any = None
    config: Any = SimpleNamespace(model_config=SimpleNamespace(max_model_len=64))
    return ServingContext(
        engine=engine, vllm_config=config, tokenizer=tiny_tokenizer(), **settings
    )


def prompt(trust: bool = True, **body: Any) -> str:
    request = ChatCompletionRequest(**{"messages": HI, **body})
    return encoded_chat(context(trust_request_chat_template=trust), request)[0]


def refusal(trust: bool = True, **body: Any) -> tuple[str | None, str]:
    """The field that is blamed, and the message."""
    with pytest.raises(VLLMValidationError) as caught:
        prompt(trust, **body)
    return caught.value.parameter, str(caught.value)


def test_a_request_template_needs_the_servers_trust() -> None:
    template = "{{ messages[0].content }}"
    for how in (
        {"chat_template": template},
        {"chat_template": ""},
        {"chat_template_kwargs": {"chat_template": template}},
    ):
        param, message = refusal(trust=False, **how)
        assert param == next(iter(how))
        assert "--trust-request-chat-template" in message
        request = TokenizeRequest(messages=HI, **how)
        with pytest.raises(VLLMValidationError, match="--trust-request-chat-template"):
            encoded_chat(context(), request)
    assert prompt(chat_template=template) == "hi"
    assert "hi" in prompt(trust=False)


def test_an_error_blames_the_field_that_is_at_fault() -> None:
    param, message = refusal(chat_template="{{ nonsense(")
    assert param == "chat_template" and "not valid Jinja (line 1" in message
    param, message = refusal(chat_template="{{ raise_exception('no') }}")
    assert param == "chat_template" and "refuses these messages (no)" in message
    param, message = refusal(chat_template="{{ nothing() }}")
    assert param == "chat_template" and "fails on these messages" in message
    part = {"role": "user", "content": [{"type": "text"}]}
    param, message = refusal(messages=[*HI, part])
    assert param == "messages[1].content[0].text" and "missing" in message
    part["content"] = [{"type": "text", "text": 5}]
    assert "got 5" in refusal(messages=[part])[1]
    part["content"] = [{"type": "image_url", "image_url": {}}]
    param, message = refusal(messages=[part])
    assert param == "messages[0].content[0]" and "image_url" in message
    long = [{"role": "user", "content": "x" * 100_000}]
    assert refusal(messages=long)[0] == "messages"


@pytest.mark.parametrize(
    "name", ["messages", "conversation", "tokenize", "tools", "add_generation_prompt"]
)
def test_template_variables_may_not_be_what_rendering_is_told(name: str) -> None:
    param, message = refusal(chat_template_kwargs={name: False})
    assert param == "chat_template_kwargs"
    assert repr(name) in message and "jinja" not in message


def test_what_a_template_can_show_reaches_it() -> None:
    template = "{{ reasoning_effort }} {{ documents[0].text }} {{ word }}"
    found = prompt(
        chat_template=template,
        reasoning_effort="high",
        documents=[{"text": "d"}],
        chat_template_kwargs={"word": "w"},
    )
    assert found == "high d w"


def test_any_last_message_can_be_continued() -> None:
    how = {"continue_final_message": True, "add_generation_prompt": False}
    assert prompt(**how).endswith("hi")


def calls(arguments: Any) -> list[dict[str, Any]]:
    function = {"name": "f", "arguments": arguments}
    call = {"id": "1", "type": "function", "function": function}
    return [*HI, {"role": "assistant", "content": None, "tool_calls": [call]}]


@pytest.mark.parametrize("arguments", [{"a": 1}, "", None])
def test_tool_calls_reach_the_template_as_objects(arguments: Any) -> None:
    for given in (arguments, json.dumps(arguments or {})):
        found = prompt(messages=calls(given), chat_template=SHOWS_CALLS)
        assert found == f"hi<f {json.dumps(arguments or {})}>"


def test_tool_calls_that_nobody_shows_are_refused() -> None:
    param, message = refusal(messages=calls("{}"))
    assert param == "messages[1].tool_calls" and "--chat-template" in message
    for bad in ("[1]", "{", 5):
        param, _ = refusal(messages=calls(bad), chat_template=SHOWS_CALLS)
        assert param == "messages[1].tool_calls[0].function.arguments"


def test_errors_name_fields_as_the_request_does() -> None:
    body = {"max_completion_tokens": -1, "logprobs": True, "top_logprobs": 50}
    request = ChatCompletionRequest(messages=HI, **body)
    for name in ("max_tokens", "logprobs"):
        new = request.names_of_fields[name]
        with (
            pytest.raises(VLLMValidationError, match=rf"^{new} must be 1") as caught,
            renamed(request.names_of_fields),
        ):
            raise VLLMValidationError(f"{name} must be 1", parameter=name)
        assert caught.value.parameter == new
    plain = ChatCompletionRequest(messages=HI, max_tokens=-1)
    with (
        pytest.raises(VLLMValidationError, match=r"^max_tokens") as caught,
        renamed(plain.names_of_fields),
    ):
        context().room_for(5, plain.wanted_tokens)
    assert caught.value.parameter == "max_tokens"
