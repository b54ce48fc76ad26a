"""Captured decode steps give the tokens of eager ones, from buffers that keep their
place, whatever padding they hold."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen2Config

from tests.e2e.tiny import SIZES, engine, greedy, prompts_of, save_tiny, vocabulary
from tests.v1.worker.graph_worker import CapturedBackend, CapturedBuilder, HostDevice
from vllm.model_executor.layers.attention.chunked_local_attention import in_chunks
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.ops import cpu_kernels
from vllm.v1.worker.decode_graphs import graph_sizes
from vllm.v1.worker.device import RunnerDevice

WORKER = "tests.v1.worker.graph_worker.GraphWorker"
LENGTHS = [7, 40, 90, 23, 3]

needs_kernels = pytest.mark.skipif(
    not cpu_kernels.available(), reason="the C++ kernels are not built"
)


@pytest.fixture(autouse=True)
def backend() -> Iterator[None]:
    custom = AttentionBackendEnum.CUSTOM
    path = f"{CapturedBackend.__module__}.{CapturedBackend.__qualname__}"
    register_backend(custom, path)
    CapturedBuilder.replans.clear()
    yield
    custom.clear_override()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers that see everything, two with a window of 20 tokens."""
    folder = tmp_path_factory.mktemp("qwen2")
    sizes = SIZES | {"vocab_size": vocabulary()}
    window = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2}
    save_tiny(Qwen2Config(**sizes, **window), folder)
    return folder


def runner_of(llm: Any) -> Any:
    core = llm.llm_engine.engine_core.engine_core
    return core.model_executor.driver_worker.model_runner


SETTINGS = {"worker_cls": WORKER, "attention_backend": "CUSTOM", "max_num_seqs": 6}


@needs_kernels
@pytest.mark.parametrize("dtype", ["auto", "fp8", "int8_per_token_head"])
def test_replayed_tokens_are_the_eager_ones(folder: Path, dtype: str) -> None:
    prompts = prompts_of(LENGTHS)
    how = {"kv_cache_dtype": dtype}
    with engine(folder, **how) as llm:
        wanted = greedy(llm, prompts, 12)
    with engine(folder, **how, **SETTINGS) as llm:
        graphs = runner_of(llm).graphs
        assert sorted(graphs._graphs) == [1, 2, 4, 6]
        found = greedy(llm, prompts, 12)
        alone = greedy(llm, prompts[:1], 5)
        replays = {size: g.replays for size, g in graphs._graphs.items()}
    assert found == wanted
    assert alone[0] == wanted[0][:5]
    assert replays[6] >= 9 and replays[1] >= 3  # five requests pad to six rows


@needs_kernels
def test_padding_rows_write_nothing_and_see_one_key(folder: Path) -> None:
    """Every captured batch is planned with the true lengths and ones for padding."""
    with engine(folder, **SETTINGS) as llm:
        caches = [c for c in runner_of(llm).kv_caches.values()]
        greedy(llm, prompts_of([5, 9, 12]), 4)
        # Block 0 is nobody's: padding reads it, and never writes.
        assert all(not bool(cache[0].any()) for cache in caches)
    assert [6, 10, 13, 1] in CapturedBuilder.replans


@needs_kernels
def test_prompts_and_mixed_steps_stay_eager(folder: Path) -> None:
    with engine(folder, **SETTINGS) as llm:
        graphs = runner_of(llm).graphs
        greedy(llm, prompts_of([30]), 1)
        assert all(graph.replays == 0 for graph in graphs._graphs.values())


@needs_kernels
@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"enforce_eager": True}, "enforce_eager is set"),
        ({"attention_backend": "CPU_ATTN"}, "CPU_ATTN cannot be captured"),
    ],
)
def test_why_steps_stay_eager_is_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch, settings: Any, reason: str
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(
        "vllm.v1.worker.gpu_model_runner.logger.info",
        lambda message, *args: lines.append(message % args),
    )
    with engine(folder, **{**SETTINGS, **settings}) as llm:
        assert runner_of(llm).graphs is None
    assert any("are not captured" in line and reason in line for line in lines)


@needs_kernels
def test_a_model_that_cannot_be_captured_runs_eagerly_and_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: HostDevice, run: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    lines: list[str] = []
    monkeypatch.setattr(HostDevice, "capture", fail)
    monkeypatch.setattr(
        "vllm.v1.worker.decode_graphs.logger.warning",
        lambda message, *args: lines.append(message % args),
    )
    with engine(folder, **SETTINGS) as llm:
        assert runner_of(llm).graphs is None
        assert len(greedy(llm, prompts_of([5]), 3)[0]) == 3
    (line,) = lines
    assert "cannot be captured: operation not permitted" in line
    assert "more" not in line and "--enforce-eager" in line


def test_the_host_captures_nothing_by_itself() -> None:
    class Plain(RunnerDevice):
        def memory(self) -> Any:
            return None

        def forget_peak(self) -> None:
            return None

        def synchronize(self) -> None:
            return None

    device = Plain(torch.device("cpu"))
    assert not device.captures_graphs
    with pytest.raises(NotImplementedError, match="captures no graphs"):
        device.capture(lambda: torch.zeros(1))


@pytest.mark.parametrize(
    ("most", "asked", "sizes"),
    [
        (1, None, [1]),
        (6, None, [1, 2, 4, 6]),
        (20, None, [1, 2, 4, 8, 16, 20]),
        (9, [4, 32, 1], [1, 4]),
        (9, [], []),
    ],
)
def test_sizes_reach_the_largest_step(
    most: int, asked: list[int] | None, sizes: list[int]
) -> None:
    assert graph_sizes(most, asked) == sizes


def test_hundreds_of_requests_have_few_sizes() -> None:
    sizes = graph_sizes(1024)
    assert sizes[-1] == 512 and len(sizes) < 70
    with pytest.raises(ValueError, match="sizes from 1 on"):
        graph_sizes(4, [0])


def test_chunked_layers_are_never_captured() -> None:
    builder = in_chunks(CapturedBackend, 64).get_builder_cls()
    support = builder.get_cudagraph_support(SimpleNamespace(), SimpleNamespace())
    assert support is AttentionCGSupport.NEVER
