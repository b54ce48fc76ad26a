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
