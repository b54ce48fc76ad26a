"""What the CPU serves, what it refuses before loading, and the defaults it fills in."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from vllm import platforms
from vllm.config import AttentionConfig, CacheConfig, ParallelConfig
from vllm.platforms import cpu, current_platform
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.cuda import CudaPlatform
from vllm.platforms.interface import (
    AttentionSelectorConfig,
    DeviceCapability,
    Platform,
    PlatformEnum,
)
from vllm.utils.import_utils import has_module
from vllm.utils.mem_constants import GiB_bytes
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_formats import KVQuantMode, all_formats

PLATFORM = CpuPlatform()
TRITONS = {
    *("fp8", "fp8_e4m3", "fp8_e5m2"),
    *("int8_per_token_head", "fp8_per_token_head", "int4_per_token_head"),
}


def config(cache_dtype="auto", head_size=128, mla=False, layers=32, **cache):
    model = SimpleNamespace(
        model="some/model",
        dtype=torch.bfloat16,
        use_mla=mla,
        is_hybrid=False,
        get_head_size=lambda: 576 if mla else head_size,
        get_num_layers=lambda parallel: layers,
    )
    return SimpleNamespace(
        model_config=model,
        cache_config=CacheConfig(cache_dtype=cache_dtype, **cache),
        parallel_config=ParallelConfig(),
        attention_config=AttentionConfig(),
        device_config=SimpleNamespace(device_type="cpu"),
        kv_transfer_config=None,
    )


def test_the_platform_is_found_on_first_use(monkeypatch):
    monkeypatch.delenv("VLLM_TARGET_DEVICE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = platforms.detect_platform()
    assert isinstance(found, CpuPlatform) and found.is_cpu()
    assert not found.is_cuda() and not found.is_cuda_alike()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert platforms.detect_platform().is_cuda()
    assert isinstance(current_platform, Platform)
    assert platforms.current_platform is current_platform
    with pytest.raises(AttributeError, match="other_platform"):
        platforms.other_platform  # noqa: B018


def test_importing_platforms_touches_no_device():
    code = (
        "import torch; torch.cuda._lazy_init = None\n"
        "import vllm.platforms.cuda, vllm.platforms.cpu\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_facts_of_the_host():
    assert PLATFORM._enum is PlatformEnum.CPU
    assert PLATFORM.device_type == "cpu"
    assert PLATFORM.get_device_total_memory() > 0
    assert PLATFORM.get_device_name()
    assert PLATFORM.get_device_capability() is None
    assert not PLATFORM.has_device_capability(80)
    with PLATFORM.inference_mode():
        assert torch.is_inference_mode_enabled()


def test_capabilities_compare_like_versions():
    hopper = DeviceCapability(9, 0)
    assert hopper >= (8, 9) and hopper < DeviceCapability(10, 0)
    assert hopper.to_int() == 90 and hopper.as_version_str() == "9.0"


@pytest.mark.parametrize("fmt", all_formats(), ids=lambda f: f.name)
@pytest.mark.parametrize("mla", [False, True], ids=["heads", "latent"])
def test_every_accepted_dtype_works_or_is_refused_in_one_line(fmt, mla):
    asked = config(fmt.name, mla=mla)
    if fmt.latent_capable if mla else not fmt.latent:
        PLATFORM.check_and_update_config(asked)
        return
    with pytest.raises(ValueError) as error:
        PLATFORM.check_and_update_config(asked)
    message = str(error.value)
    assert fmt.name in message
    assert "\n" not in message


def test_formats_for_heads_name_the_latent_model_they_refuse():
    for name in ("nvfp4", "nvfp4_4over6", "turboquant_4bit_nc"):
        with pytest.raises(ValueError, match=f"{name} .*some/model.*Use auto, fp8"):
            PLATFORM.check_and_update_config(config(name, mla=True))


def test_formats_for_latents_are_refused_for_heads():
    for name in ("fp8_ds_mla", "nvfp4_ds_mla"):
        with pytest.raises(ValueError, match=f"{name} .*MLA.*some/model"):
            PLATFORM.check_and_update_config(config(name))


def test_head_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"nvfp4.*head_size=72"):
        PLATFORM.check_and_update_config(config("nvfp4", head_size=72))


def test_a_fixed_block_size_must_fit_the_backend():
    with pytest.raises(
        ValueError, match=r"block size 24 .*multiple of 16.*\(CPU_ATTN\)"
    ):
        PLATFORM.check_and_update_config(
            with_backend(config(block_size=24), AttentionBackendEnum.CPU_ATTN)
        )
    PLATFORM.check_and_update_config(config(block_size=48))


def with_backend(asked, backend):
    asked.attention_config.backend = backend
    return asked


@pytest.mark.parametrize(
    "size",
    [
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "decode_context_parallel_size",
    ],
)
def test_parallel_sizes_without_a_part_are_refused(size):
    asked = config()
    asked.parallel_config = ParallelConfig(**{size: 2})
    with pytest.raises(ValueError, match=f"{size}=2 is not supported.*Set {size}=1"):
        PLATFORM.check_and_update_config(asked)


# --- layers that stay dense -----------------------------------------------------


def skipped(*entries, cache_dtype="turboquant_4bit_nc", layers=32, hybrid=False):
    asked = config(cache_dtype, layers=layers, kv_cache_dtype_skip_layers=list(entries))
    asked.model_config.is_hybrid = hybrid
    PLATFORM.check_and_update_config(asked)
    PLATFORM.check_and_update_config(asked)  # twice is once
    return asked.cache_config.kv_cache_dtype_skip_layers


def test_turboquant_leaves_both_ends_dense():
    assert skipped() == ["0", "1", "30", "31"]
    assert skipped("5", "1") == ["0", "1", "5", "30", "31"]
    assert skipped("sliding_window", "7", layers=12) == [
        "0",
        "1",
        "7",
        "10",
        "11",
        "sliding_window",
    ]


@pytest.mark.parametrize(
    ("layers", "dense"),
    [(1, []), (2, ["0", "1"]), (3, ["0", "2"]), (5, ["0", "1", "3", "4"])],
)
def test_short_models_keep_no_more_than_half_at_each_end(layers, dense):
    assert skipped(layers=layers) == dense


def test_the_word_none_turns_the_default_off():
    assert skipped("none") == []
    assert skipped("none", "4") == ["4"]
    assert skipped("none", cache_dtype="fp8") == []


def test_other_formats_and_hybrid_models_have_no_default():
    assert skipped(cache_dtype="fp8") == []
    assert skipped("3", cache_dtype="nvfp4") == ["3"]
    assert skipped(hybrid=True) == []


# --- memory -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("available", "expected"), [(100, 4), (8, 4), (6, 3), (1, 0.5)]
)
def test_the_cache_takes_at_most_half_of_free_memory(monkeypatch, available, expected):
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    monkeypatch.setattr(cpu, "available_memory_bytes", lambda: available * GiB_bytes)
    asked = config()
    PLATFORM.check_and_update_config(asked)
    assert asked.cache_config.kv_cache_memory_bytes == expected * GiB_bytes


def test_memory_that_was_asked_for_is_taken(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "0.5")
    asked = config()
    PLATFORM.check_and_update_config(asked)
    assert asked.cache_config.kv_cache_memory_bytes == GiB_bytes // 2
    asked = config(kv_cache_memory_bytes=12345678)
    PLATFORM.check_and_update_config(asked)
    assert asked.cache_config.kv_cache_memory_bytes == 12345678
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "-1")
    with pytest.raises(ValueError, match="VLLM_CPU_KVCACHE_SPACE=-1"):
        PLATFORM.check_and_update_config(config())


# --- CUDA, without a device -----------------------------------------------------------


def test_cuda_serves_with_triton_what_has_kernels_and_the_rest_with_torch(monkeypatch):
    monkeypatch.setattr(
        CudaPlatform,
        "get_device_capability",
        classmethod(lambda cls, device_id=0: DeviceCapability(9, 0)),
    )
    for fmt in all_formats():
        selector = AttentionSelectorConfig(128, torch.bfloat16, fmt.name, None)
        if fmt.latent:
            with pytest.raises(ValueError, match=f"REFERENCE: KV cache {fmt.name}"):
                CudaPlatform.get_attn_backend_cls(None, selector)
        else:
            path = CudaPlatform.get_attn_backend_cls(None, selector)
            order = ["TRITON_ATTN", "TURBOQUANT", "FLASHINFER", "REFERENCE"]
            if not has_module("flashinfer"):
                order.remove("FLASHINFER")
            backends = [AttentionBackendEnum[name].get_class() for name in order]
            first = next(b for b in backends if b.supports_kv_cache_dtype(fmt.name))
            assert path == AttentionBackendEnum[first.get_name()].get_path()
            assert (first.get_name() == "TRITON_ATTN") == (
                fmt.name in TRITONS or fmt.mode is KVQuantMode.NONE
            )


def test_cuda_does_not_pretend_to_be_a_cpu():
    with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES"):
        CudaPlatform.check_and_update_config(config())


def test_numbers_ranges_and_words_mix():
    dense = skipped("0,3-5", "sliding_window", "9", cache_dtype="fp8")
    assert dense == ["0", "3", "4", "5", "9", "sliding_window"]


@pytest.mark.parametrize("entry", ["7-3", "full", "-1", "1-", "3.5"])
def test_an_entry_that_names_no_layer_is_refused(entry):
    with pytest.raises(ValueError, match="expected a layer number, a range"):
        skipped(entry, cache_dtype="fp8")


def test_layers_that_the_model_has_not_are_refused():
    with pytest.raises(ValueError, match=r"layers 31, 32, but .* layers 0 to 30"):
        skipped("29-32", cache_dtype="fp8", layers=31)
