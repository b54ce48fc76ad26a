"""Which device is chosen, and which attention backends it tries, without any GPU."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config

from tests.e2e.tiny import SIZES, save_tiny, vocabulary
from vllm import platforms
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.cuda import CudaPlatform
from vllm.platforms.interface import AttentionSelectorConfig, DeviceCapability
from vllm.platforms.rocm import RocmPlatform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

LAYER = AttentionSelectorConfig(128, torch.bfloat16, "auto", None)
LATENT = AttentionSelectorConfig(576, torch.bfloat16, "auto", None, use_mla=True)
OF_GPUS = ("TRITON_ATTN", "FLASHINFER", "FLASH_ATTN", "TURBOQUANT")


def names(platform: type[CudaPlatform], layer: AttentionSelectorConfig) -> list[str]:
    return [backend.name for backend in platform.attn_backend_priority(layer)]


def of_capability(
    monkeypatch: pytest.MonkeyPatch, major: int, minor: int
) -> type[CudaPlatform]:
    capability = DeviceCapability(major, minor)
    monkeypatch.setattr(
        CudaPlatform,
        "get_device_capability",
        classmethod(lambda cls, device_id=0: capability),
    )
    return CudaPlatform


@pytest.mark.parametrize(
    ("sees_gpu", "hip", "wanted", "expected"),
    [
        (False, None, None, CpuPlatform),
        (True, None, None, CudaPlatform),
        (True, "6.4", None, RocmPlatform),
        (True, None, "cpu", CpuPlatform),
        (True, "6.4", "rocm", RocmPlatform),
        (False, None, "cuda", "sees no such device"),
        (True, "6.4", "cuda", "sees no such device"),
        (False, None, "tpu", "VLLM_TARGET_DEVICE=tpu: expected one of cpu, cuda"),
    ],
)
def test_the_device_is_the_wanted_one_or_the_one_that_is_here(
    monkeypatch: pytest.MonkeyPatch,
    sees_gpu: bool,
    hip: str | None,
    wanted: str | None,
    expected: type | str,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: sees_gpu)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.delenv("VLLM_TARGET_DEVICE", raising=False)
    if wanted is not None:
        monkeypatch.setenv("VLLM_TARGET_DEVICE", wanted)
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            platforms.detect_platform()
    else:
        assert type(platforms.detect_platform()) is expected


@pytest.mark.parametrize(
    ("capability", "first"), [((8, 0), "TRITON_ATTN"), ((10, 0), "FLASHINFER")]
)
def test_flashinfer_comes_first_where_it_has_kernels_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], first: str
) -> None:
    order = names(of_capability(monkeypatch, *capability), LAYER)
    assert order[0] == first and order[-1] == "REFERENCE"
    assert sorted(order) == ["FLASHINFER", "REFERENCE", "TRITON_ATTN", "TURBOQUANT"]


def test_amd_devices_run_triton_kernels_only() -> None:
    platform = RocmPlatform()
    assert platform.is_rocm() and platform.is_cuda_alike() and not platform.is_cuda()
    assert names(RocmPlatform, LAYER) == ["TRITON_ATTN", "TURBOQUANT", "REFERENCE"]
    assert names(RocmPlatform, LATENT) == ["TRITON_MLA"]
    assert RocmPlatform.get_device_capability() is None
    words = "FLASHINFER: it runs on cuda, not on rocm"
    with pytest.raises(ValueError, match=words):
        RocmPlatform.get_attn_backend_cls(AttentionBackendEnum.FLASHINFER, LAYER)


def serving(platform: type, layer: AttentionSelectorConfig) -> set[str]:
    return {
        backend.name
        for backend in AttentionBackendEnum
        if backend.is_importable()
        and not platform.attn_backend_refusals(backend, layer)
    }


@pytest.mark.parametrize("asked", OF_GPUS)
def test_a_refused_wish_lists_every_backend_with_its_reason(asked: str) -> None:
    with pytest.raises(ValueError) as error:
        CpuPlatform.get_attn_backend_cls(AttentionBackendEnum[asked], LAYER)
    words = str(error.value)
    serves = serving(CpuPlatform, LAYER)
    assert serves == {"CPU_ATTN", "REFERENCE"}
    for backend in AttentionBackendEnum:
        if not backend.is_importable() or backend.name in serves:
            continue
        reasons = CpuPlatform.attn_backend_refusals(backend, LAYER)
        assert f"{backend.name}: {', '.join(reasons)}" in words
    assert words.startswith(f"{asked}: it runs on ")
    assert words.count(f"{asked}: ") == 1
    assert words.endswith("Choose CPU_ATTN instead.")


def test_where_no_backend_serves_the_wish_is_still_named_first() -> None:
    odd = LAYER._replace(block_size=7)
    with pytest.raises(ValueError) as error:
        CpuPlatform.get_attn_backend_cls(AttentionBackendEnum.TRITON_ATTN, odd)
    words = str(error.value)
    assert words.startswith("TRITON_ATTN: it runs on ")
    assert "CPU_ATTN: block size 7" in words
    assert words.endswith("On cpu, mend what keeps CPU_ATTN from it.")


@pytest.mark.parametrize("asked", [None, AttentionBackendEnum.CPU_ATTN])
def test_a_block_size_is_answered_with_the_sizes_of_this_device_alone(asked) -> None:
    odd = LAYER._replace(block_size=7)
    with pytest.raises(ValueError) as error:
        CpuPlatform.get_attn_backend_cls(asked, odd)
    assert str(error.value) == (
        "block size 7 is not supported on cpu: expected any multiple of 16 tokens "
        "(CPU_ATTN); correct --block-size, or leave it out"
    )


def test_a_command_line_that_asks_for_it_ends_with_that_error(tmp_path: Path) -> None:
    model = Qwen2Config(**SIZES, vocab_size=vocabulary())
    save_tiny(model, tmp_path)
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]
    ended = subprocess.run(
        [*command, str(tmp_path), "--attention-backend", "FLASHINFER"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode != 0
    said = (ended.stdout + ended.stderr).splitlines()
    (line,) = [text for text in said if "Choose CPU_ATTN instead" in text]
    assert line.startswith(
        "vllm serve: error: FLASHINFER: it runs on cuda, not on cpu."
    )
    for name in OF_GPUS:
        assert f"{name}: it runs on " in line
