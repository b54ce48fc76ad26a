"""How graphs are captured through torch.cuda, with the calls recorded, not made."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from vllm.v1.worker.device import CudaDevice


class Stream:
    def __init__(self, device: torch.device) -> None:
        self.waited: list[Any] = []

    def wait_stream(self, other: Any) -> None:
        self.waited.append(other)


class CUDAGraph:
    replays = 0

    def replay(self) -> None:
        self.replays += 1


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was asked of torch.cuda, in order."""
    calls: list[Any] = []

    def recorded(name: str, answer: Any = None) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            calls.append(name)
            return answer

        return call

    @contextmanager
    def stream(of: Stream) -> Iterator[None]:
        calls.append(("on", of))
        yield

    @contextmanager
    def graph(graph: CUDAGraph, pool: Any, stream: Stream) -> Iterator[None]:
        calls.append(("capture", graph, pool, stream))
        yield
        calls.append("captured")

    cuda = torch.cuda
    for name, answer in {
        "current_stream": "the current stream",
        "graph_pool_handle": "the pool",
        "synchronize": None,
        "empty_cache": None,
        "reset_peak_memory_stats": None,
        "mem_get_info": (3, 8),
        "memory_reserved": 4,
        "max_memory_allocated": 2,
    }.items():
        assert hasattr(cuda, name)
        monkeypatch.setattr(cuda, name, recorded(name, answer))
    monkeypatch.setattr(cuda, "Stream", Stream)
    monkeypatch.setattr(cuda, "CUDAGraph", CUDAGraph)
    monkeypatch.setattr(cuda, "stream", stream)
    monkeypatch.setattr(cuda, "graph", graph)
    return calls


def test_work_runs_before_it_is_captured_and_all_graphs_share_a_pool(
    log: list[Any],
) -> None:
    device = CudaDevice(torch.device("cuda", 0))

    def run() -> torch.Tensor:
        log.append("run")
        return torch.ones(2)

    first, second = device.capture(run), device.capture(run)
    captures = [call for call in log if call[0] == "capture"]
    (_, one, pool, stream), (_, other, same_pool, same_stream) = captures
    assert pool == same_pool == "the pool" and stream is same_stream
    assert one is not other
    # On its own stream, which waits for what was put on the current one.
    assert stream.waited == ["the current stream"] * 2
    before = log[: log.index(captures[0])]
    assert before.count("run") == 2 and before[-1] == "synchronize"
    at = log.index(captures[0])
    assert log[at + 1 : at + 3] == ["run", "captured"]
    first.replay()
    assert (one.replays, other.replays) == (1, 0)
    assert torch.equal(second.output, torch.ones(2))


def test_memory_is_read_from_driver_and_torch(log: list[Any]) -> None:
    device = CudaDevice(torch.device("cuda", 0))
    device.forget_peak()
    assert log == ["empty_cache", "reset_peak_memory_stats"]
    found = device.memory()
    assert (found.free, found.total, found.reserved, found.peak) == (3, 8, 4, 2)
    assert found.outside_torch == 1
