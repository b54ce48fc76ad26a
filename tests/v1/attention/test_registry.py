"""Backends by name: lookups, overrides, and errors that list what there is."""

import pytest

from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.registry import (
    AttentionBackendEnum,
    MambaAttentionBackendEnum,
    as_backend,
    register_backend,
    requested_backend,
)


class External(AttentionBackend):
    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls():
        return object


@pytest.fixture
def custom():
    yield AttentionBackendEnum.CUSTOM
    AttentionBackendEnum.CUSTOM.clear_override()
    AttentionBackendEnum.CPU_ATTN.clear_override()


def test_an_unknown_name_lists_the_names_of_this_build():
    with pytest.raises(ValueError, match=r"'FLASH'.*TRITON_ATTN.*CPU_ATTN") as error:
        AttentionBackendEnum["FLASH"]
    assert "ROCM_ATTN" not in str(error.value)
    assert "register_backend" in str(error.value)


@pytest.mark.parametrize("member", AttentionBackendEnum, ids=lambda m: m.name)
def test_every_member_resolves_or_says_what_to_do(member):
    if member.is_importable():
        assert issubclass(member.get_class(), AttentionBackend)
        return
    with pytest.raises(ValueError, match=r"Choose one of|Register one") as error:
        member.get_class()
    assert member.name in str(error.value)


def test_a_path_has_a_module_and_a_class():
    member = AttentionBackendEnum.CPU_ATTN
    assert member.get_path() == (
        "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"
    )
    assert member.get_path(include_classname=False) == (
        "vllm.v1.attention.backends.cpu_attn"
    )


@pytest.mark.parametrize("member", [AttentionBackendEnum.TORCH_SDPA])
def test_a_name_without_a_class_asks_for_one(member):
    with pytest.raises(ValueError, match="register_backend"):
        member.get_path()


def test_a_class_registers_by_path(custom):
    register_backend(custom, f"{__name__}.External")
    assert custom.is_overridden()
    assert custom.get_class() is External
    custom.clear_override()
    assert not custom.is_overridden()


def test_a_class_registers_by_decorator(custom):
    assert register_backend(custom)(External) is External
    assert custom.get_class() is External


def test_a_built_in_name_can_be_overridden(custom):
    register_backend(AttentionBackendEnum.CPU_ATTN)(External)
    assert AttentionBackendEnum.CPU_ATTN.get_class() is External
    AttentionBackendEnum.CPU_ATTN.clear_override()
    assert AttentionBackendEnum.CPU_ATTN.get_class() is not External


def test_mamba_names_are_a_registry_of_their_own(custom):
    mamba = MambaAttentionBackendEnum.CUSTOM
    register_backend(mamba, f"{__name__}.External", is_mamba=True)
    assert mamba.is_overridden() and not custom.is_overridden()
    mamba.clear_override()
    with pytest.raises(ValueError, match="MambaAttentionBackendEnum"):
        register_backend(custom, "a.B", is_mamba=True)


class Asked:
    def __init__(self, backend=None, **per_kind):
        self.backend, self.backend_per_kind = backend, per_kind


def test_the_most_specific_wish_wins(monkeypatch):
    triton, cpu = AttentionBackendEnum.TRITON_ATTN, AttentionBackendEnum.CPU_ATTN
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "flash_attn")
    wish = Asked("cpu_attn", sliding_window=triton)
    assert requested_backend(wish, "sliding_window") is triton
    assert requested_backend(wish, "full_attention") is cpu
    assert requested_backend(Asked()) is AttentionBackendEnum.FLASH_ATTN
    monkeypatch.delenv("VLLM_ATTENTION_BACKEND")
    assert requested_backend(Asked()) is None
    assert requested_backend(None) is None
    assert as_backend("") is None
