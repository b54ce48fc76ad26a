"""`vllm disagg-proxy` before two real servers: the same answers, the same errors."""

import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any
from urllib.request import urlopen

import httpx
import openai
import pytest
from fastapi.testclient import TestClient

from tests.remote_server import RemoteCommand, RemoteServer
from tests.tiny_model import tiny_model  # noqa: F401
from vllm.entrypoints.cli.main import main
from vllm.entrypoints.disagg.proxy import (
    Servers,
    build_app,
    is_for_decode_alone,
    prefill_body,
)
from vllm.utils.import_utils import has_module
from vllm.utils.network_utils import get_open_port

needs_nixl = pytest.mark.skipif(
    not (has_module("nixl_cu12") or has_module("nixl_cu13")),
    reason="nixl is not installed: pip install -r requirements/nixl.txt",
)
PROMPT = "The quick brown fox jumps over the lazy dog. " * 4
ROLES = ("producer", "consumer")
WORDS = {"temperature": 0, "max_tokens": 12, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def servers(tiny_model: str) -> Iterator[list[RemoteServer]]:  # noqa: F811
    """A prefill server and a decode server."""

    def start(role: str) -> RemoteServer:
        transfer = {"kv_connector": "NixlConnector", "kv_role": role}
        args = [
            *("--dtype", "float32", "--kv-cache-memory-bytes", "4MiB"),
            "--enable-prompt-tokens-details",
            *("--kv-transfer-config", json.dumps(transfer)),
        ]
        return RemoteServer(tiny_model, args, {"VLLM_NIXL_SIDE_CHANNEL_PORT": "0"})

    with ThreadPoolExecutor(2) as pool, ExitStack() as stack:
        starting = [pool.submit(start, f"kv_{side}") for side in ROLES]
        yield [stack.enter_context(future.result()) for future in starting]


@pytest.fixture(scope="module")
def proxy(servers: list[RemoteServer]) -> Iterator[RemoteCommand]:
    """One of its prefill servers is never there."""
    prefill, decode = servers
    absent = f"127.0.0.1:{get_open_port()}"
    words = ["disagg-proxy", "--prefill", absent, prefill.url]
    with RemoteCommand([*words, "--decode", f"{decode.url}/v1/"]) as command:
        yield command


def model_of(client: Any) -> str:
    return str(client.models.list().data[0].id)


def metric(server: RemoteCommand, name: str) -> float:
    lines = urlopen(f"{server.url}/metrics").read().decode().splitlines()
    (line,) = [text for text in lines if text.startswith(f"vllm:{name}{{")]
    return float(line.rsplit(" ", 1)[1])


def wait_for(condition: Any, timeout: float = 10.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it does not become true"
        time.sleep(0.05)


@needs_nixl
def test_completions_are_those_of_one_server(
    proxy: RemoteCommand, servers: list[RemoteServer]
) -> None:
    prefill, decode = servers
    client, direct = proxy.client(), prefill.client()
    model = model_of(client)
    for n in (1, 2):
        sampled = {"n": n, "temperature": 0.9, "seed": 5} if n > 1 else {}
        how = {"prompt": f"{n}: {PROMPT}", "logprobs": 1, **WORDS, **sampled}
        expected = direct.completions.create(model=model, **how)
        found = client.completions.create(model=model, **how)
        assert [c.text for c in found.choices] == [c.text for c in expected.choices]
        for one, other in zip(found.choices, expected.choices, strict=True):
            assert one.logprobs.token_logprobs == pytest.approx(
                other.logprobs.token_logprobs, abs=2e-4
            )
        usage, known = found.usage, expected.usage
        assert usage.completion_tokens == known.completion_tokens == 12 * n
        # The decode server has computed one token of the prompt.
        if n == 1:
            cached = usage.prompt_tokens_details.cached_tokens
            assert cached == usage.prompt_tokens - 1 == known.prompt_tokens - 1
    assert metric(decode, "kv_connector_loaded_blocks_total") > 0
    assert metric(decode, "external_prefix_cache_hits_by_source_total") > 0
    wait_for(lambda: metric(prefill, "kv_cache_usage_perc") == 0)


@needs_nixl
def test_chats_stream(proxy: RemoteCommand, servers: list[RemoteServer]) -> None:
    how: dict[str, Any] = {
        "messages": [{"role": "user", "content": PROMPT}],
        "temperature": 0,
        "max_completion_tokens": 12,
        "logprobs": True,
        "top_logprobs": 2,
    }
    client, direct = proxy.client(), servers[0].client()
    model = model_of(client)
    expected = direct.chat.completions.create(model=model, **how)
    stream = client.chat.completions.create(
        model=model, stream=True, stream_options={"include_usage": True}, **how
    )
    *chunks, last = stream
    text = "".join(c.choices[0].delta.content or "" for c in chunks)
    assert text == expected.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == expected.choices[0].finish_reason
    assert last.usage.completion_tokens == expected.usage.completion_tokens
    cached = last.usage.prompt_tokens_details.cached_tokens
    assert cached == last.usage.prompt_tokens - 1


@needs_nixl
def test_errors_are_those_of_the_servers(
    proxy: RemoteCommand, servers: list[RemoteServer]
) -> None:
    client = proxy.client()
    model = model_of(client)
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model="other", prompt=PROMPT)
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.completions.create(model=model, prompt=PROMPT * 99)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model=model, prompt=PROMPT, temperature=-1)
    # Only the decode server refuses this one; the pages of its prompt are let go.
    with pytest.raises(openai.BadRequestError, match="n must be 1"):
        client.completions.create(model=model, prompt=PROMPT, temperature=0, n=2)
    wait_for(lambda: metric(servers[0], "kv_cache_usage_perc") == 0)
    for content, text in ((b"{", "not valid JSON"), (b"[]", "must be a JSON object")):
        answer = httpx.post(f"{proxy.url}/v1/completions", content=content)
        assert answer.status_code == 400
        assert text in answer.json()["error"]["message"]
    answer = httpx.get(f"{proxy.url}/nothing")
    assert answer.status_code == 404 and answer.json()["error"]["code"] == 404


@needs_nixl
def test_several_prompts_are_answered_in_order(proxy: RemoteCommand) -> None:
    client = proxy.client()
    prompts = [f"{i} {PROMPT}" for i in range(3)]
    how = {"model": model_of(client), **WORDS}
    together = client.completions.create(prompt=prompts, **how)
    for i, choice in enumerate(together.choices):
        (alone,) = client.completions.create(prompt=[prompts[i]], **how).choices
        assert choice.text == alone.text


@needs_nixl
def test_clients_that_go_away_leave_nothing_behind(
    proxy: RemoteCommand, servers: list[RemoteServer]
) -> None:
    body = {
        "prompt": PROMPT,
        "max_tokens": 150,
        "ignore_eos": True,
        "stream": True,
        "temperature": 0,
    }
    url = f"{proxy.url}/v1/completions"
    with httpx.stream("POST", url, json=body) as answer:
        assert next(answer.iter_lines()).startswith("data: ")
    for timeout in (0.001, 0.01, 0.03, 0.1):
        with suppress(httpx.TimeoutException):  # a fast engine answers in time
            httpx.post(url, json=body | {"stream": False}, timeout=timeout)
    for server in servers:
        wait_for(lambda s=server: metric(s, "num_requests_running") == 0)
        wait_for(lambda s=server: metric(s, "num_requests_waiting") == 0)
        wait_for(lambda s=server: metric(s, "kv_cache_usage_perc") == 0)


@needs_nixl
def test_health_is_that_of_both_kinds(
    proxy: RemoteCommand, servers: list[RemoteServer]
) -> None:
    assert httpx.get(f"{proxy.url}/health").status_code == 200
    absent = f"127.0.0.1:{get_open_port()}"
    for prefill, decode, missing in (
        ([servers[0].url], [absent], "no decode server"),
        ([absent], [servers[1].url], "no prefill server"),
        ([absent], [absent], "no decode and no prefill server"),
    ):
        with TestClient(build_app(prefill, decode)) as client:
            answer = client.get("/health")
            assert answer.status_code == 503
            assert missing in answer.json()["error"]["message"]


# --- without servers ------------------------------------------------------------------


def test_servers_that_cannot_be_reached_are_named() -> None:
    absent = f"127.0.0.1:{get_open_port()}"
    with TestClient(build_app([absent], [absent])) as client:
        for answer in (
            client.post("/v1/completions", json={"prompt": "a"}),
            client.post("/v1/completions", json={"prompt": ["a", "b"]}),
            client.get("/v1/models"),
        ):
            assert answer.status_code == 503
            error = answer.json()["error"]
            assert error["type"] == "ServiceUnavailableError"
            assert "server can be reached" in error["message"]
    with pytest.raises(ValueError, match="no decode server is given"):
        build_app([absent], [])


def test_a_stream_that_breaks_off_ends_with_an_error() -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def break_off() -> None:
        connection, _ = listener.accept()
        connection.recv(1 << 16)
        head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
        connection.sendall(f"{head}content-length: 99\r\n\r\ndata: 1\n\n".encode())
        connection.close()

    thread = threading.Thread(target=break_off)
    thread.start()
    decode = f"127.0.0.1:{listener.getsockname()[1]}"
    with TestClient(build_app(["127.0.0.1:1"], [decode])) as client:
        body = {"prompt": ["a", "b"], "stream": True}
        lines = client.post("/v1/completions", json=body).text.split("\n\n")
    thread.join()
    listener.close()
    assert lines[0] == "data: 1" and lines[2:] == ["data: [DONE]", ""]
    error = json.loads(lines[1].removeprefix("data: "))["error"]
    assert "the decode server broke off" in error["message"]


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("", "names no host"),
        ("nonsense", "neither a port nor a scheme"),
        ("127.0.0.1", "neither a port nor a scheme"),
        ("a/v1", "neither a port nor a scheme"),
        ("http://", "names no host"),
        (":8000", "names no host"),
        ("ftp://a:1", "scheme 'ftp'"),
        ("://a:1", "scheme ''"),
        ("a:", "port must be 1 to 65535"),
        ("a:0", "port must be 1 to 65535"),
        ("a:70000", "0-65535"),
        ("a:-1", "[Pp]ort"),
        ("a:b", "[Pp]ort"),
        ("http//a:1", "// in an odd place"),
        ("http:/a:1", "port must be"),
        ("a b:1", "blanks"),
        ("a,b:1", "'a,b' is no name"),
        ("http://[::1:8000", "IPv6"),
        ("a:1/?x=1", "more than a path"),
    ],
)
@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_what_is_no_url_is_refused_at_the_start(
    kind: str, url: str, words: str
) -> None:
    good = {"prefill": ["a:1"], "decode": ["b:1"]}
    with pytest.raises(ValueError, match=words) as caught:
        build_app(**{**good, kind: [url]})
    message = str(caught.value)
    assert message.startswith(f"--{kind} {url!r}: ")
    assert "expected HOST:PORT" in message and "\n" not in message


def test_a_server_is_named_once() -> None:
    with pytest.raises(ValueError, match="--decode names http://b:1 twice"):
        build_app(["a:1"], ["b:1", "http://B:1/v1"])


def test_the_command_refuses_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["disagg-proxy", "--prefill", "ftp://a", "--decode", "b:1", "--port", "0"]
    assert main(words) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("vllm disagg-proxy: error: --prefill 'ftp://a': ")


def test_who_reads_that_it_is_ready_may_connect_and_stop_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[str] = []

    def read(text: str, **_: object) -> None:
        told.append(text)
        port = int(text.split("http://127.0.0.1:")[1].split()[0])
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
        signal.raise_signal(signal.SIGINT)

    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setattr("builtins.print", read)
    try:
        words = ["disagg-proxy", "--prefill", "a:1", "--decode", "b:1", "--port=0"]
        assert main(words) == 0
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert len(told) == 1


def test_servers_take_turns() -> None:
    servers = Servers("decode", ["a:1", "http://b:2/", "https://c:3/v1", "[::1]:4/x/"])
    a, b, c, d = "http://a:1", "http://b:2", "https://c:3", "http://[::1]:4/x"
    turns = [servers.in_turn() for _ in range(5)]
    assert turns[:2] == [[a, b, c, d], [b, c, d, a]]
    assert turns[3:] == [[d, a, b, c], [a, b, c, d]]


@pytest.mark.parametrize(
    "body, expected",
    [
        ({"prompt": "a"}, False),
        ({"prompt": ["a"]}, False),
        ({"prompt": [1, 2]}, False),
        ({"prompt": [[1, 2]]}, False),
        ({"messages": [], "n": 3}, False),
        ({"prompt": "a", "logprobs": 1}, False),
        ({"prompt": ["a", "b"]}, True),
        ({"prompt": [[1], [2]]}, True),
        ({"prompt": "a", "prompt_logprobs": 0}, True),
        ({"prompt": "a", "echo": True, "logprobs": 0}, True),
        ({"prompt": "a", "max_tokens": 0}, True),
    ],
    ids=str,
)
def test_some_requests_have_nothing_to_prefill(
    body: dict[str, Any], expected: bool
) -> None:
    assert is_for_decode_alone(body) is expected


def test_prefill_computes_the_same_prompt() -> None:
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "a"}],
        "tools": [1],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_completion_tokens": 9,
        "min_tokens": 4,
        "n": 2,
        "cache_salt": "s",
    }
    changed = prefill_body(body)
    for name in ("model", "messages", "tools", "cache_salt"):
        assert changed[name] == body[name]
    assert changed["max_tokens"] == changed["max_completion_tokens"] == 1
    assert changed["n"] == 1 and changed["min_tokens"] == 0
    assert changed["stream"] is False and "stream_options" not in changed
    assert changed["kv_transfer_params"]["do_remote_decode"] is True
