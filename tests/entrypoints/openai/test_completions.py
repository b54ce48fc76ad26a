"""Completions: prompts in every form, echo, logprobs, streams."""

import json

import httpx
import pytest
from openai import OpenAI

from tests.entrypoints.openai.conftest import MODEL

PROMPT = "The capital of France is"


def complete(client: OpenAI, **kwargs: object):
    options = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": 8}
    return client.completions.create(**{**options, **kwargs})


def test_default_length_is_sixteen_tokens(http: httpx.Client) -> None:
    body = {"model": MODEL, "prompt": PROMPT, "ignore_eos": True}
    answer = http.post("/v1/completions", json=body).json()
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["id"].startswith("cmpl-")
    assert answer["choices"][0]["finish_reason"] == "length"


def test_token_ids_equal_their_text(client: OpenAI, http: httpx.Client) -> None:
    ids = http.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    assert (
        complete(client, prompt=ids).choices[0].text == complete(client).choices[0].text
    )


def test_batched_prompts_are_answered_in_order(
    client: OpenAI, http: httpx.Client
) -> None:
    prompts = [PROMPT, "Two plus two is", "Once upon a time"]
    single = [complete(client, prompt=p).choices[0].text for p in prompts]
    batch = complete(client, prompt=prompts)
    assert [c.text for c in batch.choices] == single
    assert [c.index for c in batch.choices] == [0, 1, 2]
    ids = [http.post("/tokenize", json={"prompt": p}).json()["tokens"] for p in prompts]
    assert [c.text for c in complete(client, prompt=ids).choices] == single


def test_a_stream_of_batched_prompts_is_complete(client: OpenAI) -> None:
    prompts = [PROMPT, "Two plus two is"]
    whole = [c.text for c in complete(client, prompt=prompts).choices]
    texts = ["", ""]
    for chunk in complete(client, prompt=prompts, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == whole


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echo_scores_the_prompt(client: OpenAI, max_tokens: int) -> None:
    answer = complete(client, echo=True, logprobs=1, max_tokens=max_tokens)
    choice = answer.choices[0]
    logprobs = choice.logprobs
    assert choice.text.startswith(PROMPT)
    count = answer.usage.prompt_tokens + max_tokens
    assert answer.usage.completion_tokens == max_tokens
    for values in (
        logprobs.tokens,
        logprobs.token_logprobs,
        logprobs.top_logprobs,
        logprobs.text_offset,
    ):
        assert len(values) == count
    assert logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])
    assert "".join(logprobs.tokens) == choice.text
    assert logprobs.text_offset[1] == len(logprobs.tokens[0])


def test_echo_gives_the_same_scores_after_a_prefix_hit(client: OpenAI) -> None:
    prompt = "The quick brown fox jumps over the lazy dog. " * 8
    complete(client, prompt=prompt)
    scores = [
        complete(client, prompt=prompt, echo=True, logprobs=0, max_tokens=0)
        .choices[0]
        .logprobs.token_logprobs
        for _ in range(2)
    ]
    assert scores[0] == scores[1]


def test_prompt_logprobs_have_the_documented_shape(http: httpx.Client) -> None:
    body = {"model": MODEL, "prompt": PROMPT, "prompt_logprobs": 2, "max_tokens": 1}
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    first, *rest = choice["prompt_logprobs"]
    assert first is None
    for entry in rest:
        assert 2 <= len(entry) <= 3
        for token, item in entry.items():
            assert int(token) >= 0
            assert set(item) == {"logprob", "rank", "decoded_token"}


def test_logprobs_of_generated_tokens(client: OpenAI) -> None:
    answer = complete(client, logprobs=2, max_tokens=4)
    logprobs = answer.choices[0].logprobs
    assert len(logprobs.tokens) == 4
    assert all(len(top) == 2 for top in logprobs.top_logprobs)
    assert "".join(logprobs.tokens) == answer.choices[0].text


def test_a_seed_repeats(client: OpenAI) -> None:
    runs = [
        complete(client, temperature=1.0, seed=7, max_tokens=16).choices[0].text
        for _ in range(2)
    ]
    assert runs[0] == runs[1]


def test_truncation_keeps_the_end(http: httpx.Client) -> None:
    body = {
        "model": MODEL,
        "prompt": "x " * 3000 + PROMPT,
        "truncate_prompt_tokens": 5,
        "max_tokens": 2,
        "temperature": 0,
    }
    answer = http.post("/v1/completions", json=body).json()
    assert answer["usage"]["prompt_tokens"] == 5


def test_token_ids_are_returned_on_request(http: httpx.Client) -> None:
    body = {
        "model": MODEL,
        "prompt": PROMPT,
        "max_tokens": 3,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    assert len(choice["token_ids"]) == 3
    text = http.post("/detokenize", json={"tokens": choice["prompt_token_ids"]}).json()
    assert text["prompt"] == PROMPT


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [10**6]}, "vocabulary"),
        ({"prompt": [-1]}, "vocabulary"),
        ({"prompt": "word " * 3000}, "maximum context length is 1024 tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"n": 0}, "n must be"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": 10**6}, "logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1000000": 1}}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"stop": [""]}, "stop"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 4}, "best_of"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"top_k": 2**70}, "top_k"),
        ({"priority": 2**70}, "priority"),
        ({"stop_token_ids": [2**70]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"prompt": "a\ud800b"}, "prompt"),
        ({"stop": ["\udfff"]}, "stop.0"),
        ({"request_id": ""}, "request_id"),
        ({"prompt": "hello " * 500_000}, "maximum context length is 1024 tokens"),
        ({"prompt": [1.5]}, "prompt"),
        ({"stream": True, "prompt": [-1]}, "vocabulary"),
    ],
)
def test_bad_requests_are_refused_by_name(
    http: httpx.Client, change: dict, word: str
) -> None:
    # Plain json.dumps escapes surrogates, which the client's own encoder refuses.
    body = json.dumps({"model": MODEL, "prompt": PROMPT, **change})
    headers = {"Content-Type": "application/json"}
    response = http.post("/v1/completions", content=body, headers=headers)
    error = response.json()["error"]
    assert response.status_code == error["code"] == 400, error
    assert error["type"] == "BadRequestError"
    assert word in error["message"]
