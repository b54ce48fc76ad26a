"""Operations on heads compute what torch does, alone, whatever the sizes, types,
threads and instruction set."""

import ctypes
from collections.abc import Callable

import numpy as np
import pytest
import torch

from vllm.model_executor.step import Slot, StepTrace, head_ops, ops, records
from vllm.v1.attention.ops import cpu_kernels
from vllm.v1.kv_formats.hadamard import inverse_rht, rht, rht_signs

pytestmark = [
    pytest.mark.skipif(
        not cpu_kernels.available(), reason=cpu_kernels.why_unavailable()
    ),
    pytest.mark.usefixtures("isa"),
]

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 8e-3}
TOKENS, POSITIONS = 7, 50


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def ran(x: torch.Tensor, body: Callable[[Slot], Slot]) -> torch.Tensor:
    """What `body` makes of x [TOKENS, size], traced and run once, with token i at
    position 3 i. A step's rows come from a table of embeddings: here from x."""
    trace = StepTrace(x.dtype, TOKENS, TOKENS, {})
    result = body(ops.embed_dense(trace.token_ids, x))
    table = trace.finish([result])
    tokens = torch.arange(TOKENS)
    positions = tokens * 3
    wanted = np.zeros(1, dtype=np.int32)
    inputs = records.StepInputs(
        tokens.data_ptr(),
        positions.data_ptr(),
        wanted.ctypes.data,
        ctypes.POINTER(records.StepBatch)(),
        TOKENS,
        1,
        0,
    )
    step = records.step_function()
    assert step is not None
    if status := step(table, len(table), inputs):
        records.raise_for(status)
    return trace.tensor(result).clone()


def check(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype
    scale = float(expected.float().abs().max())
    error = (found.float() - expected.float()).abs().max()
    assert float(error) <= TOLERANCE[expected.dtype] * scale


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("heads", "k", "n", "more"), [(3, 24, 40, 8), (1, 7, 33, 0)])
def test_every_head_has_a_weight_of_its_own(dtype, heads, k, n, more) -> None:
    x = random(TOKENS, heads * (k + more)).to(dtype)
    weight = random(heads, n, k, seed=1).to(dtype)

    def body(rows: Slot) -> Slot:
        split = rows.unflatten(1, (heads, k + more))
        beside = split[:, :, k:] if more else None
        weights = head_ops.HeadWeights(weight)
        return head_ops.head_linear(split[:, :, :k], weights, beside).flat()

    split = x.unflatten(1, (heads, -1))
    product = torch.einsum("thk,hnk->thn", split[..., :k].double(), weight.double())
    expected = torch.cat([product.to(dtype), split[..., k:]], -1).flatten(1)
    found = ran(x, body)
    check(found, expected)
    kept = found.unflatten(1, (heads, n + more))[..., n:]
    assert torch.equal(kept, split[..., k:])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rows_are_joined(dtype) -> None:
    x = random(TOKENS, 50).to(dtype)
    found = ran(x, lambda rows: head_ops.joined(rows[:, 13:], rows[:, :13]).flat())
    assert torch.equal(found, torch.cat([x[:, 13:], x[:, :13]], -1))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [96, 576, 40])
def test_rotations_are_those_of_the_formats_and_undo_each_other(dtype, size) -> None:
    heads, block = 2, size & -size
    x = random(TOKENS, heads * size).to(dtype)
    signs = rht_signs(size)[:block].contiguous()

    def turned(rows: Slot, *modes: int) -> Slot:
        by_head = rows.unflatten(1, (heads, size))
        for mode in modes:
            by_head = head_ops.turn(by_head, signs, mode)
        return by_head.flat()

    exact = x.unflatten(1, (heads, size)).double()
    found = ran(x, lambda rows: turned(rows, records.SIGNS_FIRST))
    check(found, (rht(exact) / block).flatten(1).to(dtype))
    found = ran(x, lambda rows: turned(rows, records.SIGNS_LAST))
    check(found, inverse_rht(exact).flatten(1).to(dtype))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rows_are_widened_scaled_spread_and_summed(dtype) -> None:
    x, factors = random(TOKENS, 45).to(dtype), random(POSITIONS, seed=2)
    assert torch.equal(ran(x, head_ops.widen), x.float())
    scaled = ran(x, lambda rows: head_ops.scale_by_position(rows, factors))
    check(scaled, (x * factors[torch.arange(TOKENS) * 3, None]).to(dtype))

    def sums(rows: Slot) -> Slot:
        weights = head_ops.widen(rows)[:, :3]
        return head_ops.sum_heads(head_ops.spread(rows, weights))

    products = x[:, None] * x[:, :3, None]
    check(ran(x, sums), products.float().sum(1).to(dtype))


def test_positions_beyond_the_table_of_factors_are_refused() -> None:
    x, last = random(TOKENS, 32), 3 * (TOKENS - 1)
    ran(x, lambda rows: head_ops.scale_by_position(rows, torch.ones(last + 1)))
    with pytest.raises(ValueError, match="token 6 of the step lies beyond the table"):
        ran(x, lambda rows: head_ops.scale_by_position(rows, torch.ones(last)))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [1, 5, 16, 45, 1000])
def test_the_largest_of_a_row_is_the_first_of_equal_ones(dtype, size) -> None:
    x = random(TOKENS, size).to(dtype)
    x[1] = 0.0
    x[2] = -1.0
    x[3, size // 2 :] = 9.0
    x[4, -1] = 9.0
    x[5] = float("-inf")
    x[6, 0] = float("nan")
    found = ran(x, head_ops.largest).squeeze(1)
    assert torch.equal(found[:6], torch.from_numpy(x[:6].float().numpy().argmax(1)))
    rest = x[6, 1:].float().numpy()
    assert found[6] == (1 + rest.argmax() if len(rest) else 0)
