"""Everything around generation: models, keys, health, metrics, bad bodies, start-up."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from tests.entrypoints.openai.conftest import KEY, MODEL
from tests.remote_server import RemoteServer
from tests.tiny_model import save_tiny_llama
from vllm.engine.arg_utils import EngineArgs

METRICS = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "gpu_cache_usage_perc",
    "prompt_tokens_total",
    "generation_tokens_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "num_preemptions_total",
    "request_success_total",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_time_per_output_token_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "iteration_tokens_total",
    "cache_config_info",
)


def test_models_are_listed(server: RemoteServer) -> None:
    models = server.client(api_key=KEY).models.list().data
    assert [m.id for m in models] == [MODEL]
    assert models[0].model_extra["max_model_len"] == 1024


def test_health_version_and_ping_need_no_key(server: RemoteServer) -> None:
    health = httpx.get(f"{server.url}/health")
    assert health.status_code == 200 and health.content == b""
    assert httpx.get(f"{server.url}/ping").status_code == 200
    assert httpx.get(f"{server.url}/version").json()["version"].startswith("0.28.0")
    assert httpx.get(f"{server.url}/metrics").status_code == 200


@pytest.mark.parametrize("header", [{}, {"Authorization": "Bearer wrong"}])
def test_a_wrong_key_is_401(server: RemoteServer, header: dict[str, str]) -> None:
    answer = httpx.get(f"{server.url}/v1/models", headers=header)
    assert answer.status_code == 401
    assert answer.json() == {"error": "Unauthorized"}


def test_an_unknown_model_is_404(server: RemoteServer) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        server.client(api_key=KEY).completions.create(model="nope", prompt="a")
    assert caught.value.body["param"] == "model"
    assert caught.value.body["type"] == "NotFoundError"
    assert "`nope` does not exist" in caught.value.body["message"]


def test_invalid_json_is_400(http: httpx.Client) -> None:
    answer = http.post(
        "/v1/completions",
        content=b'{"model": ',
        headers={"Content-Type": "application/json"},
    )
    assert answer.status_code == 400
    assert "JSON" in answer.json()["error"]["message"]


def test_an_unknown_path_has_the_error_shape(http: httpx.Client) -> None:
    answer = http.get("/v1/nothing")
    assert answer.status_code == 404
    assert answer.json()["error"]["type"] == "NotFoundError"
    assert http.get("/v1/completions").status_code == 405


def test_tokenize_and_detokenize_are_inverse(http: httpx.Client) -> None:
    text = "Grüße, 世界! 12345 def f(x): return x\n"
    tokens = http.post("/tokenize", json={"prompt": text}).json()
    assert tokens["count"] == len(tokens["tokens"])
    assert tokens["max_model_len"] == 1024
    back = http.post("/detokenize", json={"tokens": tokens["tokens"]}).json()
    assert back["prompt"] == text
    chat = {"messages": [{"role": "user", "content": "hi"}], "return_token_strs": True}
    answer = http.post("/tokenize", json=chat).json()
    assert answer["token_strs"][0] == "<|im_start|>"
    assert http.post("/detokenize", json={"tokens": [10**9]}).status_code == 400
    assert http.post("/tokenize", json={}).status_code == 400


@pytest.mark.parametrize("stream", [False, True])
def test_a_wish_to_a_connector_that_is_not_there_is_400(
    http: httpx.Client, stream: bool
) -> None:
    wish = {"kv_transfer_params": {"do_remote_decode": True}, "stream": stream}
    messages = [{"role": "user", "content": "hi"}]
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": messages}),
    ):
        answer = http.post(path, json=body | wish)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"] == "kv_transfer_params"
        assert "--kv-transfer-config" in error["message"]
    assert http.get("/load").json() == {"server_load": 0}


def test_metrics_have_the_names_that_monitors_read(http: httpx.Client) -> None:
    http.post("/v1/completions", json={"model": MODEL, "prompt": "a", "max_tokens": 2})
    text = http.get("/metrics").text
    for name in METRICS:
        assert f"\nvllm:{name}" in text, name
    assert f'model_name="{MODEL}"' in text and 'engine="0"' in text
    assert 'finished_reason="length"' in text


def test_request_ids_are_echoed(http: httpx.Client) -> None:
    body = {"model": MODEL, "prompt": "a", "max_tokens": 1}
    answer = http.post("/v1/completions", json=body, headers={"X-Request-Id": "abc"})
    assert answer.headers["X-Request-Id"] == "abc"
    assert answer.json()["id"] == "cmpl-abc"


def test_an_id_in_a_header_is_short(http: httpx.Client) -> None:
    body = {"model": MODEL, "prompt": "a", "max_tokens": 1}
    headers = {"X-Request-Id": "a" * 257}
    answer = http.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "X-Request-Id"
    assert "1 to 256 printable characters" in answer.json()["error"]["message"]


def test_monitors_may_ask_for_the_head_only(http: httpx.Client) -> None:
    for path in ("/health", "/ping"):
        answer = http.head(path)
        assert (answer.status_code, answer.content) == (200, b"")
    answer = http.put("/health")
    assert answer.status_code == 405
    assert set(answer.headers["Allow"].split(", ")) == {"GET", "HEAD"}


def test_the_schema_has_one_id_for_each_path_and_method(server: RemoteServer) -> None:
    paths = httpx.get(f"{server.url}/openapi.json").json()["paths"]
    ids = [how["operationId"] for path in paths.values() for how in path.values()]
    assert len(ids) == len(set(ids)) > 8
    assert set(paths["/health"]) == {"get"} and set(paths["/ping"]) == {"get", "post"}
    assert "Duplicate Operation ID" not in server.log


def test_start_up_tells_what_was_chosen(server: RemoteServer) -> None:
    for words in (
        "CPU_ATTN",
        "bytes per token",
        "KV cache size",
        "Maximum concurrency",
    ):
        assert words in server.log, words


def run_serve(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", *args],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["/no/such/model"], ["/no/such/model"]),
        (
            [MODEL, "--kv-cache-memory-bytes", "4MiB", "--max-model-len", "8192"],
            ["8192", "max_model_len"],
        ),
    ],
)
def test_what_cannot_be_served_ends_in_one_line(
    args: list[str], words: list[str]
) -> None:
    done = run_serve(*args, "--port", "0")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("vllm serve: error:")
    for word in words:
        assert word in last
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"dtype": "int3"}, ["int3", "float32"]),
        ({"max_model_len": 99_999_999}, ["99999999", "8192"]),
        ({"block_size": 7}, ["block size 7", "multiple of 16"]),
        ({"kv_cache_dtype": "fp8_ds_mla"}, ["fp8_ds_mla"]),
        ({"kv_cache_dtype": "fp9"}, ["fp9", "turboquant_4bit_nc"]),
        ({"attention_backend": "NOPE"}, ["NOPE", "CPU_ATTN"]),
        ({"tensor_parallel_size": 2}, ["tensor"]),
        ({"max_num_seqs": 9999, "max_num_batched_tokens": 600}, ["max_num_seqs"]),
        ({"quantization": "awq"}, ["awq", "gguf"]),
        ({"kv_cache_memory_bytes": "lots"}, ["lots", "4GiB"]),
        ({"device": "tpu"}, ["tpu", "cpu"]),
    ],
)
def test_arguments_are_refused_before_anything_is_loaded(
    args: dict, words: list[str]
) -> None:
    with pytest.raises(ValueError) as caught:
        EngineArgs(model=MODEL, **args).create_engine_config()
    for word in words:
        assert word in str(caught.value)


def test_a_port_in_use_is_said_before_loading() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run_serve(MODEL, "--port", str(port))
    assert done.returncode == 1
    assert f"127.0.0.1:{port}" in done.stderr.strip().splitlines()[-1]


def test_an_unknown_kv_cache_dtype_lists_the_choices() -> None:
    done = run_serve(MODEL, "--kv-cache-dtype", "fp9")
    assert done.returncode == 2
    assert "turboquant_4bit_nc" in done.stderr


def test_a_server_whose_engine_dies_ends_with_a_failure(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path)
    with RemoteServer(str(tmp_path), ["--kv-cache-memory-bytes", "8MiB"]) as server:
        children = psutil.Process(server.process.pid).children()
        # The other child is Python's resource tracker, which holds no model.
        max(children, key=lambda child: child.memory_info().rss).kill()
        status = server.process.wait(timeout=30)
    assert status == 1
    assert "vllm serve: error: the engine has stopped" in server.log
    assert "killed by signal 9" in server.log  # also where no request was waiting


def test_stopping_bounds_the_time_of_running_requests(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path)
    args = ["--kv-cache-memory-bytes", "8MiB", "--shutdown-timeout", "1"]
    with RemoteServer(str(tmp_path), args) as server:
        body = {"prompt": [5], "max_tokens": 120, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            started = time.monotonic()
            os.kill(server.process.pid, signal.SIGINT)
            last = [line for line in lines if line][-1]
        server.stop()
        assert time.monotonic() - started < 20
        assert last == "data: [DONE]"  # ended, or ended with finish reason "abort"


def test_an_unknown_axis_order_is_refused_before_loading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "NONSENSE")
    with pytest.raises(ValueError, match=r"NONSENSE.*LBHNC"):
        EngineArgs(model=MODEL).create_engine_config()


def test_a_wrong_log_level_is_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", MODEL],
        env={**os.environ, "VLLM_LOGGING_LEVEL": "LOUD"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "LOUD" in done.stderr and "Traceback" not in done.stderr
