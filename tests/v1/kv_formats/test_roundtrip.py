"""Every format keeps vectors within its tolerance and each vector to itself."""

import pytest
import torch

from tests.v1.kv_formats.helpers import (
    arranged_formats,
    format_id,
    heads_of,
    named_formats,
    rms_error,
    size_pairs,
    vectors,
)
from vllm.v1.kv_formats import KVFormat, KVScales, by_name

FORMATS = pytest.mark.parametrize("fmt", named_formats(), ids=format_id)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BAD = (float("nan"), float("inf"), float("-inf"))
EXACT_WHEN_REPEATED = ("float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2")


@FORMATS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_error_stays_under_the_tolerance(fmt: KVFormat, dtype: torch.dtype) -> None:
    # The model's own rounding of the decoded vector comes on top.
    own = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11 if dtype.itemsize == 2 else 0
    for sizes in size_pairs(fmt):
        key, value = vectors(256, heads_of(fmt, sizes), sizes, dtype)
        got_key, got_value = fmt.roundtrip(key, value)
        assert got_key.dtype == dtype and got_key.shape == key.shape
        error = rms_error(got_key, key)
        assert error <= fmt.tolerance.key + own, (sizes, error)
        if value is None:
            assert got_value.shape == (*key.shape[:2], 0)
        else:
            assert got_value.dtype == dtype and got_value.shape == value.shape
            error = rms_error(got_value, value)
            assert error <= fmt.tolerance.value + own, (sizes, error)


@FORMATS
def test_tolerance_is_not_generous(fmt: KVFormat) -> None:
    sizes = size_pairs(fmt)[-1] if fmt.latent else (128, 128)
    key, value = vectors(512, heads_of(fmt, sizes), sizes)
    got_key, _ = fmt.roundtrip(key, value)
    assert rms_error(got_key, key) >= fmt.tolerance.key / 2


@FORMATS
def test_bytes_do_not_depend_on_the_batch(fmt: KVFormat) -> None:
    for sizes in size_pairs(fmt):
        heads = heads_of(fmt, sizes)
        key, value = vectors(301, heads, sizes, seed=3)
        together = fmt.encode(key, value)
        for i in (0, 7, 300):
            row = slice(i, i + 1)
            alone = fmt.encode(key[row], None if value is None else value[row])
            for name, field in together.items():
                assert _same_bits(field[row], alone[name]), (name, sizes, i)


@FORMATS
def test_decoding_does_not_depend_on_the_batch(fmt: KVFormat) -> None:
    for sizes in size_pairs(fmt):
        key, value = vectors(301, heads_of(fmt, sizes), sizes, seed=4)
        fields = fmt.encode(key, value)
        together = fmt.decode(fields, *sizes, torch.bfloat16)
        for i in (0, 299):
            row = {name: field[i : i + 1] for name, field in fields.items()}
            alone = fmt.decode(row, *sizes, torch.bfloat16)
            for a, b in zip(together, alone, strict=True):
                assert torch.equal(a[i : i + 1], b)


@FORMATS
def test_zeros_stay_zeros(fmt: KVFormat) -> None:
    for sizes in size_pairs(fmt):
        for zero in (0.0, -0.0):
            key, value = vectors(2, 1, sizes)
            key = torch.full_like(key, zero)
            value = None if value is None else torch.full_like(value, zero)
            for decoded in fmt.roundtrip(key, value):
                assert not decoded.any()


@FORMATS
@pytest.mark.parametrize("constant", [5.0, -0.03, 1e-30, 300.0])
def test_constant_vectors_survive(fmt: KVFormat, constant: float) -> None:
    for sizes in size_pairs(fmt):
        key, value = vectors(2, 1, sizes)
        key = torch.full_like(key, constant)
        value = None if value is None else torch.full_like(value, constant)
        got_key, got_value = fmt.roundtrip(key, value)
        assert torch.isfinite(got_key).all() and torch.isfinite(got_value).all()
        # A constant key is the worst case of a rotation without signs: one spike.
        assert _rms(got_key - key) <= 0.9 * abs(constant) + 1e-6, sizes
        if value is not None:
            assert _rms(got_value - value) <= 0.3 * abs(constant) + 1e-6, sizes


@FORMATS
@pytest.mark.parametrize("scale", [1e5, 1e30, 1e38])
def test_huge_vectors_stay_finite(fmt: KVFormat, scale: float) -> None:
    for sizes in size_pairs(fmt):
        for dtype in (torch.float32, torch.bfloat16):
            key, value = vectors(4, 1, sizes)
            key = (key * scale).clamp(-3e38, 3e38).to(dtype)
            if value is not None:
                value = (value * scale).clamp(-3e38, 3e38).to(dtype)
            for out, x in zip(fmt.roundtrip(key, value), (key, value), strict=True):
                assert torch.isfinite(out).all(), (sizes, dtype)
                if x is not None:
                    agree = torch.sign(out.float()) * torch.sign(x.float()) >= 0
                    assert agree.float().mean() > 0.8


@FORMATS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bad_numbers_do_not_reach_other_states(
    fmt: KVFormat, dtype: torch.dtype
) -> None:
    for sizes in size_pairs(fmt)[:3]:
        heads = heads_of(fmt, sizes)
        key, value = vectors(8, heads, sizes, dtype)
        clean = fmt.encode(key, value)
        for bad in BAD:
            spoilt_key = key.clone()
            spoilt_key[3, 0, 1] = bad
            spoilt_value = value
            if value is not None:
                spoilt_value = value.clone()
                spoilt_value[3, 0, 1] = bad
            fields = fmt.encode(spoilt_key, spoilt_value)
            for name, field in fields.items():
                others = torch.ones(field.shape[:2], dtype=torch.bool)
                others[3, 0] = False
                assert _same_bits(field[others], clean[name][others]), name
            decoded = fmt.decode(fields, *sizes, dtype)
            for out in decoded:
                finite = torch.isfinite(out)
                finite[3, 0, 1:2] = True  # dense and fp8 keep what they were given
                assert finite.all(), (bad, sizes)


@FORMATS
def test_quantised_codes_are_finite_for_bad_numbers(fmt: KVFormat) -> None:
    keeps_nan = fmt.mode.value <= 1 and not fmt.opaque
    sizes = size_pairs(fmt)[0]
    for bad in BAD:
        if keeps_nan and (bad != bad or not fmt.mode.is_quantized):
            continue
        key, value = vectors(2, 1, sizes)
        key[0, 0, 0] = bad
        if value is not None:
            value[0, 0, 0] = bad
        for out in fmt.roundtrip(key, value):
            assert torch.isfinite(out).all()


@FORMATS
def test_a_second_round_trip_changes_little(fmt: KVFormat) -> None:
    for sizes in size_pairs(fmt):
        key, value = vectors(64, heads_of(fmt, sizes), sizes, seed=5)
        once = fmt.roundtrip(key, value)
        twice = fmt.roundtrip(once[0], once[1] if sizes[1] else None)
        limits = (fmt.tolerance.key, fmt.tolerance.value)
        for first, second, limit in zip(once, twice, limits, strict=True):
            if fmt.format_id.partition(":")[0] in EXACT_WHEN_REPEATED:
                assert torch.equal(first, second)
            elif first.numel():
                assert rms_error(second, first) <= limit


@pytest.mark.parametrize(
    "fmt", [f for f in named_formats() if not f.latent], ids=format_id
)
def test_per_tensor_scales_matter_on_both_ways(fmt: KVFormat) -> None:
    key, value = vectors(16, 2, (64, 64), seed=6)
    scales = KVScales(k=0.25, v=0.5)
    if not fmt.per_tensor_scales:
        for got, plain in zip(
            fmt.roundtrip(key, value, scales), fmt.roundtrip(key, value), strict=True
        ):
            assert torch.equal(got, plain)
        return
    fields = fmt.encode(key, value, scales)
    plain = fmt.encode(key / 0.25, value / 0.5)
    for field, tensor in fields.items():
        assert _same_bits(tensor, plain[field])
    got = fmt.decode(fields, 64, 64, torch.float32, scales)
    assert rms_error(got[0], key) <= fmt.tolerance.key
    unscaled = fmt.decode(fields, 64, 64, torch.float32)
    assert torch.equal(unscaled[0] * 0.25, got[0])
    assert torch.equal(unscaled[1] * 0.5, got[1])


@pytest.mark.parametrize(
    ("name", "limit"), [("fp8", 448.0), ("fp8_e4m3", 448.0), ("fp8_e5m2", 57344.0)]
)
def test_fp8_saturates(name: str, limit: float) -> None:
    x = torch.tensor([600.0, -1e9, float("inf"), 65504.0]).view(1, 1, 4)
    key, value = by_name(name).roundtrip(x, x)
    wanted = x.clamp(-limit, limit)
    assert (key - wanted).abs().max() <= wanted.abs().max() / 8
    assert torch.equal(key, value) and key.abs().max() == limit


def test_int4_survives_outliers_because_it_rotates() -> None:
    x = torch.randn(64, 2, 96, generator=torch.Generator().manual_seed(7))
    x[..., 5] *= 30
    key, _ = by_name("int4_per_token_head").roundtrip(x, x)
    kept = torch.cat((x[..., :5], x[..., 6:]), -1)
    got = torch.cat((key[..., :5], key[..., 6:]), -1)
    step = x.abs().amax() / 15  # the error of 4 bits without rotation
    assert (got - kept).abs().mean() < step / 2


@pytest.mark.parametrize("fmt", arranged_formats(), ids=format_id)
def test_arrangements_encode_the_same_fields(fmt: KVFormat) -> None:
    sizes = size_pairs(fmt)[0]
    key, value = vectors(4, heads_of(fmt, sizes), sizes)
    default = fmt.arranged("cells").encode(key, value)
    for name, field in fmt.encode(key, value).items():
        assert _same_bits(field, default[name])


def _rms(x: torch.Tensor) -> float:
    return float(x.double().square().mean().sqrt())


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    raw = [x.contiguous().view(torch.uint8) for x in (a, b)]
    return torch.equal(*raw)
