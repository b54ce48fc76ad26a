"""The interpreter's numbers are a GPU's: what the kernels' tests rely on.

Every case failed, without an error, before `interpreter.install`, or guards what the
kernels use besides.
"""

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from tests.triton import interpreter

pytestmark = pytest.mark.skipif(
    not triton.knobs.runtime.interpret, reason="a GPU runs the kernels here"
)

NARROW = [
    (tl.bfloat16, torch.bfloat16),
    (tl.float16, torch.float16),
    (tl.float8e4nv, torch.float8_e4m3fn),
    (tl.float8e5, torch.float8_e5m2),
]
FP8 = [pair for pair in NARROW if pair[0].primitive_bitwidth == 8]
EDGES = [
    0.0,
    -0.0,
    2**-9,
    2**-10,
    1.5 * 2**-9,
    1.987,
    448.0,
    464.0,
    1e3,
    -1e3,
    6e4,
    1e6,
]


@triton.jit
def _cast(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i).to(out.dtype.element_ty))


@triton.jit
def _round_trip(x, out, T: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i).to(T).to(tl.float32))


@triton.jit
def _from_bits(x, out, T: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i).to(T, bitcast=True).to(tl.float32))


@triton.jit
def _arithmetic(x, y, out, OP: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    a, b = tl.load(x + i), tl.load(y + i)
    if OP == "add":
        c = a + b
    elif OP == "mul":
        c = a * b
    elif OP == "neg":
        c = -a
    elif OP == "less":
        c = tl.where(a < b, a, b)
    else:
        c = a * 1.5
    tl.store(out + i, c)


@triton.jit
def _from_int(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i).to(tl.bfloat16))


@triton.jit
def _to_int(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i).to(tl.int32))


@triton.jit
def _smaller(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.minimum(tl.load(x + i), 1.0))


@triton.jit
def _clamped(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.clamp(tl.load(x + i), -1.0, 1.0))


@triton.jit
def _dot(a, b, out, ACC: tl.constexpr, M: tl.constexpr, K: tl.constexpr):
    m, k = tl.arange(0, M), tl.arange(0, K)
    x = tl.load(a + m[:, None] * K + k[None, :])
    y = tl.load(b + k[:, None] * M + m[None, :])
    tl.store(out + m[:, None] * M + m[None, :], tl.dot(x, y, out_dtype=ACC))


@triton.jit
def _nibbles(x, out, N: tl.constexpr):
    low, high = tl.split(tl.reshape(tl.load(x + tl.arange(0, 2 * N)), [N, 2]))
    tl.store(out + tl.arange(0, N), low | (high << 4))


@triton.jit
def _halves(x, out, N: tl.constexpr):
    pairs = tl.reshape(tl.load(x + tl.arange(0, 2 * N)), [2, N])
    low, high = tl.split(tl.trans(pairs))
    joined = tl.trans(tl.join(low + high, low - high))
    tl.store(out + tl.arange(0, 2 * N), tl.reshape(joined, [2 * N]))


@triton.jit
def _looked_up(table, x, out, M: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    values = tl.gather(tl.load(table + tl.arange(0, M)), tl.load(x + i), 0)
    tl.store(out + i, values)


@triton.jit
def _divided(x, out, D: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    y = tl.load(x + i)
    tl.store(out + i, (y // D) * 100 + y % D)


def name_of(pair: tuple[Any, torch.dtype]) -> str:
    return str(pair[0])


def run(kernel: Any, *arguments: Any) -> None:
    kernel[(1,)](*arguments)


def values(count: int = 256) -> torch.Tensor:
    torch.manual_seed(0)
    wide = torch.randn(count) * torch.logspace(-6, 6, count)
    return torch.cat((wide[: count - len(EDGES)], torch.tensor(EDGES)))


def saturated(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype.itemsize == 1:
        limit = torch.finfo(dtype).max
        x = x.clamp(-limit, limit)
    return x.to(dtype)


def assert_same(out: torch.Tensor, wanted: torch.Tensor) -> None:
    assert out.dtype == wanted.dtype
    both_nan = out.isnan() & wanted.isnan()
    assert bool((both_nan | (out.float() == wanted.float())).all())


@pytest.mark.parametrize("pair", NARROW, ids=name_of)
def test_float32_is_rounded_to_nearest_even(pair: tuple[Any, torch.dtype]) -> None:
    kind, dtype = pair
    x = values()
    if kind is tl.float16:
        x = x.clamp(-6e4, 6e4)
    wanted = saturated(x, dtype)
    out = torch.empty(256, dtype=dtype)
    run(_cast, x, out, 256)
    assert_same(out, wanted)
    back = torch.empty(256)
    run(_round_trip, x, back, kind, 256)
    assert_same(back, wanted.float())


@pytest.mark.parametrize("pair", NARROW, ids=name_of)
def test_narrow_floats_widen_exactly(pair: tuple[Any, torch.dtype]) -> None:
    kind, dtype = pair
    bits = torch.uint8 if dtype.itemsize == 1 else torch.uint16
    codes = torch.arange(2 ** (8 * dtype.itemsize)).to(bits)
    out = torch.empty(len(codes))
    run(_from_bits, codes, out, kind, len(codes))
    assert_same(out, codes.view(dtype).float())
    run(_cast, codes.view(dtype), out, len(codes))
    assert_same(out, codes.view(dtype).float())


@pytest.mark.parametrize("pair", FP8, ids=name_of)
def test_fp8_keeps_nan_and_saturates_infinity(pair: tuple[Any, torch.dtype]) -> None:
    dtype = pair[1]
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 1.0])
    out = torch.empty(4, dtype=dtype)
    run(_cast, x, out, 4)
    limit = torch.finfo(dtype).max
    assert out[0].isnan() and out[1:].tolist() == [limit, -limit, 1.0]


@pytest.mark.parametrize("op", ["add", "mul", "neg", "less", "scale"])
def test_bfloat16_arithmetic(op: str) -> None:
    x, y = values().bfloat16(), values().flip(0).bfloat16()
    out = torch.empty_like(x)
    run(_arithmetic, x, y, out, op, 256)
    wanted = {
        "add": x + y,
        "mul": x * y,
        "neg": -x,
        "less": torch.minimum(x, y),
        "scale": x * 1.5,
    }
    assert_same(out, wanted[op])


def test_whole_numbers_become_bfloat16_and_back() -> None:
    x = torch.arange(-128, 128, dtype=torch.int32) * 3
    out = torch.empty(256, dtype=torch.bfloat16)
    run(_from_int, x, out, 256)
    assert_same(out, x.bfloat16())
    back = torch.empty(256, dtype=torch.int32)
    run(_to_int, out, back, 256)
    assert torch.equal(back, x.bfloat16().int())


def test_nan_is_no_minimum() -> None:
    x = torch.tensor([float("nan"), 0.5, 2.0, float("nan")])
    out = torch.empty(4)
    run(_smaller, x, out, 4)
    assert out.tolist() == [1.0, 0.5, 1.0, 1.0]
    run(_clamped, x, out, 4)
    assert out.tolist() == [-1.0, 0.5, 1.0, -1.0]


@pytest.mark.parametrize("pair", [(tl.float32, torch.float32), *NARROW], ids=name_of)
def test_dot_of_floats(pair: tuple[Any, torch.dtype]) -> None:
    torch.manual_seed(0)
    a, b = (torch.randn(16, 16).to(pair[1]) for _ in range(2))
    out = torch.empty(16, 16)
    run(_dot, a, b, out, tl.float32, 16, 16)
    torch.testing.assert_close(out, a.float() @ b.float())


def test_dot_of_int8() -> None:
    a, b = (torch.randint(-128, 127, (32, 32), dtype=torch.int8) for _ in range(2))
    out = torch.empty(32, 32, dtype=torch.int32)
    run(_dot, a, b, out, tl.int32, 32, 32)
    assert torch.equal(out, a.int() @ b.int())


def test_shapes_are_moved_as_written() -> None:
    x = torch.randint(0, 16, (64,), dtype=torch.uint8)
    out = torch.empty(32, dtype=torch.uint8)
    run(_nibbles, x, out, 32)
    assert torch.equal(out, x[0::2] | (x[1::2] << 4))
    y, mixed = torch.randn(64), torch.empty(64)
    run(_halves, y, mixed, 32)
    assert torch.equal(mixed, torch.cat((y[:32] + y[32:], y[:32] - y[32:])))


def test_tables_are_looked_up() -> None:
    table, index = torch.randn(16), torch.randint(0, 16, (64,), dtype=torch.int32)
    out = torch.empty(64)
    run(_looked_up, table, index, out, 16, 64)
    assert torch.equal(out, table[index.long()])


def test_division_of_whole_numbers_truncates() -> None:
    x = torch.arange(-32, 32, dtype=torch.int32)
    out = torch.empty(64, dtype=torch.int32)
    run(_divided, x, out, 3, 64)
    quotient = torch.div(x, 3, rounding_mode="trunc")
    assert torch.equal(out, quotient * 100 + torch.fmod(x, 3))


def test_installing_twice_changes_nothing() -> None:
    before = interpreter.Builder.binary_op
    interpreter.install()
    assert interpreter.Builder.binary_op is before
