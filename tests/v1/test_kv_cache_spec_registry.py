"""The table of spec classes: lookups, plugins, conflicts, and no upward import."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.v1.spec_samples import SAMPLES, full, sample_id, sliding
from vllm.v1.kv_cache_interface import (
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_spec_registry import (
    _REGISTRY_KVCACHESPEC_LIST,
    KVCacheSpecRegistry,
    check_kv_cache_spec_registry,
    register_kv_cache_spec,
)

MANAGERS = {
    "FullAttentionSpec": ("FullAttentionManager", "FullAttentionSpec"),
    "MLAAttentionSpec": ("FullAttentionManager", "FullAttentionSpec"),
    "HiddenStateCacheSpec": ("FullAttentionManager", "FullAttentionSpec"),
    "RSWASpec": ("RSWAManager", "FullAttentionSpec"),
    "SinkFullAttentionSpec": ("SinkFullAttentionManager", "FullAttentionSpec"),
    "SlidingWindowSpec": ("SlidingWindowManager", "SlidingWindowSpec"),
    "SlidingWindowMLASpec": ("SlidingWindowManager", "SlidingWindowMLASpec"),
    "ChunkedLocalAttentionSpec": (
        "ChunkedLocalAttentionManager",
        "ChunkedLocalAttentionSpec",
    ),
    "MambaSpec": ("MambaManager", "MambaSpec"),
    "CrossAttentionSpec": ("CrossAttentionManager", "CrossAttentionSpec"),
}


class SampleManager:
    """Stands in for a manager."""


@dataclass(frozen=True, kw_only=True)
class PluginSpec(FullAttentionSpec):
    """A spec from outside."""


@dataclass(frozen=True)
class StrangerSpec(KVCacheSpec):
    """A spec nobody registered."""


@pytest.fixture(autouse=True)
def restored_registry() -> Iterator[None]:
    saved = dict(_REGISTRY_KVCACHESPEC_LIST)
    yield
    _REGISTRY_KVCACHESPEC_LIST.clear()
    _REGISTRY_KVCACHESPEC_LIST.update(saved)


@pytest.mark.parametrize("spec", SAMPLES, ids=sample_id)
def test_builtin_rows(spec: KVCacheSpec) -> None:
    base = KVCacheSpecRegistry.get_uniform_type_base_spec(spec)
    path = KVCacheSpecRegistry.get_manager_path(spec)
    if isinstance(spec, EncoderOnlyAttentionSpec):
        assert (base, path) == (None, None)
        return
    manager, base_name = MANAGERS[type(spec).__name__]
    assert base is not None
    assert base.__name__ == base_name
    assert path is not None
    assert path.endswith(f":{manager}")


@pytest.mark.parametrize("first", ["plugin", "builtin"])
def test_a_plugin_may_register_before_or_after_the_builtins(first: str) -> None:
    _REGISTRY_KVCACHESPEC_LIST.clear()
    if first == "builtin":
        assert KVCacheSpecRegistry.get_uniform_type_base_spec(full())
    register_kv_cache_spec(SampleManager, FullAttentionSpec)(PluginSpec)
    plugin = PluginSpec(**{f: getattr(full(), f) for f in _fields()})
    assert KVCacheSpecRegistry.get_manager_class(plugin) is SampleManager
    assert KVCacheSpecRegistry.get_uniform_type_base_spec(full()) is FullAttentionSpec
    both = {"a": full(), "b": plugin}
    assert UniformTypeKVCacheSpecs.is_uniform_type(both)
    check_kv_cache_spec_registry(both)


def _fields() -> list[str]:
    return ["block_size", "num_kv_heads", "head_size", "dtype"]


def test_an_unregistered_subclass_takes_the_row_of_its_nearest_base() -> None:
    spec = PluginSpec(**{f: getattr(full(), f) for f in _fields()})
    path = KVCacheSpecRegistry.get_manager_path(spec)
    assert path is not None
    assert path.endswith(":FullAttentionManager")


def test_registering_again_is_idempotent_and_a_conflict_is_named() -> None:
    for _ in range(2):
        KVCacheSpecRegistry.register(PluginSpec, SampleManager, FullAttentionSpec)
    with pytest.raises(AssertionError, match="conflicting registration of PluginSpec"):
        KVCacheSpecRegistry.register(PluginSpec, SampleManager, PluginSpec)


def test_a_row_needs_a_manager_and_a_base_class() -> None:
    with pytest.raises(ValueError, match="pass manager_class"):
        KVCacheSpecRegistry.register(PluginSpec)
    with pytest.raises(AssertionError, match="does not derive from"):
        KVCacheSpecRegistry.register(PluginSpec, SampleManager, SlidingWindowSpec)


def test_the_check_names_the_layer_and_the_way_out() -> None:
    layers = {"ok": sliding(), "model.7.attn": StrangerSpec(16)}
    with pytest.raises(ValueError, match="register_kv_cache_spec") as caught:
        KVCacheSpecRegistry.check_kv_cache_spec_registry(layers)
    assert "'model.7.attn'" in str(caught.value)
    assert "StrangerSpec" in str(caught.value)
    assert KVCacheSpecRegistry.get_manager_class(StrangerSpec(16)) is None
    with pytest.raises(AssertionError, match="StrangerSpec"):
        StrangerSpec(16).is_uniform_with_collection(layers)


def test_specs_import_no_manager() -> None:
    script = """
import sys
import vllm.v1.kv_cache_interface
above = [m for m in sys.modules if m.startswith(("vllm.v1.core", "vllm.v1.worker"))]
raise SystemExit(above)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.stderr.strip() == "[]"


@pytest.mark.parametrize("spec", SAMPLES, ids=sample_id)
def test_builtin_managers_exist(spec: KVCacheSpec) -> None:
    manager = KVCacheSpecRegistry.get_manager_class(spec)
    if isinstance(spec, EncoderOnlyAttentionSpec):
        assert manager is None
        return
    assert manager is not None
    assert manager.__name__ == MANAGERS[type(spec).__name__][0]
    # Registering the class over its name is the same row, not a conflict.
    base = KVCacheSpecRegistry.get_uniform_type_base_spec(spec)
    KVCacheSpecRegistry.register(type(spec), manager, base)
