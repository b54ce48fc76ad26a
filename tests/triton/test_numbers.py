"""Triton's number functions equal the formats' casts, code by code."""

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from vllm.v1.attention.ops import triton_numbers as numbers
from vllm.v1.kv_formats import casts
from vllm.v1.kv_formats.hadamard import block_size, hadamard
from vllm.v1.kv_formats.packing import pack_bits

N = 4096
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@triton.jit
def _apply(x, out, FUNCTION: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, FUNCTION(tl.load(x + i)))


@triton.jit
def _saturate(x, out, TYPE: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, numbers.saturate(tl.load(x + i), TYPE))


@triton.jit
def _finite(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, numbers.finite(tl.load(x + i), 100.0))


@triton.jit
def _hadamard(x, out, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, ROWS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(out + i, numbers.hadamard(tl.load(x + i), ROWS, WIDTH, BLOCK))


@triton.jit
def _sum_of_16(x, out, ROWS: tl.constexpr):
    r = tl.arange(0, ROWS)
    i = r[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(out + r, numbers.sum_of_16(tl.load(x + i), ROWS))


@triton.jit
def _nibbles(x, out, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    r = tl.arange(0, ROWS)[:, None]
    codes = tl.load(x + r * WIDTH + tl.arange(0, WIDTH)[None, :])
    i = r * (WIDTH // 2) + tl.arange(0, WIDTH // 2)[None, :]
    tl.store(out + i, numbers.pack_nibbles(codes, ROWS, WIDTH))


@triton.jit
def _words(x, out, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    r = tl.arange(0, ROWS)[:, None]
    codes = tl.load(x + r * WIDTH + tl.arange(0, WIDTH)[None, :])
    i = r * (WIDTH // 8) + tl.arange(0, WIDTH // 8)[None, :]
    tl.store(out + i, numbers.words_of_3_bits(codes, ROWS, WIDTH))


def sample() -> torch.Tensor:
    """Every magnitude, every tie between neighbouring fp8 codes, and the specials."""
    torch.manual_seed(0)
    codes = torch.arange(256, dtype=torch.uint8)
    ties = []
    for dtype in FP8.values():
        exact = codes.view(dtype).float()
        exact = exact[exact.isfinite()].sort().values
        ties += [exact, (exact[1:] + exact[:-1]) / 2]
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-45, 3e38])
    x = torch.cat((*ties, special))
    rest = N - len(x)
    return torch.cat((x, torch.randn(rest) * torch.logspace(-12, 12, rest))).to(DEVICE)


def run(kernel: Any, x: torch.Tensor, out: torch.Tensor, *constants: Any) -> Any:
    kernel[(1,)](x, out, *constants)
    return out.cpu()


@pytest.mark.parametrize("name", FP8)
def test_fp8_is_encoded_as_torch_does(name: str) -> None:
    x = sample()
    out = torch.empty(N, dtype=torch.uint8, device=DEVICE)
    codes = run(_apply, x, out, getattr(numbers, f"{name}_encode"), N)
    wanted = casts.saturate(x.cpu(), FP8[name]).view(torch.uint8)
    assert torch.equal(codes, wanted)


@pytest.mark.parametrize("name", FP8)
def test_fp8_is_decoded_as_torch_does(name: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    out = torch.empty(256, device=DEVICE)
    values = run(_apply, codes, out, getattr(numbers, f"{name}_decode"), 256)
    wanted = codes.cpu().view(FP8[name]).float()
    assert torch.equal(values.nan_to_num(nan=-1.5), wanted.nan_to_num(nan=-1.5))
    assert torch.equal(values.signbit()[:1], wanted.signbit()[:1])


def test_e2m1_is_encoded_and_decoded() -> None:
    x = casts.finite(sample().cpu()).to(DEVICE)
    x[:32] = torch.arange(-16, 16, device=DEVICE) / 4  # every level and every tie
    out = torch.empty(N, dtype=torch.uint8, device=DEVICE)
    codes = run(_apply, x, out, numbers.e2m1_encode, N)
    assert torch.equal(codes, casts.e2m1_encode(x.cpu()))
    all_codes = torch.arange(16, dtype=torch.uint8, device=DEVICE)
    values = run(
        _apply, all_codes, torch.empty(16, device=DEVICE), numbers.e2m1_decode, 16
    )
    assert torch.equal(values, casts.e2m1_table(torch.device("cpu")))


def test_whole_numbers_round_half_away() -> None:
    x = (torch.arange(256, device=DEVICE) - 128) / 4
    out = run(_apply, x, torch.empty(256, device=DEVICE), numbers.round_half_away, 256)
    assert torch.equal(out, casts.round_half_away(x.cpu()))


@pytest.mark.parametrize(
    "kind, target",
    [(tl.float16, torch.float16), (tl.bfloat16, torch.bfloat16), (tl.float32, None)],
)
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
def test_values_saturate(
    kind: Any, target: torch.dtype | None, source: torch.dtype
) -> None:
    x = sample().to(source)
    wanted = casts.saturate(x.cpu(), target or torch.float32)
    out = run(_saturate, x, torch.empty(N, dtype=wanted.dtype, device=DEVICE), kind, N)
    both_nan = out.isnan() & wanted.isnan()
    assert bool((both_nan | (out == wanted)).all())


def test_values_are_made_finite() -> None:
    x = sample()
    out = run(_finite, x, torch.empty(N, device=DEVICE), N)
    assert torch.equal(out, casts.finite(x.cpu(), 100.0))


@pytest.mark.parametrize("size", [2, 64, 80, 96, 128, 256])
def test_rotation_is_the_formats(size: int) -> None:
    width = triton.next_power_of_2(size)
    x = torch.randn(4, width, device=DEVICE)
    out = run(_hadamard, x, torch.empty_like(x), 4, width, block_size(size))
    assert torch.equal(out[:, :size], hadamard(x.cpu()[:, :size]))


def test_sums_are_the_formats() -> None:
    x = torch.randn(8, 16, device=DEVICE)
    out = run(_sum_of_16, x, torch.empty(8, device=DEVICE), 8)
    assert torch.equal(out, casts.tree_sum(x.cpu()).squeeze(-1))


def test_codes_are_packed() -> None:
    codes = torch.randint(0, 16, (4, 64), dtype=torch.uint8, device=DEVICE)
    out = torch.empty(4, 32, dtype=torch.uint8, device=DEVICE)
    assert torch.equal(run(_nibbles, codes, out, 4, 64), pack_bits(codes.cpu(), 4))
    words = torch.empty(4, 8, dtype=torch.int32, device=DEVICE)
    run(_words, codes & 7, words, 4, 64)
    packed = words.cpu().unsqueeze(-1).view(torch.uint8)[..., :3].flatten(-2)
    assert torch.equal(packed, pack_bits(codes.cpu() & 7, 3))
