"""A core in its own process: ready, at work, idle, failing, dead, orphaned."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import EngineDeadError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.core_client import (
    AsyncMPClient,
    EngineCoreClient,
    InprocClient,
    SyncMPClient,
)
from vllm.v1.executor.uniproc_executor import UniProcExecutor

PROMPT = list(range(20, 40))


def make_config(model: str, **kwargs: Any) -> VllmConfig:
    options = {"kv_cache_memory_bytes": "1MiB", "dtype": "float32", **kwargs}
    return EngineArgs(model=model, **options).create_engine_config()


def request(request_id: str, **params: Any) -> EngineCoreRequest:
    sampling = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **params})
    return EngineCoreRequest(request_id, PROMPT, None, sampling, None, time.time())


@pytest.fixture(scope="module")
def config(tiny_model: str) -> VllmConfig:
    return make_config(tiny_model, max_model_len=-1)


@pytest.fixture(scope="module")
def client(config: VllmConfig) -> Iterator[AsyncMPClient]:
    client = EngineCoreClient.make_client(config, asyncio_mode=True)
    assert isinstance(client, AsyncMPClient)
    yield client
    addresses, process = client.core_process.addresses, client.process
    client.shutdown()
    client.shutdown()
    assert process.exitcode in (0, -signal.SIGKILL)
    for address in addresses:
        assert not Path(address.removeprefix("ipc://")).exists()


async def collect(client: AsyncMPClient, request_id: str) -> list[EngineCoreOutput]:
    """The outputs of a request until its end."""
    seen: list[EngineCoreOutput] = []
    while not seen or not seen[-1].finished:
        news = await client.get_output_async()
        seen += [o for o in news.outputs if o.request_id == request_id]
    return seen


def test_ready_fills_what_the_core_decided(
    client: AsyncMPClient, config: VllmConfig, tiny_model: str
) -> None:
    local = make_config(tiny_model, max_model_len=-1)
    InprocClient(local, None, False).shutdown()
    for name in ("num_gpu_blocks", "kv_cache_size_tokens", "kv_cache_max_concurrency"):
        assert getattr(config.cache_config, name) == getattr(local.cache_config, name)
        assert getattr(config.cache_config, name) > 0
    assert config.model_config.max_model_len == local.model_config.max_model_len > 0


def test_tokens_equal_those_of_a_core_in_this_process(
    client: AsyncMPClient, tiny_model: str
) -> None:
    inproc = InprocClient(make_config(tiny_model), None, False)
    inproc.add_request(request("r", max_tokens=8))
    expected: list[int] = []
    while len(expected) < 8:
        for output in inproc.get_output().outputs:
            expected += output.new_token_ids
    inproc.shutdown()
    client.add_request(request("r", max_tokens=8))
    seen = asyncio.run(collect(client, "r"))
    assert [t for o in seen for t in o.new_token_ids] == expected
    assert seen[-1].finish_reason == FinishReason.LENGTH


def test_an_idle_core_uses_no_cpu(client: AsyncMPClient) -> None:
    process = psutil.Process(client.process.pid)
    time.sleep(0.3)

    def used() -> float:
        times = process.cpu_times()
        return times.user + times.system

    before = used()
    time.sleep(1.0)
    assert used() - before <= 0.03


def test_abort_ends_a_request_and_others_go_on(client: AsyncMPClient) -> None:
    async def run() -> None:
        client.add_request(request("long", max_tokens=200))
        client.add_request(request("short", max_tokens=20))
        await client.get_output_async()
        client.abort_requests(["long", "unknown"])
        await collect(client, "short")
        client.add_request(request("later", max_tokens=5))
        while True:
            news = await client.get_output_async()
            assert all(o.request_id != "long" for o in news.outputs)
            if any(o.request_id == "later" and o.finished for o in news.outputs):
                return

    asyncio.run(run())


def test_a_request_that_cannot_be_built_fails_alone(client: AsyncMPClient) -> None:
    grammar = StructuredOutputsParams(regex="(")
    client.add_request(request("bad", structured_outputs=grammar))
    client.add_request(request("good", max_tokens=2))
    bad = asyncio.run(collect(client, "bad"))
    assert bad[-1].finish_reason == FinishReason.ERROR
    assert "structured" in str(bad[-1].stop_reason)
    client.add_request(request("good2", max_tokens=2))
    asyncio.run(collect(client, "good2"))


def test_utilities_answer_and_their_errors_come_back(client: AsyncMPClient) -> None:
    async def run() -> None:
        assert await client.call_async("get_supported_tasks") == ["generate"]
        assert await client.call_async("reset_prefix_cache") is True
        with pytest.raises(RuntimeError, match="unknown utility"):
            await client.call_async("shutdown")
        with pytest.raises(RuntimeError, match="no_such_method"):
            await client.call_async("collective_rpc", "no_such_method")
        assert await client.call_async("is_sleeping") is False

    asyncio.run(run())


def test_malformed_messages_are_dropped(client: AsyncMPClient) -> None:
    for frames in ([b"\x00", b"garbage"], [b"\x07", b"x"], [b"\x00"], [b""]):
        client._input.send_multipart(frames)
    client.add_request(request("after", max_tokens=2))
    asyncio.run(collect(client, "after"))


class FailingExecutor(UniProcExecutor):
    """Computes one step and then fails."""

    steps = 0

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        self.steps += 1
        if self.steps > 1:
            raise RuntimeError("the device is on fire")
        return super().execute_model(*args, **kwargs)


def test_a_failing_step_is_reported_with_its_reason(tiny_model: str) -> None:
    client = SyncMPClient(make_config(tiny_model), FailingExecutor, True)
    try:
        client.add_request(request("r"))
        client.get_output()
        with pytest.raises(EngineDeadError, match="the device is on fire"):
            while True:
                client.get_output()
        with pytest.raises(EngineDeadError):
            while True:  # until the process has ended
                client.add_request(request("s"))
    finally:
        client.shutdown()


def test_what_cannot_start_says_why(tiny_model: str) -> None:
    config = make_config(tiny_model, kv_cache_memory_bytes=4096)
    with pytest.raises(ValueError) as inproc:
        InprocClient(config, None, False)
    config = make_config(tiny_model, kv_cache_memory_bytes=4096)
    with pytest.raises(ValueError) as other:
        EngineCoreClient.make_client(config, asyncio_mode=True)
    assert str(other.value) == str(inproc.value)
    assert "max_model_len" in str(other.value)


ORPHANING = """
    import os
    from tests.v1.engine.test_core_client import make_config
    from vllm.v1.engine.core_client import SyncMPClient
    if __name__ == "__main__":
        client = SyncMPClient(make_config({model!r}), None, False)
        print(client.process.pid, flush=True)
        os._exit(1)
"""


def test_an_orphaned_core_leaves(tiny_model: str, tmp_path: Path) -> None:
    script = tmp_path / "orphaning.py"
    script.write_text(textwrap.dedent(ORPHANING).format(model=tiny_model))
    root = Path(__file__).parents[3]
    env = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, str(script)], env=env, capture_output=True, text=True
    )
    assert done.stdout.strip(), done.stderr
    pid = int(done.stdout)
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(pid)


def test_a_killed_core_ends_all_waiting(client: AsyncMPClient) -> None:
    """The last test of this client."""

    async def run() -> None:
        client.add_request(request("r", max_tokens=200))
        await client.get_output_async()
        call = asyncio.ensure_future(client.call_async("is_sleeping"))
        os.kill(client.process.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="killed by signal 9"):
            while True:
                await client.get_output_async()
        results = await asyncio.gather(call, return_exceptions=True)
        assert results[0] is False or isinstance(results[0], EngineDeadError)
        with pytest.raises(EngineDeadError):
            client.add_request(request("s"))

    asyncio.run(run())
    assert client.is_dead
