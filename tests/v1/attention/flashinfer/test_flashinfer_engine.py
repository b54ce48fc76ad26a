"""Whole engines on FLASHINFER through the stand-in: planned, and planned again for
captured steps, over pages that Triton's or the CUDA kernels would write."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from transformers import Qwen2Config

from tests.e2e.tiny import SIZES, engine, greedy, prompts_of, save_tiny, vocabulary
from tests.v1.attention.flashinfer.stand_in import StandIn
from tests.v1.attention.flashinfer.test_flashinfer_backend import (
    BLACKWELL,
    HOPPER,
    Platform,
    by_the_format,
)
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends import flashinfer, flashinfer_impl
from vllm.v1.attention.backends.flashinfer import FlashInferBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.ops import flashinfer_calls

GRAPHS = "tests.v1.worker.graph_worker.GraphWorker"
LENGTHS = [7, 40, 90]


class HostFlashInfer(FlashInferBackend):
    """On the host, in float32 too."""

    supported_devices = ("cpu",)
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.float16]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @classmethod
    def unavailable_reason(cls) -> str | None:
        return None


@pytest.fixture
def stand_in(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[StandIn]:
    """On a device of the capability that the test asks for."""
    platform, package = Platform(), StandIn()
    platform.capability = request.node.callspec.params["capability"]
    for module in (flashinfer, flashinfer_impl):
        monkeypatch.setattr(module, "current_platform", platform)
    monkeypatch.setattr(flashinfer_impl, "_store_of", lambda fmt: by_the_format)
    monkeypatch.setattr(flashinfer_impl, "_WORKSPACE_BYTES", 1 << 20)
    monkeypatch.setattr(flashinfer_calls, "resolve", package)
    flashinfer_impl.workspace_of.cache_clear()
    path = f"{HostFlashInfer.__module__}.{HostFlashInfer.__qualname__}"
    register_backend(AttentionBackendEnum.CUSTOM, path)
    yield package
    AttentionBackendEnum.CUSTOM.clear_override()
    flashinfer_impl.workspace_of.cache_clear()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of 64 elements; two of four layers have a window of 20 tokens."""
    folder = tmp_path_factory.mktemp("qwen2")
    sizes = SIZES | {"hidden_size": 256, "vocab_size": vocabulary()}
    window = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2}
    save_tiny(Qwen2Config(**sizes, **window), folder)
    return folder


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("name", ["auto", "nvfp4", "fp8_per_token_head"])
@pytest.mark.parametrize("capability", [HOPPER], ids=["fa2"])
def test_tokens_are_the_references(
    stand_in: StandIn,
    folder: Path,
    capability: DeviceCapability,
    name: str,
    graphs: bool,
) -> None:
    how: dict[str, Any] = {"kv_cache_dtype": name, "max_num_seqs": 4}
    with engine(folder, attention_backend="REFERENCE", **how) as llm:
        wanted = greedy(llm, prompts_of(LENGTHS), 6)
    if graphs:
        how["worker_cls"] = GRAPHS
    with engine(folder, attention_backend="CUSTOM", **how) as llm:
        core: Any = llm.llm_engine.engine_core.engine_core
        formats = set(core.kv_cache_config.layer_formats.values())
        found = greedy(llm, prompts_of(LENGTHS), 6)
    assert found == wanted
    if name == "nvfp4":
        assert formats == {"nvfp4:linear"}
    # Each captured size has wrappers of its own, one for each group of layers.
    assert stand_in.calls[flashinfer_calls.DECODE] == (2 + 2 * 3 if graphs else 2)


@pytest.mark.parametrize("name", ["auto", "fp8", "nvfp4"])
@pytest.mark.parametrize("capability", [BLACKWELL], ids=["trtllm-gen"])
def test_kernels_without_a_plan_take_what_an_engine_gives(
    stand_in: StandIn, folder: Path, capability: DeviceCapability, name: str
) -> None:
    """Types, tables and scales are checked by the stand-in; prompts and decodes share
    steps, and decodes are captured."""
    how = {"dtype": "float16", "kv_cache_dtype": name, "max_num_seqs": 4}
    how |= {"worker_cls": GRAPHS, "max_num_batched_tokens": 32}
    with engine(folder, attention_backend="CUSTOM", **how) as llm:
        tokens = greedy(llm, prompts_of(LENGTHS), 6)
    assert [len(t) for t in tokens] == [6, 6, 6]
    assert stand_in.calls[flashinfer_calls.TRTLLM_DECODE] > 0
    assert stand_in.calls[flashinfer_calls.TRTLLM_PREFILL] > 0
    assert flashinfer_calls.DECODE not in stand_in.calls
