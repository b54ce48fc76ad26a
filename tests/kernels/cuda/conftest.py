"""The binding of the CUDA kernels over a library whose launchers run on the host."""

from collections.abc import Iterator

import pytest

from tests.kernels.cuda.native import SOURCES, compile_host
from vllm.v1.attention.ops import cuda_kernels


@pytest.fixture(scope="session")
def emulation(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("emulated")
    return compile_host(SOURCES / "emulated.cpp", folder)._name


@pytest.fixture
def emulated(emulation: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stores, copies and zeroing over host tensors, by the kernels' own functions."""
    monkeypatch.setattr(cuda_kernels, "LIBRARY", type(cuda_kernels.LIBRARY)(emulation))
    cuda_kernels._load.cache_clear()
    yield
    cuda_kernels._load.cache_clear()
