"""nvcc builds the library for every target; it loads without a GPU, and a launch then
says in words what is missing."""

import ctypes
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.kernels.cuda.native import ROOT
from vllm.v1.attention.ops import cuda_kernels
from vllm.v1.kv_formats import by_name

NVCC = shutil.which("nvcc")
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="nvcc is not installed")
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")


def setup_module_without_running_it(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr("setuptools.setup", lambda **_: None)
    spec = importlib.util.spec_from_file_location("vllm_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build(target: Path, targets: str) -> Path:
    """The command of setup.py, for some GPU targets."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CUDA_TARGETS", targets)
        command = setup_module_without_running_it(patch).cuda_command(target)
    subprocess.run([NVCC, *command], check=True, timeout=600)
    return target


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For one target: the one with the e2m1 instruction, which is inline PTX."""
    return build(tmp_path_factory.mktemp("cuda") / "_cuda_kernels.so", "100a")


@pytest.fixture
def loaded(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cuda_kernels, "LIBRARY", library)
    cuda_kernels._load.cache_clear()
    yield
    cuda_kernels._load.cache_clear()


@needs_nvcc
def test_the_library_loads_without_a_gpu(loaded: None) -> None:
    assert cuda_kernels.why_unavailable() == ""


@needs_nvcc
@no_gpu
def test_a_launch_without_a_driver_says_so_in_words(loaded: None) -> None:
    fmt = by_name("nvfp4")
    packing = fmt.packing(1, 64, 64)
    pages = torch.zeros(2, packing.head_slots, 16, packing.state_bytes).byte()
    rows, slots = torch.ones(3, 1, 64), torch.arange(3)
    words = "nvfp4_store did not start: CUDA driver version is insufficient.*install"
    with pytest.raises(RuntimeError, match=words):
        cuda_kernels.nvfp4_store(pages, slots, rows, rows, fmt)
    mover = cuda_kernels.BlockMover([pages])
    with pytest.raises(RuntimeError, match="zero_blocks did not start"):
        mover.zero(torch.tensor([1]))
    width = by_name("fp8_ds_mla").layout(576, 0).nbytes
    records = torch.zeros(2, 1, 16, width, dtype=torch.uint8)
    key = torch.ones(3, 1, 576)
    with pytest.raises(RuntimeError, match="ds_mla_store did not start"):
        cuda_kernels.ds_mla_store(records, slots, key[..., :512], key[..., 512:])


@needs_nvcc
@pytest.mark.slow
def test_every_target_builds_without_spills(tmp_path: Path) -> None:
    """8.0, 9.0a, 10.0a, 12.0a: registers do not overflow, and the instruction that
    makes two e2m1 codes is used where there is one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("VLLM_CUDA_TARGETS", raising=False)
        setup = setup_module_without_running_it(patch)
        command = setup.cuda_command(tmp_path / "all.so")
    said = subprocess.run(
        [NVCC, *command, "-Xptxas", "-v"],
        capture_output=True,
        text=True,
        check=True,
        timeout=900,
    ).stderr
    spills = [line for line in said.splitlines() if "spill stores" in line]
    targets = setup.CUDA_TARGETS.split()
    assert len(spills) % len(targets) == 0 and len(spills) >= 12 * len(targets)
    assert all("0 bytes spill stores, 0 bytes spill loads" in line for line in spills)
    ctypes.CDLL(str(tmp_path / "all.so"))


@needs_nvcc
@pytest.mark.parametrize(("target", "has_it"), [("90a", False), ("120a", True)])
def test_e2m1_is_rounded_by_hardware_where_there_is_an_instruction(
    tmp_path: Path, target: str, has_it: bool
) -> None:
    ptx = tmp_path / "kernels.ptx"
    flags = "-std=c++17", "--expt-relaxed-constexpr", "--fmad=false", "-ptx"
    gencode = f"-gencode=arch=compute_{target},code=compute_{target}"
    source = str(ROOT / "csrc" / "cuda" / "kernels.cu")
    subprocess.run([NVCC, *flags, gencode, "-o", str(ptx), source], check=True)
    text = ptx.read_text()
    assert ("cvt.rn.satfinite.e2m1x2.f32" in text) == has_it
    assert "cvt.rn.satfinite.e4m3x2.f32" in text
    assert "fma.rn" not in text  # products and sums round as on the host


@needs_nvcc
def test_a_library_of_other_sources_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "old.cpp"
    source.write_text('extern "C" long long vllm_cuda_abi() { return 1; }')
    target = tmp_path / "old.so"
    compiler = os.environ.get("CXX", "g++")
    command = [compiler, "-shared", "-fPIC", "-o", str(target), str(source)]
    subprocess.run(command, check=True)
    for path, words in (
        (target, "built from other sources"),
        (source, "does not load"),
        (tmp_path / "none.so", "was not built: run"),
    ):
        monkeypatch.setattr(cuda_kernels, "LIBRARY", path)
        cuda_kernels._load.cache_clear()
        assert words in cuda_kernels.why_unavailable()
    cuda_kernels._load.cache_clear()
