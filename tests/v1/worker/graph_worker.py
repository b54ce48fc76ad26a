"""A worker whose device "captures" on the host: a replay runs the recorded work again,
which reads its inputs where a graph would read them, and writes its output in place."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.device import MemoryReading, RunnerDevice


class HostGraph:
    def __init__(self, run: Callable[[], torch.Tensor]) -> None:
        self._run = run
        self.output = run()
        self.rows = len(self.output)
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        self.output.copy_(self._run())


class HostDevice(RunnerDevice):
    """Records what is captured."""

    captures_graphs = True

    def __init__(self, torch_device: torch.device) -> None:
        super().__init__(torch_device)
        self.graphs: list[HostGraph] = []

    def memory(self) -> MemoryReading:
        return MemoryReading(free=1, total=1, reserved=0, peak=0)

    def forget_peak(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def capture(self, run: Callable[[], torch.Tensor]) -> HostGraph:
        self.graphs.append(HostGraph(run))
        return self.graphs[-1]


class CapturedBuilder(AttentionMetadataBuilder):
    """The host's kernels read lengths and tables from tensors: nothing else changes."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    replans: ClassVar[list[list[int]]] = []

    def replan_for_graph(self, common_attn_metadata: Any) -> None:
        self.replans.append(common_attn_metadata.seq_lens_cpu.tolist())


class CapturedBackend(CPUAttentionBackend):
    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        return CapturedBuilder


class GraphWorker(CPUWorker):
    """A CPU worker that captures decode steps as a GPU's does."""

    def compile_or_warm_up_model(self) -> None:
        super().compile_or_warm_up_model()
        self.runner_device = HostDevice(self.device)
        self.model_runner.capture_graphs(self.runner_device)
