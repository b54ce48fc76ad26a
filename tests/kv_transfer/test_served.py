"""`vllm serve` with a connector: hits on another process's blocks, numbers on /metrics,
parameters of requests in and out."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from tests.kv_transfer.engines import engine, example, generate
from tests.remote_server import RemoteServer
from tests.tiny_model import tiny_model, tiny_tokenizer  # noqa: F401
from vllm.outputs import RequestOutput

PROMPT = "The quick brown fox jumps over the lazy dog. " * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def alone(tiny_model: str, folder: Path) -> RequestOutput:  # noqa: F811
    """The output without a connector; another engine has stored the prompt by then."""
    ids, how = tiny_tokenizer().encode(PROMPT), {"skip_tokenizer_init": False}
    with engine(tiny_model, **how) as llm:
        (output,) = generate(llm, [ids])
    with engine(tiny_model, example(folder), **how) as llm:
        generate(llm, [ids])
    return output


@pytest.fixture(scope="module")
def server(
    tiny_model: str,  # noqa: F811
    folder: Path,
    alone: RequestOutput,
) -> Iterator[RemoteServer]:
    args = [
        *("--dtype", "float32", "--kv-cache-memory-bytes", "4MiB"),
        "--enable-prompt-tokens-details",
        *("--kv-transfer-config", json.dumps(example(folder))),
    ]
    with RemoteServer(tiny_model, args) as server:
        yield server


def ask(server: RemoteServer, **more: object) -> Any:
    client = server.client()
    return client.completions.create(
        model=client.models.list().data[0].id,
        prompt=PROMPT,
        max_tokens=6,
        temperature=0,
        logprobs=1,
        extra_body={"ignore_eos": True, **more},
    )


def test_a_server_loads_what_another_process_stored(
    server: RemoteServer, alone: RequestOutput
) -> None:
    found = ask(server, kv_transfer_params={"skip_save": True})
    cached = found.usage.prompt_tokens_details.cached_tokens
    assert cached == (found.usage.prompt_tokens - 1) // 16 * 16 > 0
    assert found.kv_transfer_params == {
        "num_loaded_tokens": cached,
        "num_saved_blocks": 0,
    }
    (choice,), (expected,) = found.choices, alone.outputs
    assert choice.text == expected.text
    for mine, step, token in zip(
        choice.logprobs.token_logprobs,
        expected.logprobs,
        expected.token_ids,
        strict=True,
    ):
        assert abs(mine - step[token].logprob) < 2e-4
    lines = urlopen(f"{server.url}/metrics").read().decode().splitlines()
    for name, value in (
        ("kv_connector_loaded_blocks_total", cached / 16),
        ("external_prefix_cache_hits_total", cached),
    ):
        (line,) = [text for text in lines if text.startswith(f"vllm:{name}{{")]
        assert float(line.rsplit(" ", 1)[1]) == value


def test_parameters_of_a_chat_go_in_and_out(server: RemoteServer) -> None:
    client = server.client()
    for wish, saves in (({"skip_save": True}, False), ({"skip_load": True}, True)):
        chat = client.chat.completions.create(
            model=client.models.list().data[0].id,
            messages=[{"role": "user", "content": f"{PROMPT} {saves}"}],
            max_tokens=2,
            extra_body={"kv_transfer_params": wish},
        )
        assert chat.kv_transfer_params["num_loaded_tokens"] == 0
        assert (chat.kv_transfer_params["num_saved_blocks"] > 0) == saves


@pytest.mark.parametrize("shows_usage", [True, False])
@pytest.mark.parametrize("kind", ["completions", "chat"])
def test_the_last_chunk_of_a_stream_tells_what_the_connector_does(
    server: RemoteServer, kind: str, shows_usage: bool
) -> None:
    client = server.client()
    how: dict[str, Any] = {
        "model": client.models.list().data[0].id,
        "max_tokens": 3,
        "stream": True,
        "extra_body": {"kv_transfer_params": {"skip_save": True}, "ignore_eos": True},
    }
    if shows_usage:
        how["stream_options"] = {"include_usage": True}
    if kind == "chat":
        messages = [{"role": "user", "content": PROMPT}]
        chunks = list(client.chat.completions.create(messages=messages, **how))
    else:
        chunks = list(client.completions.create(prompt=PROMPT, **how))
    told = [chunk.kv_transfer_params for chunk in chunks]
    assert told[-1]["num_saved_blocks"] == 0 and "num_loaded_tokens" in told[-1]
    ends = [c for c in chunks if c.choices and c.choices[0].finish_reason]
    assert [chunk.kv_transfer_params for chunk in ends] == [told[-1]]
    assert not any(told[: -1 - shows_usage])
    assert bool(chunks[-1].choices) is not shows_usage
