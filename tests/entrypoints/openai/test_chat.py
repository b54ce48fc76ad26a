"""Chat completions, through the client that users have."""

import asyncio
import json

import httpx
import openai
import pytest
from openai import OpenAI

from tests.entrypoints.openai.conftest import KEY, MODEL
from tests.remote_server import RemoteServer

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def test_the_capital_of_france_is_paris(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=32
    )
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_a_stream_spells_the_same_answer(client: OpenAI) -> None:
    kwargs = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 32}
    whole = client.chat.completions.create(**kwargs)
    chunks = list(
        client.chat.completions.create(
            **kwargs, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert reasons[-1] == "stop" and set(reasons[:-1]) == {None}


def test_n_choices_are_all_answered(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, n=3, temperature=1.0, seed=1, max_tokens=8
    )
    assert [c.index for c in answer.choices] == [0, 1, 2]
    assert len({c.message.content for c in answer.choices}) > 1


def test_logprobs_list_the_likeliest_first(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        temperature=0,
        max_tokens=5,
        logprobs=True,
        top_logprobs=3,
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    for token in content:
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].token == token.token
        values = [t.logprob for t in token.top_logprobs]
        assert values == sorted(values, reverse=True)


def test_a_second_turn_hits_the_prefix_cache(client: OpenAI) -> None:
    long = [{"role": "user", "content": "Tell me about tides. " * 20}]
    first = client.chat.completions.create(
        model=MODEL, messages=long, temperature=0, max_tokens=8
    )
    again = client.chat.completions.create(
        model=MODEL, messages=long, temperature=0, max_tokens=8
    )
    assert again.usage.prompt_tokens_details.cached_tokens >= 64
    assert again.choices[0].message.content == first.choices[0].message.content


def test_text_parts_equal_plain_text(client: OpenAI) -> None:
    parts = [
        {
            "role": "user",
            "content": [{"type": "text", "text": QUESTION[0]["content"]}],
        }
    ]
    texts = [
        client.chat.completions.create(
            model=MODEL, messages=m, temperature=0, max_tokens=8
        )
        .choices[0]
        .message.content
        for m in (QUESTION, parts)
    ]
    assert texts[0] == texts[1]


def test_stop_strings_are_never_shown(client: OpenAI) -> None:
    kwargs = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 32}
    chunks = client.chat.completions.create(**kwargs, stop=["Paris"], stream=True)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert "Par" not in text and text
    whole = client.chat.completions.create(**kwargs, stop=["Paris"])
    assert whole.choices[0].message.content == text
    assert whole.choices[0].model_extra["stop_reason"] == "Paris"


def test_many_streams_at_once_are_all_complete(server: RemoteServer) -> None:
    async def one(client: openai.AsyncOpenAI, i: int) -> str:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": f"Count to {i}."}],
            temperature=0,
            max_tokens=12,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        return "".join([c.choices[0].delta.content or "" async for c in stream])

    async def run() -> list[str]:
        async with server.async_client(api_key=KEY) as client:
            return await asyncio.gather(*(one(client, i) for i in range(12)))

    assert all(asyncio.run(run()))


def test_a_client_that_leaves_frees_its_request(
    server: RemoteServer, http: httpx.Client
) -> None:
    body = {
        "model": MODEL,
        "messages": QUESTION,
        "max_tokens": 900,
        "ignore_eos": True,
        "stream": True,
    }
    with http.stream("POST", "/v1/chat/completions", json=body) as response:
        next(response.iter_lines())
    with pytest.raises(httpx.ReadTimeout):
        http.post("/v1/chat/completions", json={**body, "stream": False}, timeout=0.5)
    for _ in range(100):
        text = http.get("/metrics").text
        running = [
            float(line.split()[-1])
            for line in text.splitlines()
            if line.startswith("vllm:num_requests_running{")
        ]
        if running and sum(running) == 0:
            return
        # Metrics follow engine steps; a short request makes one.
        http.post(
            "/v1/completions", json={"model": MODEL, "prompt": "a", "max_tokens": 1}
        )
    pytest.fail(f"requests still run: {running}")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"messages": []}, "messages"),
        ({"temperature": -1}, "temperature"),
        ({"n": 0}, "n must be"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 5000}, "maximum context length is 1024 tokens"),
        ({"top_p": 0}, "top_p"),
        ({"logit_bias": {" 1": 1}}, "logit_bias"),
        ({"logit_bias": {"1_0": 1}}, "logit_bias"),
        ({"logit_bias": {"7": "nan"}}, "logit_bias"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"messages": [{"role": "", "content": "x"}]}, "role"),
        ({"guided_json": {}}, "guided_json"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 999}, "logprobs"),
        ({"messages": [{"content": "x"}]}, "role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "image_url",
        ),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"chat_template": "{{ nonsense("}, "chat template"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
        ({"response_format": {"a": 1}}, "response_format"),
    ],
)
def test_bad_requests_are_refused_by_name(
    http: httpx.Client, change: dict, word: str
) -> None:
    body = {"model": MODEL, "messages": QUESTION, **change}
    response = http.post("/v1/chat/completions", json=body)
    error = response.json()["error"]
    assert response.status_code == error["code"] == 400
    assert error["type"] == "BadRequestError"
    assert word in error["message"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"max_completion_tokens": 5000}, "max_completion_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"logprobs": True, "top_logprobs": 50}, "top_logprobs"),
        ({"messages": [{"role": "user", "content": "x y " * 5000}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 500_000}]}, "messages"),
        ({"priority": 5}, "priority"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_error_names_the_field_that_was_sent(
    http: httpx.Client, change: dict, param: str, stream: bool
) -> None:
    body = {"model": MODEL, "messages": QUESTION, "stream": stream, **change}
    response = http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert param in error["message"] or param == "messages"


def test_template_arguments_reach_the_template(http: httpx.Client) -> None:
    body = {
        "messages": QUESTION,
        "chat_template": "{{ word }}{{ messages[0].content }}",
        "chat_template_kwargs": {"word": "Hello: ", "enable_thinking": False},
    }
    tokens = http.post("/tokenize", json=body).json()["tokens"]
    text = http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert text == f"Hello: {QUESTION[0]['content']}"


def test_an_unfinished_message_is_continued(http: httpx.Client) -> None:
    body = {
        "model": MODEL,
        "messages": [*QUESTION, {"role": "assistant", "content": "The capital of"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
        "temperature": 0,
        "max_tokens": 4,
        "echo": True,
    }
    answer = http.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["content"].startswith(
        "The capital of France"
    )


def test_stream_lines_are_server_sent_events(http: httpx.Client) -> None:
    body = {"model": MODEL, "messages": QUESTION, "max_tokens": 3, "stream": True}
    response = http.post("/v1/chat/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [line for line in response.text.split("\n\n") if line]
    assert events[-1] == "data: [DONE]"
    assert all(json.loads(e.removeprefix("data: ")) for e in events[:-1])
