"""What one request may hold, and that what it holds costs time in proportion."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from vllm.entrypoints.openai.protocol import (
    MAX_PROMPTS,
    MAX_SEQUENCES,
    CompletionRequest,
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
