"""Names, module paths and refusals of connectors, and the defaults of the interface."""

import sys
from contextlib import suppress
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.v1.core.utils import full, make_kv_cache_config, make_vllm_config, window
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector import factory
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import settings
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
    supports_hma,
)
from vllm.distributed.kv_transfer.kv_connector.v1.settings import SETTINGS

ABSTRACT = {
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
}


class Plain(KVConnectorBase_V1):
    """The seven methods, and nothing else."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        return

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        return

    def wait_for_save(self) -> None:
        return

    def get_num_new_matched_tokens(self, request: Any, n: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, n: int) -> None:
        return

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()


class OfOldTimes(Plain):
    def __init__(self, vllm_config: Any, role: Any) -> None:
        super().__init__(vllm_config, role, None)


class Hybrid(Plain, SupportsHMA):
    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        return False, None


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> str:
    made = ModuleType("third_party_connectors")
    for cls in (Plain, OfOldTimes, Hybrid):
        setattr(made, cls.__name__, cls)
    made.ExampleConnector = Plain  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made.__name__


def config_of(name: str, module: str | None = None, **more: Any) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector=name, kv_role="kv_both", kv_connector_module_path=module, **more
    )


def engine_config(transfer: KVTransferConfig | None, **scheduler: Any) -> Any:
    config = make_vllm_config()
    config.kv_transfer_config = transfer
    for name, value in scheduler.items():
        setattr(config.scheduler_config, name, value)
    return config


@pytest.mark.parametrize(
    "given",
    [
        {"kv_role": "kv_both"},
        {"kv_connector_module_path": "some.module"},
        {"kv_connector_extra_config": {"shared_storage_path": "/tmp"}},
    ],
    ids=lambda given: next(iter(given)),
)
def test_settings_of_a_connector_need_one(given: dict[str, Any]) -> None:
    (name,) = given
    with pytest.raises(ValueError, match=f"^{name} .* needs kv_connector: name"):
        KVTransferConfig(**given)


ONE_GROUP = make_kv_cache_config(8, full())
TWO_GROUPS = make_kv_cache_config(8, full(), window(6))


def test_seven_methods_are_abstract_and_the_rest_has_defaults(module: str) -> None:
    assert KVConnectorBase_V1.__abstractmethods__ == ABSTRACT
    config = engine_config(config_of("Plain", module))
    worker = KVConnectorFactory.create_connector(
        config, KVConnectorRole.WORKER, ONE_GROUP
    )
    assert worker.role is KVConnectorRole.WORKER
    assert worker.requires_kv_delivery and not worker.has_connector_metadata()
    worker.register_kv_caches({})
    worker.register_cross_layers_kv_cache(torch.empty(0), object)
    assert not worker.prefer_cross_layer_blocks
    worker.set_host_xfer_buffer_ops(lambda *_: None)
    worker.handle_preemptions(KVConnectorMetadata())
    assert worker.get_finished(set()) == (None, None)
    assert worker.get_transfer_results(set()).finished_sending == set()
    assert worker.get_block_ids_with_load_errors() == set()
    assert worker.request_finished(None, []) == (False, None)
    assert list(worker.take_events()) == [] and worker.reset_cache() is None
    assert not worker.has_pending_push_work() and not worker.has_pending_block_frees()
    for nothing in (
        worker.get_kv_connector_stats(),
        worker.get_kv_connector_kv_cache_events(),
        worker.get_handshake_metadata(),
        worker.build_connector_worker_meta(),
        worker.get_finished_count(),
        worker.get_loaded_kv_cache_group_ids(None),
        worker.get_external_cache_hit_sources(None, 1),
        Plain.get_required_kvcache_layout(config),
        Plain.build_kv_connector_stats({}),
        Plain.build_prom_metrics(config, {}, [], {}),
    ):
        assert nothing is None
    with worker.get_mem_pool_context():
        worker.finish_forward()
        worker.reset_capture_state()
    meta = KVConnectorMetadata()
    worker.bind_connector_metadata(meta)
    assert worker._get_connector_metadata() is meta
    worker.clear_connector_metadata()
    with pytest.raises(RuntimeError, match="no step"):
        worker._get_connector_metadata()
    worker.shutdown()


def test_the_interface_itself_wants_no_layout() -> None:
    with pytest.raises(TypeError):
        KVConnectorBase_V1.get_required_kvcache_layout(engine_config(None))
    with pytest.raises(ValueError, match="kv_transfer_config"):
        Plain(engine_config(None), KVConnectorRole.WORKER, ONE_GROUP)


def test_a_module_path_wins_over_the_registry(module: str) -> None:
    found = KVConnectorFactory.get_connector_class
    assert found(config_of("ExampleConnector", module)) is Plain
    assert found(config_of("ExampleConnector")) is not Plain
    with pytest.raises(ValueError, match="kv_connector_module_path is empty"):
        found(config_of("Plain", ""))
    with pytest.raises(AttributeError):
        found(config_of("Missing", module))
    with pytest.raises(ImportError):
        found(config_of("Plain", "no_such_module_of_connectors"))
    with pytest.raises(ValueError, match="kv_cache_config"):
        found(config_of("OfOldTimes", module))


@pytest.mark.parametrize(
    ("name", "path"), [("Missing", ""), ("Plain", "no_such_module_of_connectors")]
)
@pytest.mark.parametrize("is_child", [False, True])
def test_a_path_that_leads_nowhere_is_a_value_error_that_names_it(
    module: str, name: str, path: str, is_child: bool
) -> None:
    config = config_of(name, path or module)
    if is_child:
        child = {"kv_connector": name, "kv_connector_module_path": path or module}
        extra = {"connectors": [child]}
        config = config_of("MultiConnector", kv_connector_extra_config=extra)
    with pytest.raises(ValueError) as caught:
        KVConnectorFactory.check_config(config)
    for words in (repr(name), repr(path or module), "expected"):
        assert words in str(caught.value)


def test_every_connector_of_ours_has_its_settings_in_the_table() -> None:
    classes = {
        KVConnectorFactory.get_connector_class_by_name(name).__name__
        for name in KVConnectorFactory._registry
    }
    assert classes <= set(SETTINGS) <= set(KVConnectorFactory._registry)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("is_child", [False, True])
def test_an_unknown_key_of_a_connector_of_ours_is_named_beside_the_known(
    name: str, is_child: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(
        settings.logger, "warning_once", lambda text, *args: said.append(text % args)
    )
    extra: dict[str, Any] = {"foo": 1}
    config = config_of(name, kv_connector_extra_config=extra)
    if is_child:
        child = {"kv_connector": name, "kv_connector_extra_config": extra}
        extra = {"connectors": [child]}
        config = config_of("MultiConnector", kv_connector_extra_config=extra)
    with suppress(ValueError):  # of what else is missing
        KVConnectorFactory.check_config(config)
    (line,) = said
    for words in ("'foo'", "Connector", "ignored", *SETTINGS[name]):
        assert words in line


BAD_VALUES = {
    "fill_byte": [-1, 256, True, 0.5, "0"],
    "shared_storage_path": [5, ["/tmp"]],
    "disk_path": [5, {}],
    "eviction_policy": ["mru", [], 1],
    "connectors": [{"a": 1}, [3], "x"],
    "enable_cross_layers_blocks": ["yes", 2],
    **{
        name: [0, -1, True, "soon", float("nan"), float("inf")]
        for name in ("lease_s", "unclaimed_s", "read_timeout_s", "answer_timeout_s")
    },
}


@pytest.mark.parametrize(
    ("name", "key"), [(name, key) for name, keys in SETTINGS.items() for key in keys]
)
def test_a_value_that_cannot_be_used_is_named_with_its_key(name: str, key: str) -> None:
    values = BAD_VALUES.get(key, ["much", -1, True])
    for value in values:
        extra = {"cpu_bytes_to_use": "1MiB", key: value}
        if name != "OffloadingConnector":
            extra = {key: value}
        with pytest.raises(ValueError) as caught:
            KVConnectorFactory.check_config(
                config_of(name, kv_connector_extra_config=extra)
            )
        for words in (key, repr(value), "expected"):
            assert words in str(caught.value), (value, str(caught.value))


def test_connectors_from_elsewhere_keep_any_key(monkeypatch: Any, module: str) -> None:
    found = KVConnectorFactory.get_connector_class_by_name("ExampleConnector")
    derived = type("ExampleConnector", (found,), {"__module__": module})
    monkeypatch.setattr(sys.modules[module], "ExampleConnector", derived)
    for name in ("Plain", "ExampleConnector"):
        extra = {"foo": 1, "shared_storage_path": 5}
        KVConnectorFactory.check_config(
            config_of(name, module, kv_connector_extra_config=extra)
        )


@pytest.mark.parametrize("name", factory.NOT_BUILT_IN)
def test_known_names_without_code_say_so(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is not built in"):
        KVConnectorFactory.get_connector_class(config_of(name))


def test_unknown_names_list_the_known() -> None:
    with pytest.raises(
        ValueError, match=r"Unsupported connector type: Nobody.*Example"
    ):
        KVConnectorFactory.get_connector_class(config_of("Nobody"))


def test_registration_is_lazy_and_refuses_duplicates(
    monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    monkeypatch.setattr(
        KVConnectorFactory, "_registry", dict(KVConnectorFactory._registry)
    )
    KVConnectorFactory.register_connector("Mine", "not_imported_before_use", "Plain")
    with pytest.raises(ValueError, match="already registered"):
        KVConnectorFactory.register_connector("Mine", module, "Plain")
    KVConnectorFactory.register_connector("Other", module, "Plain")
    assert KVConnectorFactory.get_connector_class_by_name("Other") is Plain
    with pytest.raises(ImportError):
        KVConnectorFactory.get_connector_class_by_name("Mine")


def test_several_groups_need_a_connector_that_supports_them(module: str) -> None:
    create = KVConnectorFactory.create_connector
    role = KVConnectorRole.SCHEDULER
    assert supports_hma(Hybrid) and not supports_hma(Plain)
    hybrid = engine_config(config_of("Hybrid", module))
    assert supports_hma(create(hybrid, role, TWO_GROUPS))
    plain = engine_config(config_of("Plain", module))
    with pytest.raises(ValueError, match="--disable-hybrid-kv-cache-manager"):
        create(plain, role, TWO_GROUPS)
    asked = engine_config(
        config_of("Plain", module), disable_hybrid_kv_cache_manager=False
    )
    with pytest.raises(ValueError, match="--disable-hybrid-kv-cache-manager"):
        create(asked, role, ONE_GROUP)
    with pytest.raises(ValueError, match="not set"):
        create(engine_config(None), role, ONE_GROUP)


def test_every_engine_of_a_process_gets_its_own_connector(module: str) -> None:
    configs = [VllmConfig(kv_transfer_config=config_of("Plain", module))] * 2
    configs[1] = VllmConfig(kv_transfer_config=config_of("Hybrid", module))
    found = []
    for config in configs:
        kv_transfer_state.ensure_kv_transfer_initialized(config, ONE_GROUP)
        found.append(kv_transfer_state.get_kv_transfer_group())
        kv_transfer_state.ensure_kv_transfer_initialized(config, ONE_GROUP)
        assert kv_transfer_state.get_kv_transfer_group() is found[-1]
    assert found[0] is not found[1]
    assert kv_transfer_state.is_v1_kv_transfer_group()
    kv_transfer_state.ensure_kv_transfer_shutdown()
    assert not kv_transfer_state.has_kv_transfer_group()
    with pytest.raises(RuntimeError, match="--kv-transfer-config"):
        kv_transfer_state.get_kv_transfer_group()
