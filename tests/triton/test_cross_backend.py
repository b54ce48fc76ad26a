"""C++ on the CPU and Triton write the same bytes under the same format id, and under
another arrangement of it the same bytes in other places; each reads the other's pages.

TurboQuant may differ by what `test_store.assert_equal_but_for_roots` allows.
"""

import pytest
import torch

from tests.kernels.cpu_attention_cases import needs_library
from tests.triton.test_store import (
    BLOCKS,
    DEVICE,
    FORMATS,
    SCALES,
    Case,
    assert_equal_but_for_roots,
    some_slots,
    vectors,
)
from tests.v1.kv_formats.helpers import AXIS_ORDERS, make_pages
from vllm.v1.attention.ops import (
    cpu_cells,
    cpu_kernels,
    cpu_latent,
    triton_batch,
    triton_paged,
    triton_store,
)
from vllm.v1.kv_formats import by_id, rearrange
from vllm.v1.kv_formats.base import DEFAULT_ARRANGEMENT
from vllm.v1.kv_formats.turboquant import TurboQuant

pytestmark = needs_library

SHARED = [name for name in cpu_cells.NUMBERS if name in FORMATS]
LATENTS = [name for name in FORMATS if cpu_latent.serves(FORMATS[name], 576, 512)]
# Ids of arrangements that Triton does not write.
APART = [
    name
    for name in cpu_cells.NUMBERS
    if name not in FORMATS and cpu_cells.serves(by_id(name), 64, 64)
]
REARRANGED = [
    (name, arrangement)
    for name in SHARED
    for arrangement in FORMATS[name].arrangements
    if arrangement != FORMATS[name].arrangement
    and FORMATS[name].arranged(arrangement).format_id in FORMATS
]
SHARED_ORDERS = [
    (name, order)
    for name in SHARED
    for order in AXIS_ORDERS
    if FORMATS[name].extent().allows(order)
]


def case_of(name: str, order: str = "LBHNC", **changes: object) -> Case:
    fields = {"sizes": (64, 64), "page": 16, "heads": 3, "dtype": torch.bfloat16}
    return Case(fmt=FORMATS[name], order=order, **{**fields, **changes})


def blank(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    packing = case.fmt.packing(case.heads, *case.sizes, case.dtype)
    sizes = BLOCKS, packing.head_slots, case.page, packing.state_bytes
    return make_pages(case.order, *sizes)


def by_triton(
    case: Case, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(buffer, pages) on the CPU, written where the kernels run."""
    buffer, like = blank(case)
    buffer = buffer.to(DEVICE)
    pages = buffer.as_strided(like.shape, like.stride(), like.storage_offset())
    triton_store.store(pages, slots.to(DEVICE), key, value, case.fmt, SCALES)
    buffer = buffer.cpu()
    return buffer, buffer.as_strided(like.shape, like.stride(), like.storage_offset())


def by_cpu(
    case: Case, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    buffer, pages = blank(case)
    cpu_kernels.store(pages, slots, key.cpu(), value.cpu(), case.fmt, SCALES)
    return buffer, pages


def assert_same(case: Case, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    if isinstance(case.fmt, TurboQuant):
        assert_equal_but_for_roots(case.fmt, case, ours, theirs)
    else:
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name, order", SHARED_ORDERS)
def test_equal_ids_are_equal_bytes(name: str, order: str) -> None:
    case = case_of(name, order)
    key, value = vectors(case, 6)
    assert value is not None
    slots = some_slots(case, 6)
    (mine, ours), (other, theirs) = (
        write(case, slots, key, value) for write in (by_triton, by_cpu)
    )
    assert_same(case, ours, theirs)
    if not isinstance(case.fmt, TurboQuant):
        assert torch.equal(mine, other)  # neighbouring layers too


@pytest.mark.parametrize("name", LATENTS)
def test_equal_ids_are_equal_latents(name: str) -> None:
    case = case_of(name, sizes=(576, 0), heads=1)
    key, _ = vectors(case, 6)
    slots = some_slots(case, 6)
    _, ours = by_triton(case, slots, key, None)
    _, theirs = blank(case)
    cpu_latent.store_latents(theirs, slots, key.cpu(), case.fmt, SCALES.k)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name, arrangement", REARRANGED)
def test_other_arrangements_are_the_same_fields(name: str, arrangement: str) -> None:
    case = case_of(name)
    source = case.fmt.arranged(arrangement)
    arranged = case_of(source.format_id)
    key, value = vectors(case, 6)
    assert value is not None
    slots = some_slots(case, 6)
    _, theirs = by_cpu(case, slots, key, value)
    _, written = by_triton(arranged, slots, key, value)
    _, ours = blank(case)
    rearrange(source, written, case.fmt, ours, *case.sizes, case.dtype)
    assert_same(case, ours, theirs)


@pytest.mark.parametrize("name", APART)
def test_pages_that_only_the_cpu_arranges_convert_to_tritons(name: str) -> None:
    source = by_id(name)
    case = case_of(source.arranged(DEFAULT_ARRANGEMENT).format_id)
    key, value = vectors(case, 6)
    assert value is not None
    slots = some_slots(case, 6)
    _, ours = by_triton(case, slots, key, value)
    _, apart = blank(case)
    cpu_kernels.store(apart, slots, key.cpu(), value.cpu(), source, SCALES)
    _, theirs = blank(case)
    rearrange(source, apart, case.fmt, theirs, *case.sizes, case.dtype)
    assert_same(case, ours, theirs)


# One query over 20 keys in blocks 2 and 0, in that order.
TABLE = torch.tensor([[2, 0]], dtype=torch.int32)
SLOTS = torch.cat((torch.arange(32, 48), torch.arange(4)))
STARTS, LENGTHS = torch.tensor([0, 1]).int(), torch.tensor([20]).int()


def attended_on_the_cpu(
    case: Case, query: torch.Tensor, pages: torch.Tensor
) -> torch.Tensor:
    out = torch.empty_like(query)
    batch = STARTS, LENGTHS, TABLE
    sizes = case.sizes
    cpu_kernels.paged_attention(
        out, query, pages, case.fmt, *batch, *sizes, 0.125, scales=SCALES
    )
    return out


def attended_by_triton(
    case: Case, query: torch.Tensor, pages: torch.Tensor
) -> torch.Tensor:
    out = torch.empty_like(query, device=DEVICE)
    requests = triton_batch.Requests(
        query_start_loc=STARTS.to(DEVICE),
        seq_lens=LENGTHS.to(DEVICE),
        block_table=TABLE.to(DEVICE),
        max_query_len=1,
        max_seq_len=20,
    )
    triton_paged.paged_attention(
        out,
        query.to(DEVICE),
        pages.to(DEVICE),
        case.fmt,
        requests,
        0.125,
        scales=SCALES,
    )
    return out.cpu()


@pytest.mark.parametrize("name", SHARED)
def test_each_attends_to_what_the_other_wrote(name: str) -> None:
    case = case_of(name)
    key, value = vectors(case, 20)
    assert value is not None
    query = torch.randn(1, 3, 64).bfloat16()
    _, theirs = by_cpu(case, SLOTS, key, value)
    wanted = attended_on_the_cpu(case, query, theirs)
    _, ours = by_triton(case, SLOTS, key, value)
    read = [attended_on_the_cpu(case, query, ours)]
    if triton_paged.serves(case.fmt):
        read.append(attended_by_triton(case, query, theirs))
    for out in read:
        torch.testing.assert_close(out, wanted, rtol=0.02, atol=0.02)
