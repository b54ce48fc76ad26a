"""The host gives what it has, and refuses by name what it has not."""

import logging

import pytest
import torch

from tests.v1.worker.steps import Steps, make_config, save_tiny_llama, start
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.layer_specs import (
    describe_formats,
    get_kv_cache_specs,
    get_layer_formats,
    resolve_layout,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    save_tiny_llama(folder)
    return folder


def test_more_memory_than_the_host_has_is_refused(folder):
    config = make_config(folder)
    config.cache_config.kv_cache_memory_bytes = 1 << 60
    with pytest.raises(ValueError, match="lower --kv-cache-memory-bytes"):
        CPUWorker(config).determine_available_memory()


def test_dtypes_that_do_not_run_are_refused(folder):
    config = make_config(folder)
    config.model_config.dtype = torch.float64
    with pytest.raises(ValueError, match="float64 does not run on a CPU"):
        CPUWorker(config).init_device()


def test_the_plan_records_formats_and_layout(folder):
    executor = start(make_config(folder, "turboquant_4bit_nc"))
    runner = executor.driver_worker.model_runner
    plan, config = runner.kv_cache_config, runner.vllm_config
    assert plan.kv_cache_layout == "LBHNC"
    assert plan.layer_formats == get_layer_formats(config)
    kinds = list(plan.layer_formats.values())
    # Layers at both ends stay dense by default.
    assert kinds[2].startswith("turboquant_4bit_nc") and len(set(kinds)) == 2
    assert executor.get_layer_formats() == plan.layer_formats
    assert plan.needs_kv_cache_zeroing
    specs = get_kv_cache_specs(config)
    assert specs.keys() == plan.layer_formats.keys()
    packed = [spec.is_packed for spec in specs.values()]
    assert packed == [False, False, True, False, False]


def test_layers_are_bound_to_disjoint_zeroed_pages(folder):
    executor = start(make_config(folder, "int8_per_token_head"))
    runner = executor.driver_worker.model_runner
    layers = runner.vllm_config.compilation_config.static_forward_context
    caches = [layer.kv_cache for layer in layers.values()]
    for layer in layers.values():
        # A profile run must not have written anything.
        assert layer.kv_cache.dim() == 4 and not layer.kv_cache.any()
    assert len({cache.data_ptr() for cache in caches}) == len(caches)


def test_an_impossible_layout_is_refused(folder, monkeypatch):
    executor = start(make_config(folder))
    config = executor.driver_worker.vllm_config
    specs = get_kv_cache_specs(config)
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "LBNHC")
    with pytest.raises(ValueError, match="VLLM_KV_CACHE_LAYOUT=LBNHC"):
        resolve_layout(config, specs)
    monkeypatch.delenv("VLLM_KV_CACHE_LAYOUT")
    with pytest.raises(ValueError, match="resolved before"):
        resolve_layout(config, specs, recorded="BHLNC")


def test_formats_are_counted():
    formats = {"a": "x:cells", "b": "x:cells", "c": "bfloat16:cells"}
    assert describe_formats(formats, skipped=True) == (
        "x:cells x2, bfloat16:cells x1 (skipped layers)"
    )
    assert describe_formats(formats, skipped=False) == "x:cells x2, bfloat16:cells x1"


def test_a_longest_length_decided_late_reaches_the_batch(folder):
    config = make_config(folder)
    executor = start(config)
    executor.collective_rpc("update_max_model_len", args=(48,))
    runner = executor.driver_worker.model_runner
    runner.initialize_kv_cache(runner.kv_cache_config)
    assert runner.input_batch.token_ids_cpu.shape[1] == 48
    steps = Steps(executor)
    steps.add("a", list(range(45)))
    steps.run(3)
    steps.finish("a")


def test_start_says_which_layers_store_what(folder, caplog):
    logging.getLogger("vllm").propagate = True
    with caplog.at_level(logging.DEBUG, logger="vllm"):
        start(make_config(folder, "turboquant_4bit_nc"))
    logging.getLogger("vllm").propagate = False
    text = caplog.text
    assert "float32:cells x4, turboquant_4bit_nc:cells x1 (skipped layers)" in text
    assert "CPU_ATTN x5; kernel blocks of" in text
