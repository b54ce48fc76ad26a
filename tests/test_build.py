"""The package builds with and without a C++ compiler.

A fake compiler stands in for g++, so that these tests take no minute.
"""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from vllm.v1.attention.ops import cpu_kernels
from vllm.version import __version__

ROOT = Path(__file__).parents[1]
BUILT = ("setup.py", "pyproject.toml", "README.md", "LICENSE")

# Writes its arguments to a log and, as its output, one line.
FAKE_COMPILER = """#!{python}
import os, sys
with open(os.environ["FAKE_LOG"], "a") as log:
    print(*sys.argv[1:], file=log)
with open(sys.argv[sys.argv.index("-o") + 1], "w") as output:
    print("compiled", file=output)
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a build reads, without compiled files."""
    tree = tmp_path_factory.mktemp("tree")
    for name in BUILT:
        shutil.copy(ROOT / name, tree)
    ignored = shutil.ignore_patterns("*.so", "__pycache__", "*.new")
    for folder in ("vllm", "csrc", "requirements"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=ignored)
    return tree


@pytest.fixture
def compiler(tmp_path: Path) -> Path:
    path = tmp_path / "fake-g++"
    path.write_text(FAKE_COMPILER.format(python=sys.executable))
    path.chmod(0o755)
    return path


def build(tree: Path, compiler: str, *arguments: str, **variables: str) -> str:
    environment = {**os.environ, "CXX": compiler, "FAKE_LOG": str(tree / "log")}
    environment.pop("VLLM_TARGET_DEVICE", None)
    environment |= variables
    result = subprocess.run(
        [sys.executable, "setup.py", *arguments],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize("compiler_name", ["no-such-compiler", "false"])
def test_without_a_working_compiler_the_build_succeeds_and_says_so(
    tree: Path, tmp_path: Path, compiler_name: str
) -> None:
    output = build(tree, compiler_name, "build_ext", "--build-lib", str(tmp_path))
    said = [line for line in output.splitlines() if "without C++ kernels" in line]
    assert len(said) == 1
    assert not list(tmp_path.rglob("*.so"))


def test_every_unit_is_compiled_once_per_instruction_set(
    tree: Path, tmp_path: Path, compiler: Path
) -> None:
    log = tree / "log"
    log.unlink(missing_ok=True)
    build(tree, str(compiler), "build_ext", "--build-lib", str(tmp_path))
    compiled = [line for line in log.read_text().splitlines() if " -c " in line]
    sources = [re.search(r"csrc/cpu/(\w+\.cpp)", line).group(1) for line in compiled]
    assert set(sources) == {p.name for p in (ROOT / "csrc" / "cpu").glob("*.cpp")}
    flags = [line for line in compiled if "attention_dense.cpp" in line]
    assert len(flags) == len(set(flags)) == sources.count("table.cpp")
    assert all("-fopenmp" in line and "torch" not in line for line in compiled)
    assert (tmp_path / "vllm" / "_cpu_kernels.so").read_text() == "compiled\n"


def test_nvcc_runs_only_where_cuda_is_asked_for(
    tree: Path, tmp_path: Path, compiler: Path
) -> None:
    log = tree / "log"
    log.unlink(missing_ok=True)
    arguments = "build_ext", "--build-lib", str(tmp_path)
    build(tree, "false", *arguments, NVCC=str(compiler))
    assert not log.exists() and not list(tmp_path.rglob("*.so"))
    cuda = {"VLLM_TARGET_DEVICE": "cuda", "NVCC": str(compiler)}
    build(tree, "false", *arguments, **cuda)
    (line,) = log.read_text().splitlines()
    assert re.findall(r"code=(\w+)", line) == [
        *("sm_80", "sm_90a", "sm_100a", "sm_120a"),
        "compute_90",
    ]
    assert "-cudart static" in line and line.endswith("csrc/cuda/kernels.cu")
    assert (tmp_path / "vllm" / "_cuda_kernels.so").read_text() == "compiled\n"


def test_without_nvcc_a_build_for_cuda_succeeds_and_says_so(
    tree: Path, tmp_path: Path
) -> None:
    arguments = "build_ext", "--build-lib", str(tmp_path)
    cuda = {"VLLM_TARGET_DEVICE": "cuda", "NVCC": "no-such-nvcc"}
    output = build(tree, "false", *arguments, **cuda)
    assert output.count("vllm is built without CUDA kernels") == 1


def test_the_wheel_is_of_one_platform_and_carries_the_library(
    tree: Path, tmp_path: Path, compiler: Path
) -> None:
    build(tree, str(compiler), "bdist_wheel", "--dist-dir", str(tmp_path))
    (wheel,) = tmp_path.glob("*.whl")
    assert re.fullmatch(
        rf"vllm-{re.escape(__version__)}-py3-none-(?!any).*\.whl", wheel.name
    )
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (n for n in names if n.endswith("dist-info/METADATA"))
        (scripts,) = (n for n in names if n.endswith("entry_points.txt"))
        text = archive.read(metadata).decode()
        assert b"vllm = vllm.entrypoints.cli.main:main" in archive.read(scripts)
    assert "vllm/_cpu_kernels.so" in names
    assert not [n for n in names if n.split("/")[0] in ("tests", "csrc", "build")]
    for requirement in ("numpy", "transformers", "torch"):
        assert re.search(rf"^Requires-Dist: {requirement}\b", text, re.M)
    assert set(re.findall(r"^Provides-Extra: (.+)$", text, re.M)) == {
        "demo",
        "demo-gemma",
        "nixl",
        "test",
    }


def test_the_source_archive_holds_what_a_build_reads(
    tree: Path, tmp_path: Path
) -> None:
    build(tree, "false", "sdist", "--formats", "zip", "--dist-dir", str(tmp_path))
    (archive,) = tmp_path.glob("*.zip")
    names = {n.split("/", 1)[1] for n in zipfile.ZipFile(archive).namelist()}
    wanted = {*BUILT, "requirements/common.txt", "requirements/test.txt"}
    wanted |= {
        str(p.relative_to(ROOT))
        for p in (ROOT / "csrc" / "cpu").iterdir()
        if p.suffix in (".h", ".cpp")
    }
    wanted |= {
        str(p.relative_to(ROOT))
        for folder in ("common", "cuda")
        for p in (ROOT / "csrc" / folder).iterdir()
    }
    wanted.add("csrc/kv_formats.h")
    assert wanted <= names


def test_a_missing_library_is_a_reason_and_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_kernels, "LIBRARY", tmp_path / "_cpu_kernels.so")
    cpu_kernels._load.cache_clear()
    cpu_kernels.available.cache_clear()
    try:
        assert not cpu_kernels.available()
        assert "build_ext --inplace" in cpu_kernels.why_unavailable()
        assert cpu_kernels.isa() == ""
        with pytest.raises(RuntimeError, match="not available"):
            cpu_kernels.choose_isa(None)
        (tmp_path / "_cpu_kernels.so").write_text("no library")
        cpu_kernels._load.cache_clear()
        assert "does not load" in cpu_kernels.why_unavailable()
    finally:
        monkeypatch.undo()
        cpu_kernels._load.cache_clear()
        cpu_kernels.available.cache_clear()
