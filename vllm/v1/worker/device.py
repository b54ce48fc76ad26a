"""What a GPU's worker and its model runner ask of a device: memory and captured graphs.

`CudaDevice` is torch.cuda, AMD's devices included; the host needs neither. Refuses to
know models and batches.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch


class Graph(Protocol):
    """Work that was recorded once. `output` is what it computed, and computes again in
    the same place at every replay, from tensors that keep their place."""

    output: torch.Tensor

    def replay(self) -> None:
        """Does the work again, without the host's part of it."""


@dataclass(frozen=True, kw_only=True)
class MemoryReading:
    """Bytes of a device: `free` and `total` as the driver says; `reserved` by torch in
    this process, and the `peak` of that which torch has handed out."""

    free: int
    total: int
    reserved: int
    peak: int

    @property
    def outside_torch(self) -> int:
        """Taken by contexts, libraries and other processes."""
        return self.total - self.free - self.reserved


class RunnerDevice(ABC):
    """One device; `torch_device` is where tensors go."""

    #: Whether `capture` is there.
    captures_graphs: bool = False

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device

    @abstractmethod
    def memory(self) -> MemoryReading:
        """Memory as it is now."""

    @abstractmethod
    def forget_peak(self) -> None:
        """Starts the peak of the next reading anew, and gives unused memory back."""

    @abstractmethod
    def synchronize(self) -> None:
        """Waits for everything that was put on the device."""

    def capture(self, run: Callable[[], torch.Tensor]) -> Graph:
        """Records `run`, which has run before: it reads tensors that keep their place,
        and never asks the device for a value. Larger work is captured first, so that
        smaller work fits into its memory."""
        raise NotImplementedError(f"{type(self).__name__} captures no graphs")


class CudaGraph:
    """A graph and its output, which lives in the pool of all graphs."""

    def __init__(self, graph: torch.cuda.CUDAGraph, output: torch.Tensor) -> None:
        self._graph = graph
        self.output = output

    def replay(self) -> None:
        self._graph.replay()


class CudaDevice(RunnerDevice):
    """Work goes to the current stream; captures take a stream of their own and share
    one pool of memory, since replays follow one another."""

    captures_graphs = True
    _WARM_UPS = 2  # what is made at the first use must not fall into a capture

    def __init__(self, torch_device: torch.device) -> None:
        super().__init__(torch_device)
        self._stream: torch.cuda.Stream | None = None
        self._pool: object = None

    def memory(self) -> MemoryReading:
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return MemoryReading(
            free=free,
            total=total,
            reserved=torch.cuda.memory_reserved(self.torch_device),
            peak=torch.cuda.max_memory_allocated(self.torch_device),
        )

    def forget_peak(self) -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def capture(self, run: Callable[[], torch.Tensor]) -> CudaGraph:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.torch_device)
            self._pool = torch.cuda.graph_pool_handle()
        self._stream.wait_stream(torch.cuda.current_stream(self.torch_device))
        with torch.cuda.stream(self._stream):
            for _ in range(self._WARM_UPS):
                run()
        self.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            output = run()
        return CudaGraph(graph, output)
