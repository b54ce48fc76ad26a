"""Operations on whole rows compute what the layers do that emit them, element by
element, in every type and instruction set."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tests.model_executor.test_step_head_ops import TOKENS, ran, random
from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul
from vllm.model_executor.layers.fused_moe.routing import Routing
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, PlainRMSNorm, RMSNorm
from vllm.model_executor.layers.panel_weight import PanelWeight
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.step import NotPlanned, StepTrace, ops
from vllm.v1.attention.ops import cpu_kernels

pytestmark = [
    pytest.mark.skipif(
        not cpu_kernels.available(), reason=cpu_kernels.why_unavailable()
    ),
    pytest.mark.usefixtures("isa"),
]

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SIZES = [1, 5, 16, 45, 192]
# Torch's own float32 functions differ from ours by so much, relative and absolute,
# before a result is rounded to its type.
FLOAT_ERROR = 5e-6
POSITIONS = torch.arange(TOKENS) * 3


def check(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for the last bit of a few elements, infinities included."""
    assert found.dtype == expected.dtype
    last_bit = 0.0 if found.dtype is torch.float32 else torch.finfo(found.dtype).eps
    torch.testing.assert_close(
        found, expected, rtol=last_bit + FLOAT_ERROR, atol=FLOAT_ERROR, equal_nan=True
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", [RMSNorm, GemmaRMSNorm, PlainRMSNorm])
def test_norms(kind, size: int, dtype: torch.dtype) -> None:
    norm = kind(size, 1e-5)
    for param in norm.parameters():
        param.data = random(size, seed=3).to(dtype)
    x = random(TOKENS, size).to(dtype)
    check(ran(x, norm), norm(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", [RMSNorm, GemmaRMSNorm])
def test_norms_add_residuals_that_are_rounded_first(kind, dtype: torch.dtype) -> None:
    norm = kind(45, 1e-5)
    norm.weight.data = random(45, seed=3).to(dtype)
    x = random(TOKENS, 90).to(dtype)
    normed, summed = norm(x[:, :45], x[:, 45:])
    check(ran(x, lambda rows: norm(rows[:, :45], rows[:, 45:])[0]), normed)
    assert torch.equal(ran(x, lambda rows: norm(rows[:, :45], rows[:, 45:])[1]), summed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("neox", [True, False], ids=["halves", "pairs"])
@pytest.mark.parametrize(("size", "part"), [(64, 1.0), (40, 0.5), (6, 1.0)])
def test_rotations(size: int, part: float, neox: bool, dtype: torch.dtype) -> None:
    rope = get_rope(size, 64, neox, {"partial_rotary_factor": part}, dtype)
    x = random(TOKENS, 3 * size).to(dtype)
    expected = rope.rotate(x.view(TOKENS, 3, size), rope.rows(POSITIONS)).flatten(1)
    found = ran(x, lambda rows: rope.emit(rows.unflatten(1, (3, size))).flat())
    check(found, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "act", [SiluAndMul(), GeluAndMul(), GeluAndMul("tanh")], ids=["silu", "erf", "tanh"]
)
def test_gates(act, size: int, dtype: torch.dtype) -> None:
    x = (random(TOKENS, 2 * size) * 3).to(dtype)
    check(ran(x, act), act(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_sums_scales_and_caps(size: int, dtype: torch.dtype) -> None:
    x = (random(TOKENS, size) * 9).to(dtype)
    assert torch.equal(ran(x, lambda rows: rows + rows), x + x)
    assert torch.equal(ran(x, lambda rows: rows * 1.7), x * 1.7)
    check(ran(x, lambda rows: ops.soft_cap(rows, 3.0)), torch.tanh(x / 3.0) * 3.0)
    assert torch.equal(ran(x, ops.pick)[0], x[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(33, 7), (70, 40), (96, 64)])
def test_products_and_rows_of_panels(shape, dtype: torch.dtype) -> None:
    weight, x = random(*shape, seed=1).to(dtype), random(TOKENS, shape[1]).to(dtype)
    bias = random(shape[0], seed=2).to(dtype)
    panels = PanelWeight(weight)
    exact = F.linear(x.double(), weight.double(), bias.double())
    found = ran(x, lambda rows: ops.linear(rows, panels, bias, "layer"))
    spare = 2**-6 if dtype is torch.bfloat16 else FLOAT_ERROR * 4  # dpbf16 rounds sums
    torch.testing.assert_close(
        found, exact.to(dtype), rtol=torch.finfo(dtype).eps, atol=spare
    )
    table = PanelWeight(x)
    scaled = ran(x, lambda rows: ops.embed_panels(rows.trace.token_ids, table) * 1.7)
    assert torch.equal(scaled, x * 1.7)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "routing",
    [
        Routing(top_k=3, renormalize=True),
        Routing(top_k=1, scoring="sigmoid", scale=2.5),
        Routing(top_k=2, num_groups=4, topk_groups=2),
    ],
    ids=["softmax", "sigmoid", "groups"],
)
def test_routes(routing: Routing, dtype: torch.dtype) -> None:
    """The first of equal logits, which few bits make frequent, is chosen both ways."""
    logits = random(TOKENS, 16).to(dtype)
    logits[1], logits[2, 5:12], logits[3, 9] = 0.5, 3.0, logits[3].max()

    weights, ids = routing.select(logits)
    found = ran(logits, lambda rows: routing.select(rows)[0])
    torch.testing.assert_close(found, weights)
    assert torch.equal(ran(logits, lambda rows: routing.select(rows)[1]), ids)


OVERFLOWS: dict[str, tuple[Callable, Callable]] = {
    "sum": (lambda rows: rows + rows, lambda x: x + x),
    "gate": (SiluAndMul(), SiluAndMul()),
    "scale": (lambda rows: rows * 3.0, lambda x: x * 3.0),
}


@pytest.mark.parametrize("name", OVERFLOWS)
def test_float16_overflows_to_infinity_as_torch_does(name: str) -> None:
    values = [0.0, 1.0, 300.0, 32752.0, 32760.0, 65504.0, 6e-8, 6e-5]
    x = torch.tensor(values).half().repeat(TOKENS, 2)
    x[1::2] *= -1
    planned, eager = OVERFLOWS[name]
    expected = eager(x)
    assert expected.isinf().any()
    assert not expected.isinf().all()
    assert torch.equal(ran(x, planned), expected)


def test_types_without_operations_are_refused() -> None:
    with pytest.raises(NotPlanned, match=r"activations in torch\.float64"):
        StepTrace(torch.float64, 8, 8, {})
