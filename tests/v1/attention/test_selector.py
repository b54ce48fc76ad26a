"""On the CPU every accepted dtype finds a backend, or a refusal in words."""

import pytest
import torch

from vllm.config import AttentionConfig, VllmConfig, set_current_vllm_config
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention import selector
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.selector import get_attn_backend, get_attn_spec_kind
from vllm.v1.kv_cache_interface import KVCacheSpecKind
from vllm.v1.kv_formats import all_formats

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(selector, "current_platform", CpuPlatform())
    monkeypatch.delenv("VLLM_ATTENTION_BACKEND", raising=False)
    selector._cached_get_attn_backend.cache_clear()
    yield
    selector._cached_get_attn_backend.cache_clear()


@pytest.mark.parametrize("fmt", all_formats(), ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16], ids=str)
def test_every_accepted_dtype_is_served_or_refused_in_words(fmt, dtype):
    if fmt.latent:
        with pytest.raises(ValueError, match=fmt.name) as error:
            get_attn_backend(128, dtype, fmt.name)
        assert "CPU_ATTN" in str(error.value)
        return
    assert get_attn_backend(128, dtype, fmt.name).get_name() == "CPU_ATTN"


@pytest.mark.parametrize("fmt", all_formats(), ids=lambda f: f.name)
def test_latent_attention_is_served_or_refused_in_words(fmt):
    if fmt.latent_capable:
        assert get_attn_backend(576, BF16, fmt.name, use_mla=True).get_name() == (
            "CPU_MLA"
        )
        return
    with pytest.raises(ValueError, match=f"CPU_MLA: KV cache {fmt.name}"):
        get_attn_backend(576, BF16, fmt.name, use_mla=True)


@pytest.mark.parametrize("name", ["fp8_ds_mla", "nvfp4_ds_mla"])
def test_deepseeks_records_are_refused_for_another_latent(name):
    with pytest.raises(ValueError, match=f"{name}.*head_size=320.*512 . 64"):
        get_attn_backend(320, BF16, name, use_mla=True)


def test_an_unknown_dtype_lists_the_accepted_ones():
    with pytest.raises(ValueError, match=r"fp9.*turboquant_k8v4"):
        get_attn_backend(128, BF16, "fp9")


@pytest.mark.parametrize("name", ["REFERENCE", "cpu_attn"])
def test_the_asked_backend_is_taken(name):
    config = VllmConfig(attention_config=AttentionConfig(backend=name))
    with set_current_vllm_config(config):
        assert get_attn_backend(64, BF16, "auto").get_name() == name.upper()


def test_a_backend_for_one_kind_leaves_the_others_alone():
    wish = AttentionConfig(backend_per_kind={"sliding_window": "REFERENCE"})
    with set_current_vllm_config(VllmConfig(attention_config=wish)):
        assert get_attn_backend(64, BF16, "auto").get_name() == "CPU_ATTN"
        windowed = get_attn_backend(64, BF16, "auto", has_sliding_window=True)
        assert windowed.get_name() == "REFERENCE"


@pytest.mark.parametrize("name", ["TRITON_ATTN", "FLASHINFER", "TURBOQUANT"])
def test_a_backend_of_another_device_is_refused_with_the_way_out(name):
    config = VllmConfig(attention_config=AttentionConfig(backend=name))
    with (
        set_current_vllm_config(config),
        pytest.raises(ValueError, match=f"{name}: it runs on .*, not on cpu") as error,
    ):
        get_attn_backend(64, BF16, "auto")
    assert "Choose CPU_ATTN instead" in str(error.value)


def test_a_name_may_mean_another_class_later():
    custom = AttentionBackendEnum.CUSTOM
    config = VllmConfig(attention_config=AttentionConfig(backend="CUSTOM"))
    try:
        with set_current_vllm_config(config):
            register_backend(custom, AttentionBackendEnum.REFERENCE.get_path())
            assert get_attn_backend(64, BF16, "auto").get_name() == "REFERENCE"
            register_backend(custom, AttentionBackendEnum.CPU_ATTN.get_path())
            assert get_attn_backend(64, BF16, "auto").get_name() == "CPU_ATTN"
    finally:
        custom.clear_override()


def test_the_choice_is_logged_once(monkeypatch):
    lines = []
    monkeypatch.setattr(
        "vllm.platforms.interface.logger.info_once",
        lambda message, *args: lines.append(message % args),
    )
    get_attn_backend(48, BF16, "auto")
    assert lines == ["Attention backend CPU_ATTN (default on cpu)."]


@pytest.mark.parametrize(
    ("mla", "window", "attn_type", "kind"),
    [
        (False, False, AttentionType.DECODER, KVCacheSpecKind.FULL_ATTENTION),
        (False, True, AttentionType.DECODER, KVCacheSpecKind.SLIDING_WINDOW),
        (True, False, AttentionType.DECODER, KVCacheSpecKind.MLA_ATTENTION),
        (True, True, AttentionType.DECODER, KVCacheSpecKind.SLIDING_WINDOW_MLA),
        (False, False, "encoder_only", KVCacheSpecKind.ENCODER_ONLY_ATTENTION),
        (False, False, "encoder_decoder", KVCacheSpecKind.CROSS_ATTENTION),
    ],
)
def test_the_kind_follows_from_the_layer(mla, window, attn_type, kind):
    assert get_attn_spec_kind(mla, window, attn_type) is kind
