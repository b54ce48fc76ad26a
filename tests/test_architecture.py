"""The laws of docs/architecture.md hold, and breaking any of them is noticed."""

import ast
import subprocess
import sys

import pytest

from tests.architecture import LAWS, sources
from vllm.v1.kv_formats import all_formats

# A file that outgrows this has become a corridor that everything passes through.
MAX_FILE_LINES = 500

# A source that breaks each law, with the path it pretends to have.
MUTATIONS = {
    "record sizes are written once": (
        "vllm/v1/attention/backends/cpu_attn.py",
        "STATE = 656\n",
    ),
    "cache dtypes are parsed once": (
        "vllm/v1/worker/cpu_worker.py",
        "def f(cache_dtype):\n    return cache_dtype == 'fp8_e5m2'\n",
    ),
    "spec classes are asked in three places": (
        "vllm/v1/worker/gpu_model_runner.py",
        "def f(spec):\n    return isinstance(spec, SlidingWindowSpec)\n",
    ),
    "imports point down": (
        "vllm/v1/kv_formats/fp8.py",
        "from vllm.v1.core.block_pool import BlockPool\n",
    ),
    "imports stand at module level": (
        "vllm/v1/request.py",
        "def f():\n    import torch\n    return torch\n",
    ),
    "the hook has one caller": (
        "vllm/platforms/cpu.py",
        "def f(backend, spec):\n    return backend.customize_spec(spec)\n",
    ),
    "connectors do not know formats": (
        "vllm/distributed/kv_transfer/kv_connector/v1/base.py",
        "def f(spec):\n    return spec.is_mla\n",
    ),
}


@pytest.mark.parametrize("law", LAWS)
def test_every_module_obeys(law: str) -> None:
    violations = [v for path, source in sources() for v in LAWS[law](path, source)]
    assert not violations, "\n".join(violations)


@pytest.mark.parametrize("law", LAWS)
def test_a_mutation_is_noticed(law: str) -> None:
    path, source = MUTATIONS[law]
    assert LAWS[law](path, source)


@pytest.mark.parametrize(
    "source",
    [
        "def f(d):\n    return d.startswith('fp8')\n",
        "def f(c):\n    return c.cache_dtype in ('auto', 'fp8')\n",
        "def f(c):\n    return c.kv_cache_dtype != 'auto'\n",
        "def f(d):\n    return d.endswith('per_token_head')\n",
    ],
)
def test_each_way_to_parse_a_cache_dtype_is_noticed(source: str) -> None:
    assert LAWS["cache dtypes are parsed once"]("vllm/v1/worker/utils.py", source)


def test_every_format_has_a_reference() -> None:
    for fmt in all_formats():
        for name in ("encode", "decode"):
            assert callable(getattr(fmt, name)), f"{fmt.name} has no {name}"


@pytest.mark.parametrize(
    "module", ["vllm", "vllm.entrypoints.cli.main", "vllm.v1.kv_formats.mode"]
)
def test_names_are_known_without_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_sizes_are_seen(capsys: pytest.CaptureFixture[str]) -> None:
    files, functions = [], []
    for path, source in sources():
        files.append((source.count("\n"), path))
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                functions.append((lines, f"{path}:{node.name}"))
    total = sum(lines for lines, _ in files)
    with capsys.disabled():
        print(f"\npackage: {total} lines in {len(files)} files")
        for lines, name in sorted(files, reverse=True)[:5]:
            print(f"  file     {lines:5} {name}")
        for lines, name in sorted(functions, reverse=True)[:5]:
            print(f"  function {lines:5} {name}")
    assert max(files)[0] <= MAX_FILE_LINES


def test_python_m_names_one_format() -> None:
    command = [
        sys.executable,
        "-m",
        "vllm.v1.kv_formats",
        "turboquant_4bit_nc",
        "--head-size",
        "128",
        "--kv-heads",
        "8",
    ]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "1,072" in done.stdout
