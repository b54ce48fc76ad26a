"""Small C++ libraries for tests: the headers that GPU and CPU kernels share, compiled
for the host, beside NVIDIA's own conversions where their headers are installed."""

import ctypes
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SOURCES = Path(__file__).parent
_FLAGS = ("-std=c++17", "-O2", "-shared", "-fPIC", "-ffp-contract=off", "-Wall")


def compile_host(source: Path, folder: Path, *flags: str) -> ctypes.CDLL:
    """A library of one source that may include from the repository's root."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        pytest.skip("no C++ compiler: the shared headers cannot be compiled")
    library = folder / f"{source.stem}.so"
    command = [compiler, *_FLAGS, *flags, f"-I{ROOT}", "-o", str(library), str(source)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))


@cache
def toolkit_include() -> Path | None:
    """NVIDIA's headers: of $CUDA_HOME, /usr/local/cuda, or the nvcc on the path."""
    homes = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    if nvcc := shutil.which("nvcc"):
        homes.append(str(Path(nvcc).resolve().parents[1]))
    for home in filter(None, homes):
        include = Path(home) / "include"
        if (include / "cuda_fp4.h").exists():
            return include
    return None
