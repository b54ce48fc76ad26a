"""These tests run on a GPU. Without one they are skipped, unless VLLM_GPU_TESTS_ON=cpu
asks for the host, where kernels are interpreted and emulated: to try the tests."""

import os
from collections.abc import Iterator

import pytest
import torch

from tests.kernels.cuda.conftest import emulation
from tests.kernels.cuda.native import toolkit_include
from tests.triton import interpreter
from vllm.v1.attention.ops import cuda_kernels

__all__ = ["emulation"]  # a fixture

DEVICE = torch.device(os.environ.get("VLLM_GPU_TESTS_ON", "cuda"))
NO_GPU = DEVICE.type == "cuda" and not torch.cuda.is_available()

if DEVICE.type == "cpu":
    interpreter.install()  # it rounds as a GPU does


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if NO_GPU:
        skip = pytest.mark.skip(reason="no GPU here; tests/gpu/run_on_device.sh")
        for item in items:
            if item.path.is_relative_to(os.path.dirname(__file__)):
                item.add_marker(skip)


@pytest.fixture
def device() -> torch.device:
    return DEVICE


@pytest.fixture
def cuda_library(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """The library that `setup.py` built, or its emulation on the host."""
    if DEVICE.type == "cpu":
        path = request.getfixturevalue("emulation")
        monkeypatch.setattr(cuda_kernels, "LIBRARY", type(cuda_kernels.LIBRARY)(path))
    cuda_kernels._load.cache_clear()
    reason = cuda_kernels.why_unavailable()
    if reason:
        nvcc = "nvcc is here" if toolkit_include() else "nvcc is not here"
        pytest.skip(f"{reason} ({nvcc})")
    yield
    cuda_kernels._load.cache_clear()
