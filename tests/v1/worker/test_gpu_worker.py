"""A GPU worker's start-up and the memory it leaves for the KV cache, with a device
whose readings are made up and whose graphs run on the host."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config

from tests.e2e.tiny import SIZES, engine, greedy, prompts_of, save_tiny, vocabulary
from tests.v1.worker.graph_worker import HostDevice
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.mem_constants import GiB_bytes, MiB_bytes
from vllm.v1.worker.device import MemoryReading
from vllm.v1.worker.gpu_worker import GPUWorker, device_bytes, kv_cache_bytes

WORKER = "tests.v1.worker.test_gpu_worker.MadeUpWorker"


class MadeUpDevice(HostDevice):
    """A GPU of 8 GiB, 1 of them taken by others; a step peaks at 100 MiB."""

    free = 7 * GiB_bytes

    def memory(self) -> MemoryReading:
        return MemoryReading(
            free=self.free, total=8 * GiB_bytes, reserved=0, peak=100 * MiB_bytes
        )


class MadeUpWorker(GPUWorker):
    """The host through GPUWorker: what it asks of its device is answered above."""

    def make_device(self) -> MadeUpDevice:
        return MadeUpDevice(self.device)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen2")
    save_tiny(Qwen2Config(**SIZES, vocab_size=vocabulary()), folder)
    return folder


def worker_for(folder: Path, **settings: Any) -> MadeUpWorker:
    defaults = {"dtype": "float32", "gpu_memory_utilization": 0.8, "max_num_seqs": 4}
    args = EngineArgs(model=str(folder), **(defaults | settings))
    worker = MadeUpWorker(args.create_engine_config())
    worker.cache_config.kv_cache_memory_bytes = settings.get("kv_cache_memory_bytes")
    return worker


def test_the_cache_gets_what_the_share_leaves(folder: Path) -> None:
    worker = worker_for(folder)
    worker.init_device()
    worker.load_model()
    found = worker.determine_available_memory()
    weights = device_bytes(worker.get_model())
    peak = 100 * MiB_bytes
    graphs = (peak - weights) * 4 // worker.model_runner.max_num_tokens
    assert found == int(0.8 * 8 * GiB_bytes) - peak - GiB_bytes - graphs
    assert weights > 0 and graphs > 0


def test_a_size_that_was_asked_for_is_taken(folder: Path) -> None:
    worker = worker_for(folder, kv_cache_memory_bytes=5 * MiB_bytes)
    worker.init_device()
    worker.load_model()
    assert worker.determine_available_memory() == 5 * MiB_bytes


def test_a_share_that_is_not_free_is_refused_at_once(folder: Path) -> None:
    worker = worker_for(folder, gpu_memory_utilization=0.9)
    with pytest.raises(ValueError, match=r"7.00 of 8.00 GiB.*asks for 7.20 GiB: lower"):
        worker.init_device()


def test_weights_and_steps_that_leave_nothing_are_told_apart() -> None:
    memory = MemoryReading(free=0, total=8 * GiB_bytes, reserved=5 * GiB_bytes, peak=0)
    assert memory.outside_torch == 3 * GiB_bytes
    assert kv_cache_bytes(4 * GiB_bytes, memory, 0) == GiB_bytes
    with pytest.raises(ValueError, match=r"may use 3.00 GiB.*3.00 GiB are taken outs"):
        kv_cache_bytes(3 * GiB_bytes, memory, 0)


def test_weights_that_are_shared_count_once() -> None:
    layer = torch.nn.Linear(4, 4, bias=False)
    twice = torch.nn.Sequential(layer, torch.nn.Linear(4, 4, bias=False))
    twice[1].weight = layer.weight
    assert device_bytes(twice) == 64


def test_an_engine_runs_through_the_gpus_worker(folder: Path) -> None:
    prompts = prompts_of([6, 30])
    with engine(folder) as llm:
        wanted = greedy(llm, prompts, 6)
    with engine(folder, worker_cls=WORKER, gpu_memory_utilization=0.5) as llm:
        assert greedy(llm, prompts, 6) == wanted
