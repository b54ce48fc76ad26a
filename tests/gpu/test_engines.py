"""On a GPU whole engines give the logits of the REFERENCE backend over the same format,
by captured graphs as by eager steps."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config

from tests.e2e.teacher_forcing import ForcedRun, forced_run
from tests.e2e.tiny import SIZES, engine, greedy, prompts_of, save_tiny, vocabulary
from tests.gpu.conftest import DEVICE
from tests.triton import host_backend
from vllm.utils.import_utils import has_module
from vllm.v1.kv_formats import all_formats, by_name

NAMES = [fmt.name for fmt in all_formats() if not fmt.latent and not fmt.alias_of]
ON_GPU = DEVICE.type == "cuda"
PROMPT = prompts_of([60])[0]
# Rounding alone. Where a format has few bits, rounding decides the code of a value
# between two of them, and one code moves what all later layers store: then two backends
# may be as far apart as half of what the format itself does to the logits.
MAX_KL = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers of heads of 64 elements, two of them with a window."""
    folder = tmp_path_factory.mktemp("qwen2")
    sizes = SIZES | {"hidden_size": 256, "vocab_size": vocabulary()}
    sizes["initializer_range"] = 0.05  # in 16 bits larger weights amplify rounding
    window = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2}
    save_tiny(Qwen2Config(**sizes, **window), folder)
    return folder


@pytest.fixture
def triton(request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of the backend that serves the test's format with Triton's kernels."""
    mode = by_name(request.node.callspec.params["name"]).mode
    if ON_GPU:
        yield "TURBOQUANT" if mode.is_turboquant else "TRITON_ATTN"
        return
    turboquant = host_backend.HostTurboQuant
    backend = turboquant if mode.is_turboquant else host_backend.HostTriton
    with host_backend.registered(backend) as name:
        yield name


def logits_of(folder: Path, token_ids: list[int], **settings: Any) -> ForcedRun:
    dtype = "float16" if ON_GPU else "float32"
    with engine(folder, dtype=dtype, max_num_seqs=4, **settings) as llm:
        return forced_run(llm, token_ids, len(token_ids) - 12, whole_prompt=False)


def mean_kl(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    ours, theirs = (x.float().cpu().log_softmax(-1) for x in (ours, theirs))
    return float((theirs.exp() * (theirs - ours)).sum(-1).mean())


@pytest.fixture(scope="module")
def dense(folder: Path) -> torch.Tensor:
    """The reference's logits over pages of the model's own type."""
    return logits_of(folder, PROMPT, attention_backend="REFERENCE").logits


def check(folder: Path, dense: torch.Tensor, backend: str, name: str) -> None:
    settings = {"kv_cache_dtype": name, "kv_cache_dtype_skip_layers": ["none"]}
    wanted = logits_of(folder, PROMPT, attention_backend="REFERENCE", **settings).logits
    found = logits_of(folder, PROMPT, attention_backend=backend, **settings).logits
    apart, lost = mean_kl(found, wanted), mean_kl(wanted, dense)
    print(f"\n{name} on {backend}: KL {apart:.1e}; the format's own {lost:.1e}")
    assert apart < MAX_KL + lost / 2


@pytest.mark.parametrize("name", NAMES)
def test_triton_equals_the_reference(
    folder: Path, dense: torch.Tensor, triton: str, name: str
) -> None:
    supported = host_backend.HostTriton.supported_kv_cache_dtypes
    if name not in supported and not by_name(name).mode.is_turboquant:
        pytest.skip(f"no Triton backend serves {name}")
    check(folder, dense, triton, name)


@pytest.mark.skipif(not has_module("flashinfer"), reason="flashinfer is not installed")
@pytest.mark.skipif(not ON_GPU, reason="flashinfer runs on a GPU")
@pytest.mark.parametrize("name", ["auto", "fp8", "nvfp4", "fp8_per_token_head"])
def test_flashinfer_equals_the_reference(
    folder: Path, dense: torch.Tensor, name: str
) -> None:
    check(folder, dense, "FLASHINFER", name)


@pytest.mark.parametrize("name", ["auto", "int8_per_token_head"])
def test_captured_steps_equal_eager_ones(folder: Path, triton: str, name: str) -> None:
    prompts = prompts_of([7, 40, 90, 23, 3])
    how = {
        "dtype": "float32",
        "kv_cache_dtype": name,
        "attention_backend": triton,
        "max_num_seqs": 6,
    }
    tokens = 16 if ON_GPU else 2
    with engine(folder, enforce_eager=True, **how) as llm:
        wanted = greedy(llm, prompts, tokens)
    with engine(folder, **how) as llm:
        core: Any = llm.llm_engine.engine_core.engine_core
        assert (core.model_executor.driver_worker.model_runner.graphs is None) != ON_GPU
        found = greedy(llm, prompts, tokens)
    same = sum(
        a == b
        for ours, theirs in zip(found, wanted, strict=True)
        for a, b in zip(ours, theirs, strict=True)
    )
    assert same >= 0.9 * tokens * len(prompts)


def test_the_device_is_chosen_by_itself(folder: Path) -> None:
    with engine(folder) as llm:
        core: Any = llm.llm_engine.engine_core.engine_core
        worker = core.model_executor.driver_worker
        assert worker.device.type == DEVICE.type
        assert type(worker).__name__ == ("GPUWorker" if ON_GPU else "CPUWorker")
        caches = worker.model_runner.kv_caches.values()
        assert {cache.device.type for cache in caches} == {DEVICE.type}
