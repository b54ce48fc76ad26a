"""Attention in Triton is the format's own decoding, attended to in float64.

Pages are full of NaN where no state was written, and the block table of invalid ids
where no block belongs to a request.
"""

import ast
import inspect
from typing import Any

import pytest
import torch

from tests.kernels.cpu_attention_cases import needs_library
from tests.kernels.packed_cases import SCALES
from tests.pairwise import grid, pairwise
from tests.triton.attention_cases import (
    DEVICE,
    FORMATS,
    OPTIONS,
    TOLERANCE,
    Case,
    attend,
    masks_of,
    on_device,
    requests_of,
)
from tests.v1.kv_formats.helpers import AXIS_ORDERS
from vllm.v1.attention.ops import cpu_cells, cpu_kernels, triton_loaders
from vllm.v1.attention.ops.triton_batch import Masks, splits_for
from vllm.v1.attention.ops.triton_constants import cell_constants
from vllm.v1.attention.ops.triton_paged import paged_attention
from vllm.v1.kv_formats import by_name

RECORDS = ["fp8_ds_mla", "nvfp4_ds_mla"]
FACTORS = {
    "name": FORMATS,
    "size": [64, 80, 96, 128, 256],
    "page": [16, 64],
    "group": [1, 3, 4, 7, 8],
    "decode": [True, False],
}
# Not paired with formats one by one: types of queries, and what is asked for.
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ASKED = [(options, sinks) for options in OPTIONS for sinks in (False, True)]


def cases_of(chosen: list[dict[str, Any]]) -> list[Case]:
    cases = []
    for i, factors in enumerate(chosen):
        options, sinks = ASKED[i * 5 % len(ASKED)]
        splits = 4 if factors["decode"] and i % 3 == 0 else 1
        cases.append(
            Case(
                **factors,
                dtype=DTYPES[i % len(DTYPES)],
                options=options,
                sinks=sinks,
                splits=splits,
            )
        )
    return cases


@pytest.mark.parametrize("case", cases_of(pairwise(FACTORS)), ids=str)
def test_attention_is_that_of_the_format(case: Case) -> None:
    case.check()


@pytest.mark.slow
@pytest.mark.parametrize("case", cases_of(list(grid(FACTORS))), ids=str)
def test_attention_is_that_of_the_format_everywhere(case: Case) -> None:
    case.check()


@pytest.mark.parametrize("order", AXIS_ORDERS)
@pytest.mark.parametrize("name", ["int8_per_token_head", "turboquant_3bit_nc"])
def test_pages_in_every_axis_order(name: str, order: str) -> None:
    Case(name=name, order=order, dtype=torch.float32).check()


@pytest.mark.parametrize("name", ["bfloat16", "fp8_e4m3", "turboquant_k8v4"])
@pytest.mark.parametrize("options", OPTIONS)
def test_whatever_is_asked_for(name: str, options: str) -> None:
    case = Case(name=name, dtype=torch.float32, options=options, sinks=True)
    case.check()


@pytest.mark.parametrize("name", FORMATS)
def test_values_may_be_narrower_than_keys(name: str) -> None:
    Case(name=name, size=96, size_v=40, dtype=torch.float32).check()


@pytest.mark.parametrize("name", ["int8_per_token_head", "turboquant_3bit_nc"])
def test_words_may_lie_on_odd_bytes(name: str) -> None:
    Case(name=name, size=72, size_v=42, dtype=torch.float32).check()


@pytest.mark.parametrize("splits", [2, 3, 8])
def test_a_context_may_be_cut_anywhere(splits: int) -> None:
    kind = {"name": "fp8_e5m2", "group": 1, "dtype": torch.float32}
    for sinks in (False, True):
        Case(**kind, decode=True, splits=splits, sinks=sinks).check()


def test_requests_may_differ_in_causality() -> None:
    batch = Case(name="float32", dtype=torch.float32).batch()
    flags = torch.tensor([i % 2 == 0 for i in range(len(batch.requests))])
    out = torch.empty_like(batch.query, device=DEVICE)
    paged_attention(
        out,
        batch.query.to(DEVICE),
        on_device(batch.pages),
        batch.fmt,
        requests_of(batch),
        batch.head_size**-0.5,
        Masks(causal=flags.to(DEVICE)),
        SCALES,
    )
    for row, flag in enumerate(flags.tolist()):
        options = OPTIONS["plain" if flag else "not causal"]
        start, end = batch.query_start_loc[row : row + 2].tolist()
        expected = batch.expected(options)[start:end]
        error = (out.cpu()[start:end].double() - expected).abs().max()
        assert error <= TOLERANCE[torch.float32] * expected.abs().max()


def test_padding_requests_and_tokens_touch_nothing() -> None:
    batch = Case(name="float32", dtype=torch.float32, decode=True).batch()
    expected = batch.expected(OPTIONS["plain"])
    tokens = len(batch.query)
    batch.query = torch.cat([batch.query, batch.query])
    last = batch.query_start_loc[-1:].repeat(tokens)
    batch.query_start_loc = torch.cat([batch.query_start_loc, last])
    batch.seq_lens = torch.cat([batch.seq_lens, torch.zeros(tokens).int()])
    batch.block_table = batch.block_table.repeat(2, 1)
    out = attend(batch, OPTIONS["plain"])
    error = (out[:tokens].double() - expected).abs().max()
    assert error <= TOLERANCE[torch.float32] * expected.abs().max()
    assert out[tokens:].isnan().all()


@needs_library
@pytest.mark.parametrize(
    "name", [n for n in FORMATS if by_name(n).format_id in cpu_cells.NUMBERS]
)
def test_triton_attends_to_what_the_cpu_wrote(name: str) -> None:
    batch = Case(name=name, decode=True, dtype=torch.float32).batch()
    written = batch.pages.clone()
    torch.manual_seed(3)
    length = batch.requests[0][1]
    key, value = (torch.randn(length, batch.kv_heads, 64) for _ in range(2))
    cpu_kernels.store(
        batch.pages, batch.slots(0, length), key, value, batch.fmt, SCALES
    )
    assert not torch.equal(written, batch.pages)
    out, expected = attend(batch, OPTIONS["plain"]), batch.expected(OPTIONS["plain"])
    error = (out.double() - expected).abs().max() / expected.abs().max()
    assert error <= TOLERANCE[torch.float32]


def test_kernels_name_what_tables_have() -> None:
    tree = ast.parse(inspect.getsource(triton_loaders))
    named = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "C"
    }
    tables = [cell_constants(by_name(name), 64, 64, torch.bfloat16) for name in FORMATS]
    tables += [cell_constants(by_name(n), 576, 0, torch.bfloat16) for n in RECORDS]
    unknown = {n for n in named if not any(hasattr(table, n) for table in tables)}
    assert named and not unknown


def test_a_name_that_a_table_lacks_is_loud() -> None:
    constants = cell_constants(by_name("fp8_e4m3"), 64, 64, torch.bfloat16)
    with pytest.raises(AttributeError, match=r"K_NORM_OFFSET is not among .*K_OFFSET"):
        _ = constants.K_NORM_OFFSET


def test_formats_without_whole_cells_are_refused() -> None:
    with pytest.raises(ValueError, match="nvfp4:cells spreads a state"):
        cell_constants(by_name("nvfp4"), 64, 64, torch.bfloat16)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda b: setattr(b, "pages", b.pages[..., 1:]), "expected the byte view"),
        (lambda b: setattr(b, "query", b.query[:, :5]), "do not fit 2 KV heads"),
        (
            lambda b: setattr(b, "query", b.query.transpose(1, 2).contiguous().mT),
            "last axis of query",
        ),
    ],
)
def test_what_does_not_fit_is_named(broken: Any, message: str) -> None:
    batch = Case(name="fp8_e4m3").batch()
    broken(batch)
    with pytest.raises(ValueError, match=message):
        attend(batch, OPTIONS["plain"])


def test_contexts_are_cut_where_programs_are_few() -> None:
    host = torch.device("cpu")
    assert splits_for(1, 1 << 20, host) == 1
    assert masks_of(OPTIONS["window"]).constants()["WINDOW"] == 19
