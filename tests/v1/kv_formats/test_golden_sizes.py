"""Bytes per state and page of every format: values fixed by what others store."""

import pytest
import torch

from tests.v1.kv_formats.helpers import size_pairs
from vllm.v1.kv_formats import Packing, all_formats, by_name

# head size -> cell bytes
CELLS = {
    64: {
        "bfloat16": 256,
        "fp8": 128,
        "int8_per_token_head": 136,
        "fp8_per_token_head": 136,
        "int4_per_token_head": 72,
        "nvfp4": 36,
    },
    96: {
        "bfloat16": 384,
        "fp8": 192,
        "int8_per_token_head": 200,
        "int4_per_token_head": 104,
        "nvfp4": 54,
    },
    128: {
        "bfloat16": 512,
        "fp8": 256,
        "int8_per_token_head": 264,
        "int4_per_token_head": 136,
        "nvfp4": 72,
    },
    192: {
        "bfloat16": 768,
        "fp8": 384,
        "int8_per_token_head": 392,
        "int4_per_token_head": 200,
        "nvfp4": 108,
    },
    256: {
        "bfloat16": 1024,
        "fp8": 512,
        "int8_per_token_head": 520,
        "int4_per_token_head": 264,
        "nvfp4": 144,
    },
    512: {
        "bfloat16": 2048,
        "fp8": 1024,
        "int8_per_token_head": 1032,
        "int4_per_token_head": 520,
        "nvfp4": 288,
    },
}

PAGE_NAMES = (
    "bfloat16",
    "fp8",
    "int8_per_token_head",
    "int4_per_token_head",
    "nvfp4",
    "turboquant_k8v4",
    "turboquant_4bit_nc",
    "turboquant_k3v4_nc",
    "turboquant_3bit_nc",
)
# (head size, KV heads) -> page bytes of 16 tokens
PAGES = {
    (64, 1): (4096, 2048, 2176, 1152, 1152, 1600, 1120, 992, 864),
    (64, 8): (32768, 16384, 17408, 9216, 9216, 12800, 8960, 7936, 6912),
    (96, 1): (6144, 3072, 3200, 1664, 1728, 2368, 1632, 1440, 1248),
    (96, 8): (49152, 24576, 25600, 13312, 13824, 18944, 13056, 11520, 9984),
    (128, 1): (8192, 4096, 4224, 2176, 2304, 3136, 2144, 1888, 1632),
    (128, 8): (65536, 32768, 33792, 17408, 18432, 25088, 17152, 15104, 13056),
    (256, 1): (16384, 8192, 8320, 4224, 4608, 6208, 4192, 3680, 3168),
    (256, 8): (131072, 65536, 66560, 33792, 36864, 49664, 33536, 29440, 25344),
}

# head size -> (key bytes, value bytes, cell) per preset
TURBOQUANT = {
    64: ((64, 36, 100), (34, 36, 70), (26, 36, 62), (26, 28, 54)),
    96: ((96, 52, 148), (50, 52, 102), (38, 52, 90), (38, 40, 78)),
    128: ((128, 68, 196), (66, 68, 134), (50, 68, 118), (50, 52, 102)),
    192: ((192, 100, 292), (98, 100, 198), (74, 100, 174), (74, 76, 150)),
    256: ((256, 132, 388), (130, 132, 262), (98, 132, 230), (98, 100, 198)),
    512: ((512, 260, 772), (258, 260, 518), (194, 260, 454), (194, 196, 390)),
}
PRESETS = PAGE_NAMES[-4:]


@pytest.mark.parametrize("head_size", CELLS)
def test_cell_bytes(head_size: int) -> None:
    for name, cell in CELLS[head_size].items():
        packing = by_name(name).packing(8, head_size, head_size, torch.bfloat16)
        slots = 16 if name == "nvfp4" else 8
        assert packing == Packing(slots, cell), name


@pytest.mark.parametrize(("head_size", "heads"), PAGES)
def test_page_bytes(head_size: int, heads: int) -> None:
    for name, page in zip(PAGE_NAMES, PAGES[head_size, heads], strict=True):
        fmt = by_name(name)
        token = fmt.bytes_per_token(heads, head_size, head_size, torch.bfloat16)
        assert 16 * token == page, name


@pytest.mark.parametrize("head_size", TURBOQUANT)
def test_turboquant_bytes(head_size: int) -> None:
    for name, wanted in zip(PRESETS, TURBOQUANT[head_size], strict=True):
        layout = by_name(name).layout(head_size, head_size)
        sides = [sum(f.nbytes for f in layout.fields if f.of == s) for s in "kv"]
        assert (*sides, layout.nbytes) == wanted, name


@pytest.mark.parametrize("head_size", [66, 72, 80, 88, 100, 120])
def test_turboquant_keeps_every_code_of_odd_head_sizes(head_size: int) -> None:
    for name, bits in zip(PRESETS, ((8, 4), (4, 4), (3, 4), (3, 3)), strict=True):
        key, value = ((head_size * b + 7) // 8 for b in bits)
        norm = 0 if bits[0] == 8 else 2
        raw = key + norm + value + 4
        assert by_name(name).layout(head_size, head_size).nbytes == raw + raw % 2


def test_turboquant_follows_the_head_size_of_values() -> None:
    layout = by_name("turboquant_4bit_nc").layout(128, 64)
    assert [f.nbytes for f in layout.fields] == [64, 2, 32, 2, 2]


def test_turboquant_offsets() -> None:
    layout = by_name("turboquant_4bit_nc").layout(128, 128)
    offsets = {f.name: layout.offset(f.name) for f in layout.fields}
    assert offsets == {
        "k_codes": 0,
        "k_norm": 64,
        "v_codes": 66,
        "v_scale": 130,
        "v_zero": 132,
    }


def test_per_token_head_offsets() -> None:
    for name, offsets in (
        ("int8_per_token_head", [0, 128, 132, 260]),
        ("int4_per_token_head", [0, 64, 68, 132]),
    ):
        layout = by_name(name).layout(128, 128)
        assert [layout.offset(f.name) for f in layout.fields] == offsets


def test_nvfp4_regions() -> None:
    layout = by_name("nvfp4").layout(128, 128)
    page = {"num_heads": 8, "num_states": 16}
    offsets = [layout.offset(f.name, **page) for f in layout.fields]
    assert offsets == [0, 8192, 9216, 17408]


def test_latent_bytes() -> None:
    wanted = {
        "bfloat16": 1152,
        "fp8": 576,
        "int8_per_token_head": 584,
        "fp8_per_token_head": 584,
        "int4_per_token_head": 296,
        "fp8_ds_mla": 656,
        "nvfp4_ds_mla": 352,
    }
    for name, cell in wanted.items():
        assert by_name(name).packing(1, 576, 0) == Packing(1, cell), name
    assert by_name("deepseek_v4").packing(1, 512, 0) == Packing(1, 584)
    assert by_name("dsa_indexer").packing(1, 128, 0) == Packing(1, 132)


def test_latent_record_offsets() -> None:
    for name, offsets in (
        ("fp8_ds_mla", [0, 512, 528]),
        ("nvfp4_ds_mla", [0, 256, 320]),
    ):
        layout = by_name(name).layout(576, 0)
        assert [layout.offset(f.name) for f in layout.fields] == offsets


def test_deepseek_v4_page_is_data_then_scales() -> None:
    fmt = by_name("deepseek_v4")
    layout = fmt.layout(512, 0)
    for state in (0, 5, 63):
        at = {"state": state, "num_states": 64}
        assert layout.offset("nope", **at) == 576 * state
        assert layout.offset("rope", **at) == 576 * state + 448
        assert layout.offset("nope_scale", **at) == 36864 + 8 * state
    assert fmt.page_alignment == 576
    page = 64 * layout.nbytes
    assert page == 37376
    assert -(-page // fmt.page_alignment) * fmt.page_alignment == 37440


def test_indexer_page_is_values_then_scales() -> None:
    layout = by_name("dsa_indexer").layout(128, 0)
    at = {"state": 7, "num_states": 64}
    assert layout.offset("key", 3, **at) == 7 * 128 + 3
    assert layout.offset("key_scale", **at) == 64 * 128 + 28


def test_packing_is_what_the_layout_says() -> None:
    for fmt in all_formats():
        for sizes in size_pairs(fmt):
            layout = fmt.layout(*sizes)
            packing = fmt.packing(4, *sizes)
            assert packing.state_bytes == layout.nbytes
            assert packing.head_slots == 4 * layout.num_sides
            per_token = fmt.bytes_per_token(4, *sizes)
            assert per_token == packing.head_slots * packing.state_bytes


@pytest.mark.parametrize(
    ("name", "sizes", "fit"),
    [
        ("int4_per_token_head", (65, 65), "even"),
        ("nvfp4", (72, 72), "multiples of 16"),
        ("nvfp4", (128, 64), "equal for K and V"),
        ("nvfp4", (576, 0), "multiples of 16"),
        ("turboquant_4bit_nc", (576, 0), "no MLA latent"),
        ("fp8_ds_mla", (512, 0), "512 \\+ 64"),
        ("fp8_ds_mla", (576, 576), "512 \\+ 64"),
        ("nvfp4_ds_mla", (128, 128), "512 \\+ 64"),
        ("fp8", (0, 0), "any head size"),
    ],
)
def test_sizes_that_do_not_fit(name: str, sizes: tuple[int, int], fit: str) -> None:
    fmt = by_name(name)
    for ask in (fmt.check_head_size, fmt.layout):
        with pytest.raises(ValueError, match=fit) as error:
            ask(*sizes)
        assert name in str(error.value) and str(sizes[0]) in str(error.value)
