"""Every hook of the interface is called by a real engine, with what it promises."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

import pytest

from tests.kv_transfer.engines import engine, generate, random_prompts
from tests.kv_transfer.test_factory import Hybrid
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorRole,
)
from vllm.testing.kv_connector.models import ModelFolders


@dataclass
class Address(KVConnectorHandshakeMetadata):
    text: str


class Noting(Hybrid):
    """Notes which side was called for what, and computes nothing."""

    calls: ClassVar[list[tuple[str, str]]] = []
    handshakes: ClassVar[list[Any]] = []

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if callable(found) and not name.startswith("__") and name != "note":
            side = "scheduler" if self._role is KVConnectorRole.SCHEDULER else "worker"
            Noting.calls.append((side, name))
        return found

    @contextmanager
    def _pool(self) -> Iterator[None]:
        Noting.calls.append(("worker", "pool opened"))
        yield
        Noting.calls.append(("worker", "pool closed"))

    def get_mem_pool_context(self) -> Any:
        return self._pool()

    def get_handshake_metadata(self) -> Address:
        return Address("worker 0")

    def set_xfer_handshake_metadata(self, metadata: Any) -> None:
        Noting.handshakes.append(metadata)


@pytest.fixture
def noting(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    made = ModuleType("noting_connector")
    made.Noting = Noting  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, made.__name__, made)
    Noting.calls.clear()
    Noting.handshakes.clear()
    return {
        "kv_connector": "Noting",
        "kv_connector_module_path": made.__name__,
        "kv_role": "kv_both",
    }


def multi(child: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [child]},
    }


@pytest.mark.parametrize("inside", [False, True], ids=["alone", "as a child"])
def test_an_engine_calls_every_hook_in_its_order(
    folders: ModelFolders, noting: dict[str, Any], inside: bool
) -> None:
    with engine(folders["full"], multi(noting) if inside else noting) as llm:
        started = [name for side, name in Noting.calls if side == "worker"]
        order = ["pool opened", "pool closed", "register_kv_caches"]
        assert [name for name in started if name in order] == order
        assert Noting.handshakes == [{0: Address("worker 0")}]
        scheduler = [name for side, name in Noting.calls if side == "scheduler"]
        assert {"bind_kv_cache_manager", "bind_gpu_block_pool"} <= set(scheduler)
        Noting.calls.clear()
        generate(llm, random_prompts([20]), 1)
        step = [name for side, name in Noting.calls if side == "worker"]
        order = [
            "bind_connector_metadata",
            "start_load_kv",
            "wait_for_layer_load",
            "save_kv_layer",
            "finish_forward",
            "wait_for_save",
            "get_transfer_results",
            "get_finished",
            "get_block_ids_with_load_errors",
            "get_kv_connector_stats",
            "get_kv_connector_kv_cache_events",
            "build_connector_worker_meta",
            "clear_connector_metadata",
        ]
        first = {name: step.index(name) for name in order}
        assert list(first) == sorted(first, key=first.get)  # type: ignore[arg-type]
        scheduler = [name for side, name in Noting.calls if side == "scheduler"]
        order = [
            "on_new_request",
            "get_num_new_matched_tokens",
            "update_state_after_alloc",
            "build_connector_meta",
            "update_connector_output",
            "request_finished_all_groups",
            "take_events",
        ]
        first = {name: scheduler.index(name) for name in order}
        assert set(first) == set(order)
        assert list(first)[:4] == sorted(order[:4], key=first.get)  # type: ignore[arg-type]
        Noting.calls.clear()
    assert ("worker", "shutdown") in Noting.calls
    assert ("scheduler", "shutdown") in Noting.calls
