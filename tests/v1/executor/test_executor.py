"""One process serves a model; what is not there is refused by name."""

import re
import sys
from collections.abc import Callable

import pytest

from vllm.config import ParallelConfig, SchedulerConfig, VllmConfig
from vllm.utils.import_utils import find_setting
from vllm.v1.engine.core import scheduler_class
from vllm.v1.engine.core_client import SyncMPClient
from vllm.v1.engine.core_launch import CoreProcess
from vllm.v1.executor import Executor, UniProcExecutor
from vllm.v1.sample.logits_processor import load_custom_logitsprocs


def config(**parallel) -> VllmConfig:
    return VllmConfig(parallel_config=ParallelConfig(**parallel))


class Custom(UniProcExecutor):
    """Named by path or given as a class."""


class Worker:
    """Answers calls, and notes plans."""

    def __init__(self, vllm_config):
        self.calls = []

    def init_device(self):
        self.calls.append("init_device")

    def load_model(self):
        self.calls.append("load_model")

    def determine_available_memory(self):
        return 123

    def initialize_from_config(self, plan):
        self.calls.append(("plan", plan))

    def compile_or_warm_up_model(self):
        self.calls.append("warm_up")

    def add(self, a, b=0):
        return a + b

    def shutdown(self):
        self.calls.append("shutdown")


@pytest.mark.parametrize(
    ("backend", "want"),
    [
        (None, UniProcExecutor),
        ("uni", UniProcExecutor),
        (Custom, Custom),
        (f"{__name__}.Custom", Custom),
    ],
)
def test_backends_are_found(backend, want):
    found = Executor.get_class(config(distributed_executor_backend=backend))
    assert found.__qualname__ == want.__qualname__


@pytest.mark.parametrize("backend", ["mp", "ray", "nonsense"])
def test_absent_backends_are_refused_by_name(backend):
    with pytest.raises(ValueError, match=f"'{backend}' is not supported"):
        Executor.get_class(config(distributed_executor_backend=backend))


def test_classes_that_are_no_executors_are_refused():
    with pytest.raises(ValueError, match="expected a subclass"):
        Executor.get_class(config(distributed_executor_backend=f"{__name__}.Worker"))


LOADED_BY_PATH: dict[str, Callable[[str], object]] = {
    "distributed_executor_backend": lambda path: Executor.get_class(
        config(distributed_executor_backend=path)
    ),
    "worker_cls": lambda path: UniProcExecutor(config(worker_cls=path)),
    "scheduler_cls": lambda path: scheduler_class(
        VllmConfig(scheduler_config=SchedulerConfig(scheduler_cls=path))
    ),
    "logits processor": lambda path: load_custom_logitsprocs([path]),
}


@pytest.mark.parametrize("path", ["no_such_module.Name", "json.no_such_name", ".Name"])
@pytest.mark.parametrize("setting", LOADED_BY_PATH)
def test_paths_that_lead_nowhere_are_refused_by_setting_and_path(setting, path):
    wanted = re.escape(f"{setting} {path!r} cannot be loaded")
    with pytest.raises(ValueError, match=wanted):
        LOADED_BY_PATH[setting](path)


SETTINGS: dict[str, Callable[[str], VllmConfig]] = {
    "distributed_executor_backend": lambda path: config(
        distributed_executor_backend=path
    ),
    "worker_cls": lambda path: config(worker_cls=path),
    "scheduler_cls": lambda path: VllmConfig(
        scheduler_config=SchedulerConfig(scheduler_cls=path)
    ),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_no_process_is_started_for_a_path_that_leads_nowhere(setting, monkeypatch):
    def start(*_):
        raise AssertionError("a core is started")

    monkeypatch.setattr(CoreProcess, "start", start)
    for path in ("nosuch.Thing", "vllm.nosuch.Thing"):
        wanted = re.escape(f"{setting} {path!r} cannot be loaded: No module named")
        with pytest.raises(ValueError, match=wanted):
            SyncMPClient(SETTINGS[setting](path), None, False)


def test_a_worker_is_looked_for_and_not_loaded(monkeypatch):
    monkeypatch.delitem(sys.modules, "this", raising=False)
    find_setting("worker_cls", "this.Thing")
    assert "this" not in sys.modules


def test_classes_that_are_no_schedulers_are_refused():
    path = f"{__name__}.Worker"
    with pytest.raises(ValueError, match="expected a subclass"):
        LOADED_BY_PATH["scheduler_cls"](path)


def test_several_ranks_are_refused():
    with pytest.raises(ValueError, match="needs 4 workers"):
        Executor.get_class(config(tensor_parallel_size=2, pipeline_parallel_size=2))


def test_calls_reach_the_worker_in_order():
    executor = UniProcExecutor(config(worker_cls=f"{__name__}.Worker"))
    worker = executor.driver_worker
    assert executor.determine_available_memory() == [123]
    executor.initialize_from_config(["plan"])
    assert executor.collective_rpc("add", args=(1,), kwargs={"b": 2}) == [3]
    assert executor.collective_rpc(lambda w, x: (w is worker, x), args=(5,)) == [
        (True, 5)
    ]
    with pytest.raises(AttributeError, match="no method 'nothing'"):
        executor.collective_rpc("nothing")
    executor.shutdown()
    executor.shutdown()
    assert worker.calls == [
        "init_device",
        "load_model",
        ("plan", "plan"),
        "warm_up",
        "shutdown",
    ]
    with pytest.raises(RuntimeError, match="shut down"):
        executor.check_health()


def test_a_platform_without_a_worker_is_refused():
    with pytest.raises(ValueError, match="worker_cls"):
        UniProcExecutor(config())
