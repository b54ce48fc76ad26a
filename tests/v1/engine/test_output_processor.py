"""What callers see: kinds of output, finish reasons, logprobs, several
continuations."""

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from tests.v1.engine.test_detokenizer import TOKENIZERS
from vllm.exceptions import EngineDeadError, VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
)
from vllm.v1.engine.logprobs import LogprobsProcessor, TokenTexts
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.metrics.stats import IterationStats
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

TOKENIZER = TOKENIZERS["byte_level"]
PROMPT = TOKENIZER.encode("The answer is").ids
OUTPUT = TOKENIZER.encode(" forty-two, naïve 😀!").ids


def core_request(request_id: str, **params: Any) -> EngineCoreRequest:
    sampling = SamplingParams(**{"max_tokens": 100, **params})
    return EngineCoreRequest(request_id, PROMPT, None, sampling, None, 0.0)


def run(
    processor: OutputProcessor,
    request_id: str,
    tokens: list[int],
    finish: FinishReason = FinishReason.LENGTH,
) -> tuple[list[RequestOutput], list[str]]:
    """Feeds one token a step; returns all outputs and the ids to abort."""
    seen, aborts = [], []
    for i, token in enumerate(tokens):
        last = i == len(tokens) - 1
        news = EngineCoreOutput(
            request_id, [token], finish_reason=finish if last else None
        )
        result = processor.process_outputs([news])
        seen += result.request_outputs
        aborts += result.reqs_to_abort
    return seen, aborts


@pytest.mark.parametrize("interval", [1, 3, 1000])
@pytest.mark.parametrize("kind", RequestOutputKind)
def test_every_kind_gives_the_same_text_in_the_end(
    kind: RequestOutputKind, interval: int
) -> None:
    processor = OutputProcessor(TOKENIZER, stream_interval=interval)
    processor.add_request(core_request("r", output_kind=kind), "The answer is")
    seen, aborts = run(processor, "r", OUTPUT)
    assert not aborts and not processor.has_unfinished_requests()
    assert [o.finished for o in seen] == [False] * (len(seen) - 1) + [True]
    completions = [o.outputs[0] for o in seen]
    if kind == RequestOutputKind.FINAL_ONLY:
        assert len(seen) == 1
    if kind == RequestOutputKind.DELTA:
        text = "".join(c.text for c in completions)
        tokens = [t for c in completions for t in c.token_ids]
    else:
        text, tokens = completions[-1].text, completions[-1].token_ids
    assert text == TOKENIZER.decode(OUTPUT) and tokens == OUTPUT
    assert completions[-1].finish_reason == "length"
    assert seen[-1].prompt_token_ids == PROMPT and seen[-1].prompt == "The answer is"


def test_stop_string_ends_the_request_and_asks_the_core_to_stop() -> None:
    processor = OutputProcessor(TOKENIZER)
    processor.add_request(core_request("r", stop=["two", "zzz"]), None)
    seen, aborts = run(processor, "r", OUTPUT)
    assert aborts == ["r"]
    final = seen[-1].outputs[0]
    assert (final.finish_reason, final.stop_reason) == ("stop", "two")
    assert final.text == " forty-"


def test_stop_token_has_no_text_and_its_id_is_kept() -> None:
    processor = OutputProcessor(TOKENIZER)
    processor.add_request(core_request("r"), None)
    seen, _ = run(processor, "r", OUTPUT, FinishReason.STOP)
    final = seen[-1].outputs[0]
    assert final.text == TOKENIZER.decode(OUTPUT[:-1]) and final.token_ids == OUTPUT


def test_news_of_unknown_requests_is_dropped() -> None:
    processor = OutputProcessor(TOKENIZER)
    assert run(processor, "nobody", OUTPUT) == ([], [])


def test_a_running_id_is_refused_and_a_finished_one_is_free() -> None:
    processor = OutputProcessor(TOKENIZER)
    processor.add_request(core_request("r"), None)
    with pytest.raises(VLLMValidationError, match="already running"):
        processor.add_request(core_request("r"), None)
    run(processor, "r", OUTPUT)
    processor.add_request(core_request("r"), None)


def test_abort_gives_a_last_output() -> None:
    processor = OutputProcessor(TOKENIZER)
    processor.add_request(core_request("r"), None)
    processor.process_outputs([EngineCoreOutput("r", OUTPUT[:3])])
    core_ids, outputs = processor.abort_requests(["r", "unknown"])
    assert core_ids == ["r"] and not processor.has_unfinished_requests()
    assert outputs[0].finished and outputs[0].outputs[0].finish_reason == "abort"
    assert outputs[0].outputs[0].token_ids == OUTPUT[:3]


def lists(rows: list[list[int]], sampled_rank: int) -> LogprobsLists:
    ids = np.array(rows)
    return LogprobsLists(ids, -0.5 * ids, np.full(len(rows), sampled_rank))


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_logprobs_match_the_tokens_they_come_with(kind: RequestOutputKind) -> None:
    processor = OutputProcessor(TOKENIZER)
    request = core_request("r", output_kind=kind, logprobs=2, prompt_logprobs=1)
    processor.add_request(request, None)
    rows = torch.tensor([[t, 7] for t in PROMPT[1:]])
    prompt = LogprobsTensors(rows, -0.5 * rows, torch.ones(len(rows)).int() * 9)
    seen = []
    for i, token in enumerate(OUTPUT):
        # Column 0 is the chosen token; the batch asked for more columns than we did.
        news = EngineCoreOutput(
            "r",
            [token],
            new_logprobs=lists([[token, 3, 4, 5]], 6),
            new_prompt_logprobs_tensors=prompt if i == 0 else None,
            finish_reason=FinishReason.LENGTH if i == len(OUTPUT) - 1 else None,
        )
        seen += processor.process_outputs([news]).request_outputs
    for output in seen:
        completion = output.outputs[0]
        assert len(completion.logprobs) == len(completion.token_ids)
        for token, entry in zip(completion.token_ids, completion.logprobs, strict=True):
            assert list(entry) == [token, 3, 4]
            assert entry[token].logprob == pytest.approx(-0.5 * token)
            assert [item.rank for item in entry.values()] == [6, 1, 2]
    entries = seen[0].prompt_logprobs
    assert entries[0] is None and len(entries) == len(PROMPT)
    for token, entry in zip(PROMPT[1:], entries[1:], strict=True):
        assert list(entry) == [token, 7] and entry[token].rank == 9
    if kind == RequestOutputKind.DELTA:
        assert not any(output.prompt_logprobs for output in seen[1:])
    total = sum(-0.5 * t for t in OUTPUT)
    assert seen[-1].outputs[0].cumulative_logprob == pytest.approx(total)


def test_a_chosen_token_among_the_likeliest_appears_once() -> None:
    processor = LogprobsProcessor(None, 2, None, None)
    processor.update_sample(lists([[4, 3, 4]], 2))
    assert [(t, e.rank) for t, e in processor.logprobs[0].items()] == [(4, 2), (3, 1)]
    assert processor.logprobs[0][4].decoded_token is None


def test_token_texts_join_to_the_text() -> None:
    """Parts of a character: the token that completes it carries it, the others
    nothing."""
    texts = TokenTexts(TOKENIZER)
    ids = TOKENIZER.encode("ok 😀 naïve 日本").ids
    assert (
        "".join(texts.text(t, ids[:i]) for i, t in enumerate(ids)) == "ok 😀 naïve 日本"
    )


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_several_continuations_belong_to_one_request(kind: RequestOutputKind) -> None:
    params = SamplingParams(n=3, seed=7, output_kind=kind, max_tokens=9)
    parent = ParentRequest("r", params)
    processor = OutputProcessor(TOKENIZER)
    children = [parent.child_params(i) for i in range(3)]
    assert [c.seed for c in children] == [7, 8, 9] and {c.n for c in children} == {1}
    for i, (child_id, child) in enumerate(zip(parent.child_ids, children, strict=True)):
        request = EngineCoreRequest(child_id, PROMPT, None, child, None, 0.0)
        processor.add_request(request, None, parent, i)
    seen = []
    for i in (2, 0, 1):
        tokens = OUTPUT[i : i + 3]
        seen += run(processor, parent.child_ids[i], tokens)[0]
    assert {o.request_id for o in seen} == {"r"}
    assert [o.finished for o in seen] == [False] * (len(seen) - 1) + [True]
    if kind == RequestOutputKind.FINAL_ONLY:
        assert [c.index for c in seen[0].outputs] == [0, 1, 2]
        assert [c.token_ids for c in seen[0].outputs] == [
            OUTPUT[i : i + 3] for i in range(3)
        ]
    assert not processor.parent_requests


def test_only_the_first_child_computes_prompt_logprobs() -> None:
    parent = ParentRequest("r", SamplingParams(n=2, prompt_logprobs=1))
    first, second = parent.child_params(0), parent.child_params(1)
    assert first.prompt_logprobs == 1 and first.skip_reading_prefix_cache
    assert second.prompt_logprobs is None and not second.skip_reading_prefix_cache


def test_abort_of_a_parent_aborts_its_running_children() -> None:
    parent = ParentRequest("r", SamplingParams(n=2))
    processor = OutputProcessor(TOKENIZER)
    for i, child_id in enumerate(parent.child_ids):
        request = core_request(child_id)
        processor.add_request(request, None, parent, i)
    run(processor, parent.child_ids[0], OUTPUT)
    core_ids, _ = processor.abort_requests(["r"])
    assert core_ids == [parent.child_ids[1]] and not processor.parent_requests


def test_statistics_of_a_request() -> None:
    processor, stats = OutputProcessor(TOKENIZER), IterationStats()
    processor.add_request(core_request("r"), None)
    kinds = EngineCoreEventType
    events = [
        EngineCoreEvent(kinds.QUEUED, 1.0),
        EngineCoreEvent(kinds.SCHEDULED, 2.0),
        EngineCoreEvent(kinds.PREEMPTED, 2.5),
        EngineCoreEvent(kinds.SCHEDULED, 2.7),
    ]
    first = EngineCoreOutput("r", [5], events=events, num_cached_tokens=4)
    processor.process_outputs([first], 5.0, stats)
    last = EngineCoreOutput("r", [6], finish_reason=FinishReason.STOP)
    processor.process_outputs([last], 7.0, stats)
    assert (stats.num_prompt_tokens, stats.num_generation_tokens) == (len(PROMPT), 2)
    assert (stats.num_cached_prompt_tokens, stats.num_preempted_reqs) == (4, 1)
    assert stats.inter_token_latencies_iter == [2.0]
    finished = stats.finished_requests[0]
    assert finished.finish_reason == "stop" and finished.num_generation_tokens == 2
    assert (finished.queued_time, finished.prefill_time) == (1.0, 3.0)
    assert (finished.decode_time, finished.inference_time) == (2.0, 5.0)


def test_a_lagging_consumer_gets_joined_deltas() -> None:
    async def consume() -> None:
        kind = RequestOutputKind.DELTA
        processor = OutputProcessor(TOKENIZER)
        queue = RequestOutputCollector(kind, "r")
        processor.add_request(core_request("r", output_kind=kind), None, queue=queue)
        run(processor, "r", OUTPUT)
        output = await queue.get()
        assert output.finished and output.outputs[0].token_ids == OUTPUT
        assert output.outputs[0].text == TOKENIZER.decode(OUTPUT)

    asyncio.run(consume())


def test_death_of_the_core_reaches_every_consumer() -> None:
    async def consume() -> None:
        processor = OutputProcessor(TOKENIZER)
        queues = [RequestOutputCollector(RequestOutputKind.DELTA, n) for n in "ab"]
        for queue in queues:
            request = core_request(queue.request_id)
            processor.add_request(request, None, queue=queue)
        waiting = [asyncio.ensure_future(queue.get()) for queue in queues]
        await asyncio.sleep(0)
        processor.fail_all(EngineDeadError("gone"))
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(r, EngineDeadError) for r in results)

    asyncio.run(consume())
