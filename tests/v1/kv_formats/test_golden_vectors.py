"""Encoders give known bytes for known vectors."""

import struct

import pytest
import torch

from vllm.v1.kv_formats import by_name
from vllm.v1.kv_formats.casts import (
    E2M1_LEVELS,
    e2m1_encode,
    ue8m0_ceil,
    ue8m0_value,
)
from vllm.v1.kv_formats.hadamard import inverse_rht, rht, rht_signs
from vllm.v1.kv_formats.packing import look_up, pack_bits, unpack_bits

# Signs of the rotation, first element in the highest bit, 1 for +1.
SIGNS = {
    16: "b09a",
    32: "b09acea6",
    64: "b09acea68dac0101",
    128: "b09acea68dac010136bc22651c2afed6",
    256: "b09acea68dac010136bc22651c2afed681d125528223f5d51219d04c05c2045f",
}
SIGNS[512] = SIGNS[256] + (
    "cc3876b2d3e395155bb8a9d89acdc019769e1c0c700464b36e2405939d35b951"
)


def _golden_input() -> torch.Tensor:
    x = (torch.arange(16) - 7.5) / 8
    x[3] = 1.25
    return x.view(1, 1, 16)


def _hex(x: torch.Tensor) -> str:
    return bytes(x.contiguous().view(torch.uint8).flatten().tolist()).hex(" ")


def _codes(text: str) -> str:
    return " ".join(f"{int(code):02x}" for code in text.split())


def test_int8_per_token_head() -> None:
    fields = by_name("int8_per_token_head").encode(_golden_input(), _golden_input())
    assert _hex(fields["k_scale"]) == "85 42 21 3c"
    wanted = "a1 ad ba 7f d4 e0 ed fa 06 13 20 2c 39 46 53 5f"
    assert _hex(fields["k"]) == _hex(fields["v"]) == wanted


def test_fp8_per_token_head() -> None:
    fields = by_name("fp8_per_token_head").encode(_golden_input(), _golden_input())
    assert _hex(fields["k_scale"]) == "6e db 36 3b"
    assert _hex(fields["v"]) == "fa f9 f7 7e f2 ee e8 db 5b 68 6e 72 75 77 79 7a"


def test_int4_codes_and_scale_word() -> None:
    codes, word = by_name("int4_per_token_head").quantize_rotated(_golden_input())
    assert _hex(codes) == _codes("0 0 1 15 3 4 5 6 6 7 8 9 10 11 12 12")
    assert _hex(word) == "56 55 15 3e"
    assert _hex(pack_bits(codes, 4)) == "00 f1 43 65 76 98 ba cc"


def test_int4_keeps_vectors_on_one_side_of_zero() -> None:
    fmt = by_name("int4_per_token_head")
    for low, high in ((3.0, 5.0), (-5.0, -3.0), (1e3, 1e3 + 1)):
        y = torch.linspace(low, high, 16).view(1, 1, 16)
        codes, word = fmt.quantize_rotated(y)
        step = word.view(torch.int32) & ~15
        zero = (word.view(torch.int32) & 15).float()
        decoded = (codes.float() - zero) * step.view(torch.float32)
        assert (decoded - y).abs().max() <= 0.52 * max(abs(low), abs(high)) / 15


def test_rotation() -> None:
    wanted = (
        "1.1875 -0.9375 -0.4375 0.6875 -0.3125 -7.4375 -1.4375 1.6875 "
        "1.6875 -5.9375 0.0625 -0.3125 -0.8125 -0.4375 -0.9375 -1.3125"
    )
    assert rht(_golden_input()).flatten().tolist() == [float(x) for x in wanted.split()]


@pytest.mark.parametrize("head_size", SIGNS)
def test_signs_of_the_rotation(head_size: int) -> None:
    bits = "".join("1" if s > 0 else "0" for s in rht_signs(head_size).tolist())
    assert f"{int(bits, 2):0{head_size // 4}x}" == SIGNS[head_size]


@pytest.mark.parametrize("head_size", [2, 6, 48, 80, 96, 576])
def test_block_rotation_is_a_scaled_isometry(head_size: int) -> None:
    block = head_size & -head_size
    matrix = rht(torch.eye(head_size))
    product = matrix @ matrix.T
    assert torch.equal(product, block * torch.eye(head_size))
    assert torch.equal(inverse_rht(matrix), torch.eye(head_size))
    assert torch.equal(rht_signs(head_size)[:block], rht_signs(block))
    outside = torch.block_diag(*[torch.ones(block, block)] * (head_size // block)) == 0
    assert not matrix[outside].any()


def test_turboquant_values() -> None:
    x = _golden_input()
    fields = by_name("turboquant_4bit_nc").encode_value(x)
    assert _hex(fields["v_codes"]) == "10 f2 43 65 87 99 ba dc"
    assert (_hex(fields["v_scale"]), _hex(fields["v_zero"])) == ("ab 30", "80 bb")
    fields = by_name("turboquant_3bit_nc").encode_value(x)
    codes = unpack_bits(fields["v_codes"], 3, 16)
    assert _hex(codes) == _codes("0 0 1 7 2 2 2 3 3 4 4 4 5 5 6 6")
    assert _hex(fields["v_codes"]) == "40 2e 69 23 d9 da"
    assert (_hex(fields["v_scale"]), _hex(fields["v_zero"])) == ("00 35", "80 bb")


def test_turboquant_keys() -> None:
    x = _golden_input()
    fields = by_name("turboquant_4bit_nc").encode_key(x)
    assert _hex(unpack_bits(fields["k_codes"], 4, 16)) == _codes(
        "10 4 2 10 4 5 5 10 0 5 5 10 10 5 5 10"
    )
    assert _hex(fields["k_codes"]) == "4a a2 54 a5 50 a5 5a a5"
    assert _hex(fields["k_norm"]) == "1f 41"
    fields = by_name("turboquant_3bit_nc").encode_key(x)
    assert _hex(unpack_bits(fields["k_codes"], 3, 16)) == _codes(
        "5 1 1 5 2 2 2 5 0 2 2 5 5 2 2 5"
    )
    assert _hex(fields["k_codes"]) == "4d 2a a9 90 5a a9"


def test_turboquant_attention_may_rotate_the_query() -> None:
    fmt = by_name("turboquant_3bit_nc")
    x = torch.randn(4, 2, 80, generator=torch.Generator().manual_seed(1))
    fields = fmt.encode(x, x)
    key, _ = fmt.decode(fields, 80, 80, torch.float32)
    rotated = fmt.decode_rotated_key(fields, 80)
    lengths = rotated.norm(dim=-1), key.norm(dim=-1), x.norm(dim=-1)
    torch.testing.assert_close(lengths[0], lengths[1])
    torch.testing.assert_close(lengths[0], lengths[2], rtol=1e-3, atol=0)


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_4over6"])
def test_nvfp4_group(name: str) -> None:
    fields = by_name("nvfp4").encode(_golden_input(), _golden_input())
    for side in "kv":
        assert _hex(fields[f"{side}_scales"]) == "25"
        assert _hex(fields[f"{side}_codes"]) == "ee 7d bc 9a 21 43 55 66"


def test_four_over_six_never_loses() -> None:
    x = torch.randn(64, 2, 64, generator=torch.Generator().manual_seed(2))
    errors = []
    for name in ("nvfp4", "nvfp4_4over6"):
        key, _ = by_name(name).roundtrip(x, x)
        errors.append((key - x).square().unflatten(-1, (-1, 16)).sum(-1))
    assert (errors[1] <= errors[0] * (1 + 1e-6)).all()
    assert (errors[1] < errors[0]).any()


@pytest.mark.parametrize(
    ("amax", "byte"), [(1.25, 119), (448.0, 127), (449.0, 128), (1e-6, 105)]
)
def test_deepseek_v4_scale_bytes(amax: float, byte: int) -> None:
    key = torch.zeros(1, 1, 512)
    key[0, 0, 64] = -amax
    fields = by_name("deepseek_v4").encode(key, None)
    assert fields["nope_scale"][0, 0].tolist() == [105, byte, 105, 105, 105, 105, 105]


def test_exponent_bytes_are_exact_powers() -> None:
    bytes_ = torch.arange(1, 255, dtype=torch.int32).to(torch.uint8)
    values = ue8m0_value(bytes_)
    assert values.tolist() == [2.0 ** (b - 127) for b in range(1, 255)]
    normal = values[30:-1]
    assert torch.equal(ue8m0_ceil(normal), bytes_[30:-1])
    assert torch.equal(ue8m0_ceil(normal * 1.0001), bytes_[30:-1] + 1)


def test_nvfp4_ds_mla_scale_order() -> None:
    fmt = by_name("nvfp4_ds_mla")
    blocks = torch.arange(32)
    wanted = [block for column in range(4) for block in range(column, 32, 4)]
    stored = fmt.permute_scales(blocks)
    assert stored.tolist() == wanted
    assert all(stored[8 * (s & 3) + (s >> 2)] == s for s in range(32))
    assert torch.equal(fmt.unpermute_scales(stored), blocks)


def test_fp8_ds_mla_record() -> None:
    fmt = by_name("fp8_ds_mla")
    key = torch.zeros(1, 1, 576)
    key[..., 0], key[..., 511], key[..., 512:] = 448.0, -1.0, 0.3
    pages = torch.zeros(1, 1, 4, fmt.record_bytes, dtype=torch.uint8)
    fmt.store(pages, torch.tensor([2]), key, None)
    record = bytes(pages[0, 0, 2].tolist())
    scales = struct.unpack_from("<4f", record, 512)
    assert record[0] == 0x7E and scales[0] == 1.0
    assert scales[3] == pytest.approx(1 / 448)
    assert record[511] == 0xFE
    assert struct.unpack_from("<H", record, 528)[0] == 0x3E9A  # bf16 of 0.3
    assert scales[1] == torch.finfo(torch.float32).tiny


def test_e2m1_rounds_to_the_nearest_level_and_ties_to_even() -> None:
    x = torch.linspace(-7, 7, 2801)
    codes = e2m1_encode(x)
    for value, code in zip(x.tolist(), codes.tolist(), strict=True):
        size = min(abs(value), 6.0)
        distance = [abs(size - level) for level in E2M1_LEVELS]
        assert distance[code & 7] <= min(distance) + 1e-6
        assert (code >= 8) == (value < 0)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert e2m1_encode(ties).tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert e2m1_encode(torch.tensor([-0.0])).tolist() == [8]


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("count", [1, 2, 5, 7, 8, 9, 16, 66, 72])
def test_bit_streams(bits: int, count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    codes = torch.randint(0, 2**bits, (3, count), generator=generator).to(torch.uint8)
    packed = pack_bits(codes, bits)
    for row, stream in zip(codes.tolist(), packed.tolist(), strict=True):
        number = sum(code << (bits * i) for i, code in enumerate(row))
        assert bytes(stream) == number.to_bytes((count * bits + 7) // 8, "little")
    assert torch.equal(unpack_bits(packed, bits, count), codes)
    table = torch.randn(2**bits, generator=generator)
    assert torch.equal(look_up(packed, bits, count, table), table[codes.int()])
