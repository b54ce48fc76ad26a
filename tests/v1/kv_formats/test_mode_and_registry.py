"""Names, modes and lookups of KV-cache formats."""

import pytest
import torch

from vllm.v1.kv_formats import (
    CACHE_DTYPES,
    KVQuantMode,
    all_formats,
    by_id,
    by_mode,
    by_name,
    mode_by_name,
    model_formats,
    rearrange,
    register_kv_format,
    registry,
)
from vllm.v1.kv_formats.dense import Dense

MODE_VALUES = {
    "NONE": 0,
    "FP8_PER_TENSOR": 1,
    "INT8_PER_TOKEN_HEAD": 2,
    "FP8_PER_TOKEN_HEAD": 3,
    "INT4_PER_TOKEN_HEAD": 4,
    "NVFP4": 5,
    "TURBOQUANT_K8V4": 6,
    "TURBOQUANT_4BIT_NC": 7,
    "TURBOQUANT_K3V4_NC": 8,
    "TURBOQUANT_3BIT_NC": 9,
    "NVFP4_DS_MLA": 10,
}


def test_modes_have_fixed_values() -> None:
    assert {mode.name: mode.value for mode in KVQuantMode} == MODE_VALUES


def test_predicates_partition_the_modes() -> None:
    assert [m.value for m in KVQuantMode if m.is_per_token_head] == [2, 3, 4]
    assert [m.value for m in KVQuantMode if m.is_nvfp4] == [5]
    assert [m.value for m in KVQuantMode if m.is_turboquant] == [6, 7, 8, 9]
    assert [m.value for m in KVQuantMode if not m.is_quantized] == [0]


def test_names_and_formats_agree() -> None:
    formats = {fmt.name: fmt.mode for fmt in all_formats()}
    assert formats == CACHE_DTYPES
    for name, mode in CACHE_DTYPES.items():
        assert mode_by_name(name) is mode is by_name(name).mode


@pytest.mark.parametrize("name", ["fp9", "turboquant_5bit", "", "nvfp4 ", "Auto"])
def test_unknown_names_list_the_accepted_ones(name: str) -> None:
    for look_up in (by_name, mode_by_name):
        with pytest.raises(ValueError, match="turboquant_4bit_nc") as error:
            look_up(name)
        assert repr(name) in str(error.value)


def test_storage_types() -> None:
    special = {
        "float32": torch.float32,
        "float16": torch.float16,
        "bfloat16": torch.bfloat16,
        "auto": torch.float16,
        "fp8_inc": torch.float8_e4m3fn,
        "int8_per_token_head": torch.int8,
    }
    for fmt in all_formats():
        wanted = special.get(fmt.name, torch.uint8)
        assert fmt.storage_dtype(torch.float16) == wanted, fmt.name


def test_auto_resolves_to_the_dtype_of_the_model() -> None:
    auto = by_name("auto")
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        assert auto.resolve(dtype) == by_name(name)
        assert auto.resolve(dtype).format_id == f"{name}:cells"
    with pytest.raises(ValueError, match="float64"):
        auto.resolve(torch.float64)


def test_ids_tell_bytes_apart_where_modes_do_not() -> None:
    ids = {fmt.format_id for fmt in (*all_formats(), *model_formats())}
    assert by_name("fp8").format_id == by_name("fp8_e4m3").format_id
    for name in ("fp8_e5m2", "fp8_ds_mla", "deepseek_v4", "int8_per_token_head"):
        assert f"{name}:cells" in ids
    for identifier in ids - {"auto:cells"}:
        assert by_id(identifier).format_id == identifier


def test_a_mode_stands_for_one_format() -> None:
    for mode in KVQuantMode:
        assert by_mode(mode).mode is mode
        assert not by_mode(mode).opaque
    assert by_mode(KVQuantMode.NONE, torch.float16).name == "float16"
    assert by_mode(KVQuantMode.FP8_PER_TENSOR).name == "fp8"


def test_arrangements_are_listed_when_one_is_unknown() -> None:
    with pytest.raises(ValueError, match="cells, linear"):
        by_name("nvfp4", "planes")
    assert by_name("nvfp4", "linear").format_id == "nvfp4:linear"
    assert by_id("bfloat16:planes").arrangement == "planes"


def test_only_tensors_of_turboquant_keep_boundary_layers_dense() -> None:
    for fmt in all_formats():
        assert fmt.default_dense_boundary_layers == 2 * fmt.mode.is_turboquant


def test_a_plugin_adds_one_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_ACCEPTED", dict(registry._ACCEPTED))
    monkeypatch.delitem(CACHE_DTYPES, "plain_half", raising=False)
    plain = Dense("plain_half", dtype=torch.float16)
    try:
        register_kv_format(plain)
        assert by_name("plain_half") is plain
        assert CACHE_DTYPES["plain_half"] is KVQuantMode.NONE
        register_kv_format(plain)
        with pytest.raises(ValueError, match="already registered"):
            register_kv_format(Dense("fp8", dtype=torch.float16))
    finally:
        CACHE_DTYPES.pop("plain_half", None)


def test_rearranging_needs_the_same_format() -> None:
    pages = torch.zeros(1, 2, 4, 72, dtype=torch.uint8)
    with pytest.raises(ValueError, match="the formats differ"):
        rearrange(
            by_name("nvfp4"),
            pages,
            by_name("nvfp4_4over6"),
            pages,
            128,
            128,
            torch.bfloat16,
        )
