"""Paged attention in C++ equals attention in torch, on every instruction set."""

from collections.abc import Callable

import pytest
import torch

from tests.kernels.cpu_attention_cases import (
    DTYPES,
    Batch,
    Options,
    isas,
    needs_library,
    using_isa,
)
from vllm.v1.attention.ops import cpu_kernels

__all__ = ["using_isa"]  # a fixture

pytestmark = needs_library

PLAIN = Options()
HEAD_SIZES = ((32, 32), (64, 64), (80, 80), (96, 96), (128, 128), (192, 128))
LARGE_HEAD_SIZES = ((256, 256), (512, 512), (72, 40), (576, 512))
OPTIONS = {
    "plain": PLAIN,
    "window": Options(sliding_window=40),
    "window of one": Options(sliding_window=1),
    "soft cap": Options(soft_cap=2.0),
    "sinks": Options(sinks=torch.linspace(-3, 3, 6)),
    "both ways": Options(causal=False),
    "window both ways": Options(causal=False, sliding_window=20),
    "all": Options(sliding_window=90, soft_cap=4.0, sinks=torch.linspace(-1, 6, 6)),
}

Choose = Callable[[str], str]


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_option_equals_the_reference(
    isa: str, dtype: torch.dtype, options: Options, using_isa: Choose
) -> None:
    using_isa(isa)
    Batch(dtype=dtype).check(options)


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("sizes", HEAD_SIZES + LARGE_HEAD_SIZES)
def test_head_sizes(isa: str, sizes: tuple[int, int], using_isa: Choose) -> None:
    using_isa(isa)
    for dtype in DTYPES:
        requests = ((1, 130), (9, 40))
        key, value = sizes
        Batch(
            dtype=dtype, head_size=key, head_size_v=value, kv_heads=1, requests=requests
        ).check(PLAIN)


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 71])
def test_query_heads_per_kv_head(isa: str, group: int, using_isa: Choose) -> None:
    using_isa(isa)
    for dtype in DTYPES:
        requests = ((1, 70), (2, 5))
        Batch(dtype=dtype, group=group, head_size=32, requests=requests).check(PLAIN)


@pytest.mark.parametrize("block_size", [1, 16, 48, 64, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_block_sizes(block_size: int, dtype: torch.dtype) -> None:
    Batch(dtype=dtype, block_size=block_size).check(Options(sliding_window=300))


@pytest.mark.parametrize("query_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_query_and_cache_dtypes_mix(
    query_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    batch = Batch(dtype=dtype, query_dtype=query_dtype)
    out, expected = batch.run(PLAIN), batch.expected(PLAIN)
    assert out.dtype == query_dtype
    torch.testing.assert_close(out.double(), expected, atol=8e-3, rtol=8e-3)


@pytest.mark.parametrize("order", ["states first", "padded blocks", "padded cells"])
def test_strides_of_pages_are_free(order: str) -> None:
    batch = Batch(dtype=torch.bfloat16)
    expected = batch.run(PLAIN)
    blocks, heads, states, cell = batch.pages.shape
    if order == "states first":  # [B, N, H, C] in memory
        moved = batch.pages.transpose(1, 2).contiguous().transpose(1, 2)
    elif order == "padded blocks":
        moved = torch.full((blocks, heads * states * cell + 96), 255, dtype=torch.uint8)
        moved = moved[:, : heads * states * cell].view(batch.pages.shape)
    else:
        moved = torch.full((blocks, heads, states, cell + 32), 255, dtype=torch.uint8)
        moved = moved[..., :cell]
    moved.copy_(batch.pages)
    assert moved.stride() != batch.pages.stride()
    batch.pages = moved
    assert torch.equal(batch.run(PLAIN), expected)


def test_query_and_output_may_be_slices_of_wider_rows() -> None:
    batch = Batch(dtype=torch.bfloat16)
    expected = batch.run(PLAIN)
    tokens, heads, size = batch.query.shape
    wide = torch.zeros(tokens, heads * size + 128, dtype=torch.bfloat16)
    wide[:, : heads * size] = batch.query.flatten(1)
    batch.query = wide[:, : heads * size].view(tokens, heads, size)
    out = torch.zeros(tokens, heads, 2 * size, dtype=torch.bfloat16)[..., :size]
    assert torch.equal(batch.run(PLAIN, out=out), expected)


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_has_the_same_bits_in_any_batch_and_chunk(
    isa: str, dtype: torch.dtype, using_isa: Choose
) -> None:
    using_isa(isa)
    batch = Batch(dtype=dtype, requests=((150, 1150),), group=7, kv_heads=1)
    together = batch.run(PLAIN)
    query = batch.query
    for begin, end in ((0, 1), (1, 4), (4, 40), (149, 150)):
        batch.query = query[begin:end]
        batch.query_start_loc = torch.tensor([0, end - begin], dtype=torch.int32)
        batch.seq_lens = torch.tensor([1000 + end], dtype=torch.int32)
        assert torch.equal(batch.run(PLAIN), together[begin:end])


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_bits_do_not_depend_on_threads(options: Options) -> None:
    batch = Batch(dtype=torch.bfloat16, requests=((1, 2900), (3, 1300), (40, 700)))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = batch.run(options)
        torch.set_num_threads(3)
        assert torch.equal(batch.run(options), alone)
    finally:
        torch.set_num_threads(before)
    batch.check(options)


def test_pages_outside_the_window_are_never_touched() -> None:
    options = Options(sliding_window=33)
    batch = Batch(dtype=torch.float32, requests=((1, 700), (4, 300)))
    expected = batch.run(options)
    for request, (new, length) in enumerate(batch.requests):
        first = (length - new - 32) // batch.block_size
        freed = batch.block_table[request, :first].clone()
        batch.pages.view(torch.float32)[freed.long()] = float("nan")
        batch.block_table[request, :first] = -1
    assert torch.equal(batch.run(options), expected)


def test_states_past_the_sequence_are_never_touched() -> None:
    batch = Batch(dtype=torch.bfloat16, requests=((1, 17), (3, 35)))
    expected = batch.run(PLAIN)
    for request, (_, length) in enumerate(batch.requests):
        last = batch.block_table[request, (length - 1) // batch.block_size]
        states = batch.pages.view(torch.bfloat16)[last]
        states[:, length % batch.block_size :] = float("nan")
    assert torch.equal(batch.run(PLAIN), expected)


def test_extreme_logits_keep_the_softmax_finite() -> None:
    batch = Batch(dtype=torch.float32)
    batch.query *= 5
    batch.check(PLAIN)
    batch.query *= 1e6
    assert batch.run(PLAIN).isfinite().all()
    batch.query *= 0
    batch.check(PLAIN)


def test_nan_in_a_query_stays_in_its_row() -> None:
    batch = Batch(dtype=torch.bfloat16)
    expected = batch.run(PLAIN)
    batch.query[3, 1, 5] = float("nan")
    out = batch.run(PLAIN)
    assert out[3, 1].isnan().all()
    out[3, 1] = expected[3, 1]
    assert torch.equal(out, expected)


def test_empty_batches_and_requests_write_nothing() -> None:
    Batch(dtype=torch.float32, requests=()).run(PLAIN)
    batch = Batch(dtype=torch.float32, requests=((0, 20), (2, 20), (0, 0)))
    batch.check(PLAIN)


def test_rows_past_the_last_request_are_left_alone() -> None:
    batch = Batch(dtype=torch.float32, requests=((2, 20), (1, 5)))
    batch.query = torch.cat((batch.query, torch.ones(4, *batch.query.shape[1:])))
    out = batch.run(PLAIN)
    assert out[3:].isnan().all() and not out[:3].isnan().any()


def test_queries_that_see_nothing_give_zero() -> None:
    batch = Batch(dtype=torch.float32, requests=((4, 2),))  # the first two see no key
    batch.block_table[:] = 0
    out = batch.run(PLAIN)
    assert (out[:2] == 0).all() and (out[2:] != 0).all()


def _changed(**changes: object) -> Batch:
    batch = Batch(dtype=torch.float32, requests=((2, 20), (1, 5)))
    for name, value in changes.items():
        setattr(batch, name, value)
    return batch


def _int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


WRONG = {
    "request 1 .* outside the cache": {"block_table": _int32(0, 1, 99, 0).view(2, 2)},
    "request 0 .* outside the cache": {"block_table": _int32(-1, 1, 1, 0).view(2, 2)},
    "request 0 .* block table covers": {"seq_lens": _int32(99999, 5)},
    "request 1 .* block table covers": {"seq_lens": _int32(20, -5)},
    "request 1 .* query_start_loc must ascend": {"query_start_loc": _int32(0, 2, 1)},
    "request 1 .* at most the query's rows": {"query_start_loc": _int32(0, 2, 9)},
    "expected R, R . 1 and R": {"seq_lens": _int32(5)},
    "seq_lens is torch.int64": {"seq_lens": torch.tensor([20, 5])},
    "cells of .* bytes do not hold": {"head_size_v": 32, "dtype": torch.float32},
    "cache dtype torch.int8": {"dtype": torch.int8},
    "query is torch.float64": {"query": torch.zeros(3, 6, 64).double()},
    "query has shape": {"query": torch.zeros(3, 384)},
    "4 query heads do not divide": {
        "query": torch.zeros(3, 4, 64),
        "pages": torch.zeros(9, 3, 16, 512, dtype=torch.uint8),
    },
    "pages have shape": {"pages": torch.zeros(9, 2, 512, dtype=torch.uint8)},
    "pages is torch.float32": {"pages": torch.zeros(9, 2, 16, 512)},
}


@pytest.mark.parametrize("message", WRONG)
def test_arguments_that_do_not_fit_are_refused_before_writing(message: str) -> None:
    batch = _changed(**WRONG[message])
    out = torch.full((*batch.query.shape[:2], batch.head_size_v), 7.0)
    with pytest.raises(ValueError, match=message):
        batch.run(PLAIN, out=out)
    assert (out == 7.0).all()


def test_an_instruction_set_the_processor_lacks_is_refused() -> None:
    before = cpu_kernels.isa()
    with pytest.raises(ValueError, match="VLLM_CPU_ISA='mmx'"):
        cpu_kernels.choose_isa("mmx")
    assert cpu_kernels.isa() == before
