"""Weights in panels: packing, products and look-ups against plain torch."""

import math

import pytest
import torch
import torch.nn.functional as F

from vllm.model_executor.layers.panel_weight import PanelWeight, count_holder
from vllm.v1.attention.ops import cpu_kernels

pytestmark = [
    pytest.mark.skipif(
        not cpu_kernels.available(), reason=cpu_kernels.why_unavailable()
    ),
    pytest.mark.usefixtures("isa"),
]

# Error of the largest output, which counts as a normal number: below them, a type has
# fewer digits.
DTYPES = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 8e-3}
SHAPES = [(1, 1), (32, 2), (33, 7), (70, 40), (96, 64), (256, 1025)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_what_was_packed_is_read_back(shape, dtype: torch.dtype) -> None:
    weight = torch.randn(shape).to(dtype)
    packed = PanelWeight(weight)
    assert torch.equal(packed.to_dense(), weight)
    ids = torch.randint(shape[0], (9,))
    assert torch.equal(packed.rows(ids), weight[ids])
    transposed = torch.randn(shape[::-1]).to(dtype).T
    assert torch.equal(PanelWeight(transposed).to_dense(), transposed)


PLACES = {
    "small": (1 << 6, 6),
    "exact": (1 << 12, 2050),
    "a panel too short": ((1 << 12) + 1, 2050),
    "half a unit": (1 << 13, 1025),
}


@pytest.mark.parametrize("dropped_by", [0, 1, 2])
@pytest.mark.parametrize("holders", [0, 1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", PLACES)
def test_a_weight_is_packed_in_place_only_if_all_its_holders_drop_it(
    shape: str, dtype: torch.dtype, holders: int, dropped_by: int
) -> None:
    weight = torch.arange(math.prod(PLACES[shape]), dtype=torch.int32)
    weight = (weight % 251).to(dtype).view(PLACES[shape])
    before = weight.clone()
    parameter = torch.nn.Parameter(weight, requires_grad=False)
    for _ in range(holders):
        count_holder(parameter)
    packed = PanelWeight(parameter, dropped_by)
    fits = shape in ("small", "exact") or (
        shape == "half a unit" and dtype == torch.float32
    )
    in_place = packed.data.data_ptr() == weight.data_ptr()
    assert in_place == (fits and holders == dropped_by > 0)
    assert in_place or torch.equal(weight, before)
    assert torch.equal(packed.to_dense(), before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 8, 33, 300])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("biased", [False, True])
def test_products_equal_torch(shape, rows: int, dtype: torch.dtype, biased) -> None:
    outputs, inputs = shape
    weight, x = torch.randn(shape).to(dtype), torch.randn(rows, inputs).to(dtype)
    bias = torch.randn(outputs).to(dtype) if biased else None
    expected = F.linear(x.double(), weight.double(), bias.double() if biased else None)
    found = PanelWeight(weight).linear(x, bias)
    assert found.dtype == dtype
    largest = expected.abs().max().clamp_min(torch.finfo(dtype).tiny)
    assert (found.double() - expected).abs().max() <= DTYPES[dtype] * largest


def every_half() -> torch.Tensor:
    """All float16 but NaN: zeros, subnormals and infinities included."""
    halves = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16)
    return halves[~halves.isnan()]


@pytest.mark.parametrize("first", [True, False], ids=["first", "second"])
def test_every_float16_is_widened_exactly(first: bool) -> None:
    """As weights, in both places of a unit, and as inputs."""
    halves = every_half()
    zeros = torch.zeros_like(halves)
    pair = torch.stack([halves, zeros] if first else [zeros, halves], 1)
    one = torch.tensor([[1.0, 0.0] if first else [0.0, 1.0]]).half()
    products = PanelWeight(pair).linear(one, None)[0]
    assert torch.equal(products, halves)
    assert torch.equal(PanelWeight(one).linear(pair, None)[:, 0], halves)
    assert PanelWeight(one * torch.nan).linear(pair[:40], None).isnan().all()


def test_float16_sums_are_rounded_once_and_overflow_to_infinity() -> None:
    """Of whole numbers, whose sums are exact: to the bit, up to beyond 65504."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-200, 200, (70, 45), generator=generator)
    x = torch.randint(-200, 200, (50, 45), generator=generator)
    x[::3] //= 30
    expected = (x @ weight.T).double().half()
    assert expected.isinf().any()
    assert (expected.abs() > 2**11).any()
    found = PanelWeight(weight.half()).linear(x.half(), None)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    weight = PanelWeight(torch.randn(70, 90).to(dtype))
    x = torch.randn(200, 90).to(dtype)
    together = weight.linear(x, None)
    for count in (1, 2, 7, 13):
        assert torch.equal(weight.linear(x[:count], None), together[:count])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_bits_do_not_depend_on_threads(threads: int) -> None:
    weight, x = PanelWeight(torch.randn(640, 512)), torch.randn(37, 512)
    before = torch.get_num_threads()
    expected = weight.linear(x, None)
    torch.set_num_threads(threads)
    try:
        assert torch.equal(weight.linear(x, None), expected)
    finally:
        torch.set_num_threads(before)


def test_inputs_may_be_strided_and_have_any_rank() -> None:
    weight = PanelWeight(torch.randn(24, 32).bfloat16())
    wide = torch.randn(5, 67).bfloat16()
    for part in (wide[:, :32], wide[:, 3:35], wide[::2, 1:33]):
        assert torch.equal(
            weight.linear(part, None), weight.linear(part.contiguous(), None)
        )
    cube = torch.randn(2, 3, 32).bfloat16()
    flat = weight.linear(cube.view(6, 32), None)
    assert torch.equal(weight.linear(cube, None).view(6, 24), flat)
    assert weight.linear(wide[:0, :32], None).shape == (0, 24)


def test_what_does_not_fit_is_refused() -> None:
    weight = PanelWeight(torch.randn(8, 4))
    with pytest.raises(ValueError, match=r"float64.*float32, bfloat16 or float16"):
        PanelWeight(torch.zeros(8, 4, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"\(2, 5\)"):
        weight.linear(torch.zeros(2, 5), None)
    with pytest.raises(ValueError, match="bfloat16"):
        weight.linear(torch.zeros(2, 4).bfloat16(), None)
    for outside in (-1, 8):
        with pytest.raises(IndexError, match="8 rows"):
            weight.rows(torch.tensor([0, outside]))
