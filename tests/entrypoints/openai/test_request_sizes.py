"""What one request may hold, and that what it holds costs time in proportion."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from pydantic import ValidationError

from vllm.entrypoints.disagg.proxy import build_app as build_proxy
from vllm.entrypoints.openai.errors import install_error_handlers
from vllm.entrypoints.openai.middleware import (
    MAX_BODY_BYTES,
    MAX_BRACKETS,
    BodySizeMiddleware,
)
from vllm.entrypoints.openai.protocol import (
    MAX_PROMPTS,
    MAX_SEQUENCES,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from vllm.entrypoints.openai.serving import merge
from vllm.outputs import CompletionOutput, RequestOutput


@pytest.mark.parametrize("prompt", ["a", [7]])
def test_prompts_of_a_request_are_counted(prompt: Any) -> None:
    assert CompletionRequest(prompt=[prompt] * MAX_PROMPTS)
    with pytest.raises(ValueError, match=r"2,048 prompts, got 100,000: send.*requests"):
        CompletionRequest(prompt=[prompt] * 100_000)


def test_tokens_of_one_prompt_are_not_prompts() -> None:
    assert CompletionRequest(prompt=[7] * (MAX_PROMPTS + 1), n=MAX_SEQUENCES)


def test_continuations_of_all_prompts_are_counted() -> None:
    assert CompletionRequest(prompt=["a"] * 4, n=MAX_SEQUENCES // 4)
    with pytest.raises(ValueError, match="n must be at most 4,096 for 4 prompts"):
        CompletionRequest(prompt=["a"] * 4, n=MAX_SEQUENCES // 4 + 1)


class Source:
    """A stream of `items`; knows whether it was closed."""

    def __init__(self, items: list[Any]) -> None:
        self.items, self.is_closed = items, False

    async def __aiter__(self) -> AsyncIterator[Any]:
        try:
            for item in self.items:
                await asyncio.sleep(0)
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self.is_closed = True


def test_streams_are_merged_in_time_that_grows_as_their_number() -> None:
    sources = [Source(list(range(4))) for _ in range(3000)]

    async def run() -> list[list[int]]:
        seen: list[list[int]] = [[] for _ in sources]
        async for i, item in merge([source.__aiter__() for source in sources]):
            seen[i].append(item)
        return seen

    started = time.process_time()
    assert asyncio.run(run()) == [[0, 1, 2, 3]] * len(sources)
    assert time.process_time() - started < 3.0  # 0.2 s; each asked each time, 20 s
    assert all(source.is_closed for source in sources)


def test_a_stream_that_fails_closes_the_others() -> None:
    sources = [Source([1, ValueError("no")]), Source([1] * 9), Source([])]

    async def run() -> None:
        async for _ in merge([source.__aiter__() for source in sources]):
            pass

    with pytest.raises(ValueError, match="no"):
        asyncio.run(run())
    assert all(source.is_closed for source in sources)


@pytest.mark.parametrize("aggregate", [True, False])
def test_news_for_a_slow_client_add_up_in_time_that_grows_as_their_number(
    aggregate: bool,
) -> None:
    """n continuations, of which each has news in a step."""
    count = 10_000

    def news(index: int, text: str) -> RequestOutput:
        part = CompletionOutput(index, text, [1])
        return RequestOutput("r", None, [1], None, [part], False)

    started = time.process_time()
    whole = news(count - 1, "a")
    for text in "ab":
        for i in range(count - 1):
            whole.add(news(i, text), aggregate)
    assert time.process_time() - started < 2.0  # 0.05 s; searched each time, 5 s
    assert [out.index for out in whole.outputs] == [count - 1, *range(count - 1)]
    assert {out.text for out in whole.outputs[1:]} == {"ab" if aggregate else "b"}


REQUIRED: dict[type, dict[str, Any]] = {
    CompletionRequest: {"prompt": "a"},
    ChatCompletionRequest: {"messages": [{"role": "user", "content": "a"}]},
    TokenizeRequest: {"prompt": "a"},
    DetokenizeRequest: {"tokens": [1]},
}


def fields_of_type(model: Any, kind: str) -> list[str]:
    fields = model.model_json_schema()["properties"]
    return [
        name
        for name, schema in fields.items()
        if kind in {part.get("type") for part in schema.get("anyOf", [schema])}
    ]


LISTS = [(m, name) for m in REQUIRED for name in fields_of_type(m, "array")]
MAPS = [(m, name) for m in REQUIRED for name in fields_of_type(m, "object")]


@pytest.fixture(scope="module")
def client() -> TestClient:
    app = FastAPI()
    install_error_handlers(app)
    app.add_middleware(BodySizeMiddleware)
    for model in REQUIRED:

        def take(body: model) -> None:  # type: ignore[valid-type]
            """Only the body is looked at."""

        app.post(f"/{model.__name__}")(take)
    return TestClient(app)


@pytest.mark.parametrize(("model", "name"), LISTS)
def test_of_many_faults_in_a_list_the_first_is_told(
    model: type, name: str, client: TestClient
) -> None:
    """All of them would take seconds, in which nobody else is answered."""
    body = {**REQUIRED[model], name: [1.5] * 100_000}
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    assert caught.value.error_count() < 10  # one for each type that the field takes
    answer = client.post(f"/{model.__name__}", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == name


@pytest.mark.parametrize(("model", "name"), MAPS)
def test_of_many_faults_in_a_map_the_first_is_told(
    model: type, name: str, client: TestClient
) -> None:
    body = {**REQUIRED[model], name: {str(i): [[]] for i in range(100_000)}}
    try:
        model.model_validate(body)
    except ValidationError as error:
        assert error.error_count() < 10
    answer = client.post(f"/{model.__name__}", json=body)
    taken_as_they_are = ("kv_transfer_params", "vllm_xargs", "chat_template_kwargs")
    assert (answer.status_code == 200) == (name in taken_as_they_are), answer.text


@pytest.mark.parametrize(
    "prompt",
    ["a" * (8 << 20), [7] * 1_000_000, ["ab" * 1000] * MAX_PROMPTS, [[7] * 500] * 2048],
    ids=["text", "ids", "texts", "lists of ids"],
)
def test_a_large_prompt_is_looked_at_quickly(prompt: Any) -> None:
    """Character by character, 8 MiB take seconds."""
    started = time.process_time()
    CompletionRequest.model_validate({"prompt": prompt})
    assert time.process_time() - started < 10.0


def bodies_of(size: int) -> list[Any]:
    part = b" " * (1 << 20)
    unstated = (part[: size - at] for at in range(0, size, len(part)))
    return [b" " * size, unstated]


@pytest.mark.parametrize("is_stated", [True, False])
def test_bodies_above_the_limit_are_not_read(
    is_stated: bool, client: TestClient
) -> None:
    proxy = TestClient(build_proxy(["http://a"], ["http://b"]))
    kind = {"Content-Type": "application/json"}
    for size, status in ((MAX_BODY_BYTES, 400), (MAX_BODY_BYTES + 1, 413)):
        for app, path in ((client, "/CompletionRequest"), (proxy, "/v1/completions")):
            body = bodies_of(size)[not is_stated]
            answer = app.post(path, content=body, headers=kind)
            assert answer.status_code == status, answer.text
            message = answer.json()["error"]["message"]
            assert ("more than 33,554,432 bytes" in message) == (status == 413)


@pytest.mark.parametrize("opened", [b"[]", b"{}", b"[", b"[{}"])
def test_bodies_of_too_many_lists_and_objects_are_not_read(
    opened: bytes, client: TestClient
) -> None:
    kind = {"Content-Type": "application/json"}
    each = opened.count(b"[") + opened.count(b"{")
    for many, status in ((MAX_BRACKETS // each, 400), (MAX_BRACKETS + 1, 413)):
        answer = client.post("/CompletionRequest", content=opened * many, headers=kind)
        assert answer.status_code == status, answer.text
        message = answer.json()["error"]["message"]
        assert ("524,288 opening brackets" in message) == (status == 413)
