"""Streams of requests: deltas, cancellation, continuations, failure, death."""

import asyncio
import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import EngineDeadError, VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

PROMPT = "Once upon a time there was"


@pytest.fixture(scope="module")
def engine(tiny_model: str) -> Iterator[AsyncLLM]:
    args = AsyncEngineArgs(
        model=tiny_model,
        dtype="float32",
        kv_cache_memory_bytes="1MiB",
        served_model_name="tiny",
        max_num_seqs=16,
    )
    engine = AsyncLLM.from_engine_args(args)
    yield engine
    engine.shutdown()


def params(**kwargs: Any) -> SamplingParams:
    options = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 12, **kwargs}
    return SamplingParams(**options)


async def run(
    engine: AsyncLLM, request_id: str, sampling: SamplingParams, prompt: Any = PROMPT
) -> list[RequestOutput]:
    return [o async for o in engine.generate(prompt, sampling, request_id)]


async def wait_until_idle(engine: AsyncLLM) -> None:
    """Until the core has nothing left to do: a reset needs all blocks to be free."""
    for _ in range(200):
        if await engine.reset_prefix_cache():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("the core still holds blocks")


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_kinds_agree(engine: AsyncLLM, kind: RequestOutputKind) -> None:
    async def both() -> tuple[list[RequestOutput], list[RequestOutput]]:
        final = params(output_kind=RequestOutputKind.FINAL_ONLY)
        return await asyncio.gather(
            run(engine, "a", params(output_kind=kind)), run(engine, "b", final)
        )

    seen, (final,) = asyncio.run(both())
    parts = seen if kind == RequestOutputKind.DELTA else seen[-1:]
    assert "".join(o.outputs[0].text for o in parts) == final.outputs[0].text
    tokens = [t for o in parts for t in o.outputs[0].token_ids]
    assert tokens == final.outputs[0].token_ids and len(tokens) == 12
    assert seen[-1].finished and final.prompt == PROMPT


def test_many_streams_at_once(engine: AsyncLLM) -> None:
    async def many() -> list[list[RequestOutput]]:
        delta = RequestOutputKind.DELTA
        runs = [
            run(engine, f"m{i}", params(max_tokens=3 + i % 5, output_kind=delta))
            for i in range(40)
        ]
        return await asyncio.gather(*runs)

    for i, outputs in enumerate(asyncio.run(many())):
        assert sum(len(o.outputs[0].token_ids) for o in outputs) == 3 + i % 5


def test_continuations_differ_and_repeat_with_their_seed(engine: AsyncLLM) -> None:
    final = RequestOutputKind.FINAL_ONLY
    sampling = params(n=3, seed=5, temperature=1.0, output_kind=final)
    (first,) = asyncio.run(run(engine, "n", sampling))
    (again,) = asyncio.run(run(engine, "n", sampling))
    texts = [c.token_ids for c in first.outputs]
    assert [c.index for c in first.outputs] == [0, 1, 2]
    assert len({tuple(t) for t in texts}) == 3
    assert texts == [c.token_ids for c in again.outputs]


def test_leaving_a_stream_aborts_the_request(engine: AsyncLLM) -> None:
    async def leave() -> None:
        stream = engine.generate(PROMPT, params(max_tokens=200), "left")
        async for _ in stream:
            break
        await stream.aclose()
        assert not engine.output_processor.has_unfinished_requests()
        await wait_until_idle(engine)

    asyncio.run(leave())


def test_cancelling_the_consumer_aborts_the_request(engine: AsyncLLM) -> None:
    async def cancel() -> None:
        task = asyncio.ensure_future(run(engine, "c", params(max_tokens=200)))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert not engine.output_processor.has_unfinished_requests()
        await wait_until_idle(engine)

    asyncio.run(cancel())


def test_abort_by_id_ends_the_stream(engine: AsyncLLM) -> None:
    async def abort() -> list[RequestOutput]:
        outputs = []
        async for output in engine.generate([5, 6], params(max_tokens=200), "x"):
            outputs.append(output)
            if len(outputs) == 1:
                await engine.abort("x")
        return outputs

    assert asyncio.run(abort())[-1].outputs[0].finish_reason == "abort"


def test_invalid_requests_leave_nothing_behind(engine: AsyncLLM) -> None:
    with pytest.raises(VLLMValidationError, match="maximum context length is 256"):
        asyncio.run(run(engine, "v", params(), [5] * 256))
    with pytest.raises(VLLMValidationError, match="structured_outputs"):
        grammar = {"structured_outputs": {"regex": "("}}
        asyncio.run(run(engine, "v", params(**grammar)))
    assert not engine.output_processor.has_unfinished_requests()


def test_a_running_id_is_refused_without_harm(engine: AsyncLLM) -> None:
    async def twice() -> list[Any]:
        runs = [run(engine, "same", params()) for _ in range(2)]
        return await asyncio.gather(*runs, return_exceptions=True)

    first, second = asyncio.run(twice())
    assert first[-1].finished and isinstance(second, VLLMValidationError)


def test_metrics_count_what_was_served(engine: AsyncLLM) -> None:
    def total(name: str, **labels: str) -> float:
        labels = {"model_name": "tiny", "engine": "0", **labels}
        return REGISTRY.get_sample_value(f"vllm:{name}", labels) or 0.0

    before = total("generation_tokens_total")
    done = total("request_success_total", finished_reason="length")
    (*_, last) = asyncio.run(run(engine, "met", params()))
    assert total("generation_tokens_total") - before == 12
    assert total("request_success_total", finished_reason="length") - done == 1
    assert last.metrics.first_token_latency > 0


def test_aborted_requests_are_counted(engine: AsyncLLM) -> None:
    def aborted() -> float | None:
        labels = {"model_name": "tiny", "engine": "0", "finished_reason": "abort"}
        return REGISTRY.get_sample_value("vllm:request_success_total", labels)

    async def leave() -> None:
        stream = engine.generate(PROMPT, params(max_tokens=200), "gone")
        async for _ in stream:
            break
        await stream.aclose()

    before = aborted()
    asyncio.run(leave())
    assert aborted() == before + 1


def test_cached_prompt_tokens_are_reported(engine: AsyncLLM) -> None:
    prompt = list(range(10, 60))
    first = asyncio.run(run(engine, "p1", params(), prompt))[-1]
    second = asyncio.run(run(engine, "p2", params(), prompt))[-1]
    assert first.num_cached_tokens == 0 and second.num_cached_tokens >= 32
    assert first.outputs[0].token_ids == second.outputs[0].token_ids


@pytest.mark.parametrize(
    "given", [{"structured_outputs": {"choice": ["a"]}}, {"bad_words": ["a"]}]
)
def test_a_request_that_takes_a_while_to_check_keeps_nobody_waiting(
    engine: AsyncLLM, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    check = engine.input_processor.process_inputs
    may_end = threading.Event()

    def slow(request_id: str, *args: Any, **kwargs: Any) -> Any:
        assert request_id == "quick" or may_end.wait(60)
        return check(request_id, *args, **kwargs)

    monkeypatch.setattr(engine.input_processor, "process_inputs", slow)

    async def both() -> None:
        slow = asyncio.create_task(run(engine, "slow", params(**given)))
        await run(engine, "quick", params())
        assert not slow.done()
        may_end.set()
        assert (await slow)[-1].finished

    asyncio.run(both())


def test_death_of_the_core_ends_every_stream(engine: AsyncLLM) -> None:
    """The last test of this engine."""
    core = engine.engine_core.process.pid

    async def die() -> list[Any]:
        await engine.check_health()
        # A core that stands still has ended none of them when it dies.
        os.kill(core, signal.SIGSTOP)
        runs = [asyncio.ensure_future(run(engine, f"d{i}", params())) for i in range(3)]
        while len(engine.output_processor.request_states) < len(runs):
            assert not any(one.done() for one in runs)
            await asyncio.sleep(0.01)
        os.kill(core, signal.SIGKILL)
        results = await asyncio.gather(*runs, return_exceptions=True)
        with pytest.raises(EngineDeadError):
            await engine.check_health()
        with pytest.raises(EngineDeadError):
            await run(engine, "late", params())
        return results

    assert all(isinstance(r, EngineDeadError) for r in asyncio.run(die()))
    assert engine.errored and not engine.is_running


def test_a_tokenizer_that_is_missing_ends_the_core_too(
    tiny_model: str, tmp_path: Path
) -> None:
    args = AsyncEngineArgs(
        model=tiny_model, tokenizer=str(tmp_path), kv_cache_memory_bytes="1MiB"
    )
    config = args.create_engine_config()
    before = set(multiprocessing.active_children())
    with pytest.raises(ValueError, match=re.escape(str(tmp_path))):
        AsyncLLM.from_vllm_config(config)
    assert set(multiprocessing.active_children()) <= before
