"""Conversions of csrc/common are bit-equal to torch's and to NVIDIA's headers, for
every number of 16 bits."""

import ctypes

import pytest
import torch

from tests.kernels.cuda.native import SOURCES, compile_host, toolkit_include
from vllm.v1.kv_formats.casts import e2m1_encode, e2m1_table, saturate

KINDS = {"e4m3": 0, "e5m2": 1, "e2m1": 2}
TORCH = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
COUNT = {"e4m3": 256, "e5m2": 256, "e2m1": 16}
# A NaN is all ones below the sign; e2m1 has none, and gives the largest code.
NAN_CODE = {"e4m3": 0x7F, "e5m2": 0x7F, "e2m1": 0x7}
HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("ours")
    return compile_host(SOURCES / "small_floats.cpp", folder)


@pytest.fixture(scope="module")
def nvidia(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    include = toolkit_include()
    if include is None:
        pytest.skip("NVIDIA's headers (cuda_fp4.h) are not installed: no oracle")
    folder = tmp_path_factory.mktemp("nvidia")
    source = SOURCES / "nvidia_floats.cpp"
    return compile_host(source, folder, "-w", "-isystem", str(include))


def all_halves(dtype: torch.dtype) -> torch.Tensor:
    """Every number of a 16-bit type, as float32."""
    return torch.arange(1 << 16).to(torch.uint16).view(dtype).float()


def between() -> torch.Tensor:
    """Every code of every type, the middles between them, and their neighbours."""
    codes = torch.arange(256).to(torch.uint8)
    values = [codes.view(dtype).float() for dtype in TORCH.values()]
    levels = torch.cat([*values, e2m1_table(torch.device("cpu"))])
    levels = levels[levels.isfinite()].unique()
    middles = (levels[1:] + levels[:-1]) / 2
    found = torch.cat([levels, middles, levels * 2, torch.tensor([1e30, 1e-30])])
    inf = torch.tensor(float("inf"))
    return torch.cat([found, found.nextafter(inf), found.nextafter(-inf)])


def codes_of(library: ctypes.CDLL, x: torch.Tensor, kind: str) -> torch.Tensor:
    out = torch.empty(len(x), dtype=torch.uint8)
    library.codes_of(
        ctypes.c_void_p(x.data_ptr()),
        ctypes.c_int64(len(x)),
        KINDS[kind],
        ctypes.c_void_p(out.data_ptr()),
    )
    return out


def values_of(library: ctypes.CDLL, kind: str) -> torch.Tensor:
    codes = torch.arange(COUNT[kind]).to(torch.uint8)
    out = torch.empty(len(codes))
    library.values_of(
        ctypes.c_void_p(codes.data_ptr()),
        ctypes.c_int64(len(codes)),
        KINDS[kind],
        ctypes.c_void_p(out.data_ptr()),
    )
    return out


def torch_codes(x: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "e2m1":
        return e2m1_encode(x)
    return saturate(x, TORCH[kind]).view(torch.uint8)


def inputs(source: str) -> torch.Tensor:
    return between() if source == "between" else all_halves(HALVES[source])


SOURCES_OF_NUMBERS = [*HALVES, "between"]


@pytest.mark.parametrize("source", SOURCES_OF_NUMBERS)
@pytest.mark.parametrize("kind", KINDS)
def test_codes_equal_torchs(ours: ctypes.CDLL, kind: str, source: str) -> None:
    x = inputs(source)
    found = codes_of(ours, x, kind)
    nan = x.isnan()
    assert torch.equal(found[~nan], torch_codes(x[~nan], kind))
    sign = torch.signbit(x[nan]).to(torch.uint8) * (COUNT[kind] // 2)
    assert torch.equal(found[nan], NAN_CODE[kind] | sign)


@pytest.mark.parametrize("source", SOURCES_OF_NUMBERS)
@pytest.mark.parametrize("kind", KINDS)
def test_codes_equal_nvidias(
    ours: ctypes.CDLL, nvidia: ctypes.CDLL, kind: str, source: str
) -> None:
    """But for the sign of a NaN, which NVIDIA drops."""
    x = inputs(source)
    found, wanted = codes_of(ours, x, kind), codes_of(nvidia, x, kind)
    nan = x.isnan()
    assert torch.equal(found[~nan], wanted[~nan])
    assert bool((wanted[nan] == NAN_CODE[kind]).all())


@pytest.mark.parametrize("kind", KINDS)
def test_values_equal_torchs_and_nvidias(
    ours: ctypes.CDLL, nvidia: ctypes.CDLL, kind: str
) -> None:
    found, theirs = values_of(ours, kind), values_of(nvidia, kind)
    codes = torch.arange(COUNT[kind]).to(torch.uint8)
    table = e2m1_table(torch.device("cpu"))
    wanted = table if kind == "e2m1" else codes.view(TORCH[kind]).float()
    for other in (wanted, theirs):
        nan = other.isnan()
        assert torch.equal(found.isnan(), nan)
        bits = found.view(torch.int32)[~nan]
        assert torch.equal(bits, other.contiguous().view(torch.int32)[~nan])


@pytest.mark.parametrize("kind", ["e4m3", "e2m1"])
def test_two_at_once_are_one_after_the_other(ours: ctypes.CDLL, kind: str) -> None:
    x = all_halves(torch.bfloat16)
    single = codes_of(ours, x, kind)
    out = torch.empty_like(single)
    pointers = ctypes.c_void_p(x.data_ptr()), ctypes.c_int64(len(x)), KINDS[kind]
    ours.pairs_of(*pointers, ctypes.c_void_p(out.data_ptr()))
    if kind == "e2m1":
        packed = out[: len(x) // 2]
        out = torch.stack([packed & 15, packed >> 4], dim=1).flatten()
    assert torch.equal(out, single)


@pytest.mark.parametrize("dtype", HALVES.values(), ids=HALVES)
def test_halves_are_widened_exactly(ours: ctypes.CDLL, dtype: torch.dtype) -> None:
    bits = torch.arange(1 << 16).to(torch.uint16)
    out = torch.empty(len(bits))
    ours.halves_as_floats(
        ctypes.c_void_p(bits.data_ptr()),
        ctypes.c_int64(len(bits)),
        int(dtype is torch.bfloat16),
        ctypes.c_void_p(out.data_ptr()),
    )
    wanted = bits.view(dtype).float()
    nan = wanted.isnan()
    assert torch.equal(out.isnan(), nan)
    assert torch.equal(out.view(torch.int32)[~nan], wanted.view(torch.int32)[~nan])


def test_floats_are_rounded_to_bfloat16_as_torch_does(ours: ctypes.CDLL) -> None:
    halves = all_halves(torch.float16)
    bf16 = all_halves(torch.bfloat16)
    offsets = torch.tensor([0x7FFF, 0x8000, 0x8001], dtype=torch.int32)
    steps = bf16.view(torch.int32)[:, None] + offsets
    x = torch.cat([halves, bf16, steps.flatten().view(torch.float32), between()])
    x = x[~x.isnan()]
    out = torch.empty(len(x), dtype=torch.uint16)
    ours.floats_as_bf16(
        ctypes.c_void_p(x.data_ptr()),
        ctypes.c_int64(len(x)),
        ctypes.c_void_p(out.data_ptr()),
    )
    assert torch.equal(out, x.to(torch.bfloat16).view(torch.uint16))
