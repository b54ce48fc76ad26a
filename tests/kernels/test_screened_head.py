"""The screened head finds the token of the logits, whatever weights and rows are."""

from collections.abc import Callable

import pytest
import torch

from vllm.model_executor.layers import screened_head
from vllm.model_executor.layers.panel_weight import PANEL, PanelWeight
from vllm.model_executor.layers.screened_head import ScreenedHead
from vllm.v1.attention.ops import cpu_kernels

pytestmark = pytest.mark.skipif(
    not cpu_kernels.available(), reason=cpu_kernels.why_unavailable()
)

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(1, 1), (33, 7), (70, 40), (1000, 129), (4096, 576)]


def screened(weight: torch.Tensor, outputs: int | None = None) -> ScreenedHead:
    panels = PanelWeight(weight)
    if not screened_head.serves(panels):
        pytest.skip("these instructions have no screen")
    return ScreenedHead(panels, outputs or weight.shape[0])


def first_largest(logits: torch.Tensor) -> torch.Tensor:
    """NaN passed over; 0 where there is nothing else."""
    known = logits.float().nan_to_num(nan=-float("inf"), posinf=float("inf"))
    return torch.from_numpy(known.numpy().argmax(1))


def check(head: ScreenedHead, x: torch.Tensor) -> None:
    logits = head.weight.linear(x, None)[:, : head.outputs]
    assert torch.equal(head.likeliest(x), first_largest(logits))


def with_outliers(x: torch.Tensor) -> torch.Tensor:
    """As hidden states have them: a few elements far beyond the others."""
    x = x.clone()
    x[:, ::37] *= 40
    return x


def with_one_outlier(x: torch.Tensor) -> torch.Tensor:
    """Most of a row's length is in one element, another one in each row."""
    x = x.clone()
    rows = torch.arange(x.shape[0])
    x[rows, (rows + 1) * -5 % x.shape[1]] = 300.0
    return x


def poison(panels: torch.Tensor, which: torch.Tensor) -> None:
    """These panels would win, were they read."""
    panels[which] = (torch.randn_like(panels[which].float()) * 1e4).to(panels.dtype)


def nearly_tied(weight: torch.Tensor) -> torch.Tensor:
    return weight[:1] + weight * 1e-3


def in_pairs(weight: torch.Tensor) -> torch.Tensor:
    """Every row again, far away: the first one counts."""
    half = weight.shape[0] // 2
    return torch.cat([weight[:half], weight[:half], weight[2 * half :]])


def of_many_sizes(weight: torch.Tensor) -> torch.Tensor:
    sizes = 10.0 ** (torch.arange(weight.shape[0]) % 40 - 20).float()
    return weight * sizes[:, None]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 8, 20, 64])
@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_are_those_of_the_logits(shape, rows: int, dtype: torch.dtype) -> None:
    head = screened(torch.randn(shape).to(dtype))
    x = torch.randn(rows, shape[1])
    check(head, x.to(dtype))
    check(head, with_outliers(x).to(dtype))
    check(head, with_one_outlier(x).to(dtype))
    check(head, with_one_outlier(torch.zeros_like(x)).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("change", [nearly_tied, in_pairs, of_many_sizes])
def test_close_and_equal_logits_are_told_apart(
    change: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> None:
    head = screened(change(torch.randn(900, 96)).to(dtype))
    for scale in (1e-6, 1.0, 1e6):
        check(head, (torch.randn(12, 96) * scale).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_which_nothing_is_known_are_computed_whole(dtype: torch.dtype) -> None:
    head = screened(torch.randn(300, 64).to(dtype))
    x = torch.randn(9, 64)
    x[1] = 0.0
    x[2, 5] = float("nan")
    x[3, 5] = float("inf")
    x[4] = 1e-30
    x[5] *= 1e25
    x[6] = torch.finfo(dtype).max
    check(head, x.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_that_are_not_finite_count(dtype: torch.dtype) -> None:
    weight = torch.randn(300, 64)
    weight[7] = 0.0
    weight[40, 3] = float("inf")
    weight[90, 3] = float("nan")
    weight[200] = torch.finfo(dtype).max
    weight[250] = 1e-30
    head = screened(weight.to(dtype))
    x = torch.randn(40, 64)
    check(head, x.to(dtype))
    x[:, 3] = 100.0
    check(head, x.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outputs", [1, 31, 32, 70, 96])
def test_rows_beyond_the_outputs_are_never_chosen(outputs, dtype: torch.dtype) -> None:
    weight = -torch.rand(96, 40)  # of rows of ones every logit is negative
    weight[outputs:] = 1.0
    head = screened(weight.to(dtype), outputs)
    check(head, torch.ones(5, 40, dtype=dtype))
    check(head, torch.randn(5, 40).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_panels_that_cannot_win_are_not_read(dtype: torch.dtype) -> None:
    weight = torch.randn(40 * PANEL, 256)
    x = torch.randn(20, 256)
    weight[5 * PANEL] = x[:10].mean(0) * 10
    weight[9 * PANEL] = x[10:].mean(0) * 10
    head = screened(weight.to(dtype))
    expected = head.likeliest(x.to(dtype))
    others = torch.ones(40, dtype=torch.bool)
    others[[5, 9]] = False
    poison(head.weight.data[:], others)
    assert torch.equal(head.likeliest(x.to(dtype)), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_outliers_and_all_that_is_alike_are_ruled_out(dtype: torch.dtype) -> None:
    """Weights that have a direction in common, and rows that point against it."""
    common = torch.randn(512)
    weight = (common + 0.5 * torch.randn(60 * PANEL, 512)) / 100
    weight[33 * PANEL] += 0.004
    x = torch.ones(9, 512) - 0.05 * common
    x[:, 77] = 1500.0
    weight[:, 77] = -0.01
    head = screened(weight.to(dtype))
    expected = first_largest(head.weight.linear(x.to(dtype), None))
    others = torch.ones(60, dtype=torch.bool)
    others[expected // PANEL] = False
    # What an outlier is multiplied with is read of every panel.
    step = 77 * weight.to(dtype).element_size() // 4
    panels = head.weight.data.view(60, -1, PANEL * 4 // weight.to(dtype).element_size())
    kept = panels[:, step].clone()
    poison(panels, others)
    panels[:, step] = kept
    assert torch.equal(head.likeliest(x.to(dtype)), expected)


def test_bits_do_not_depend_on_threads() -> None:
    head = screened(torch.randn(5000, 192).bfloat16())
    x = torch.randn(30, 192).bfloat16()
    before = torch.get_num_threads()
    expected = head.likeliest(x)
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(head.likeliest(x), expected)
    finally:
        torch.set_num_threads(before)


def test_no_rows_have_no_tokens() -> None:
    assert screened(torch.randn(64, 32)).likeliest(torch.empty(0, 32)).shape == (0,)


def test_wrong_arguments_are_refused() -> None:
    head = screened(torch.randn(64, 32))
    with pytest.raises(ValueError, match=r"expected torch\.float32 \[tokens, 32\]"):
        head.likeliest(torch.randn(3, 31))
    with pytest.raises(ValueError, match=r"x is torch\.bfloat16"):
        head.likeliest(torch.randn(3, 32).bfloat16())
    for outputs in (0, 65):
        with pytest.raises(ValueError, match=f"outputs is {outputs}: expected 1 to 64"):
            ScreenedHead(head.weight, outputs)


def test_instructions_without_products_of_bytes_have_no_screen(isa: str) -> None:
    weight = PanelWeight(torch.randn(64, 32))
    assert screened_head.serves(weight) == (isa == "avx512")
    if isa != "avx512":
        with pytest.raises(ValueError, match="cannot be screened on this machine"):
            ScreenedHead(weight, 64)
