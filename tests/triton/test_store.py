"""Pages that the Triton kernels write are, byte for byte, those that the formats write.

TurboQuant alone may differ: the squares of a key are summed in another order, so its
norm may round to the neighbouring float16, and a coordinate next to a boundary may take
the neighbouring code.
"""

import ast
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.pairwise import grid, pairwise
from tests.v1.kv_formats.helpers import AXIS_ORDERS, fits, make_pages
from tests.v1.odd_format import Odd
from vllm.v1.attention.ops import (
    triton_store,
    triton_store_nvfp4,
    triton_store_plain,
    triton_store_records,
    triton_store_scaled,
    triton_store_turboquant,
)
from vllm.v1.kv_formats import KVFormat, KVScales, all_formats, by_id, by_name
from vllm.v1.kv_formats.turboquant import TurboQuant

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCALES = KVScales(k=0.75, v=1.25)
BLOCKS = 4
FORMATS = {
    fmt.arranged(a).format_id: fmt.arranged(a)
    for fmt in all_formats()
    for a in fmt.arrangements
    if triton_store.serves(fmt.arranged(a))
    and fmt.resolve(torch.bfloat16) is fmt
    and not fmt.alias_of
}
MODULES = (
    triton_store_nvfp4,
    triton_store_plain,
    triton_store_records,
    triton_store_scaled,
    triton_store_turboquant,
)
FACTORS = {
    "format_id": list(FORMATS),
    "sizes": [(64, 64), (80, 80), (96, 96), (128, 128), (256, 256), (72, 40), (576, 0)],
    "page": [16, 64],
    "heads": [1, 3],
}
# Not paired with formats one by one: these change addresses and types, not numbers.
ORDERS = dict(enumerate(AXIS_ORDERS))
DTYPES = dict(enumerate((torch.bfloat16, torch.float16, torch.float32)))


@dataclass(frozen=True, kw_only=True)
class Case:
    fmt: KVFormat
    sizes: tuple[int, int]
    page: int
    heads: int
    order: str
    dtype: torch.dtype

    def __str__(self) -> str:
        size, size_v = self.sizes
        kind = str(self.dtype).removeprefix("torch.")
        rest = f"{size}+{size_v}-page{self.page}-heads{self.heads}-{self.order}-{kind}"
        return f"{self.fmt.format_id}-{rest}"


def allowed(case: dict[str, Any]) -> bool:
    fmt, (size, size_v) = FORMATS[case["format_id"]], case["sizes"]
    return fits(fmt, size, size_v) and (size_v > 0 or case["heads"] == 1)


def cases_of(chosen: list[dict[str, Any]]) -> list[Case]:
    """Axis orders and dtypes take turns; an order that tears a format apart is none."""
    cases = []
    for i, case in enumerate(chosen):
        fmt = FORMATS[case["format_id"]]
        orders = [order for order in AXIS_ORDERS if fmt.extent().allows(order)]
        rest = {k: v for k, v in case.items() if k != "format_id"}
        order, dtype = orders[i % len(orders)], DTYPES[i // 2 % len(DTYPES)]
        cases.append(Case(fmt=fmt, order=order, dtype=dtype, **rest))
    return cases


def vectors(case: Case, tokens: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """K and V as slices of one tensor, as a fused projection leaves them."""
    size, size_v = case.sizes
    torch.manual_seed(size + case.page + case.heads)
    rows = torch.randn(tokens, case.heads * (size + size_v)).to(case.dtype)
    key, value = rows.to(DEVICE).split([case.heads * size, case.heads * size_v], -1)
    key = key.unflatten(-1, (case.heads, size))
    return key, value.unflatten(-1, (case.heads, size_v)) if size_v else None


def stored(
    case: Case, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor | None
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """(buffer, pages) written by the kernels, and the same written by the format."""
    fmt = case.fmt.resolve(case.dtype)
    packing = fmt.packing(case.heads, *case.sizes, case.dtype)
    sizes = BLOCKS, packing.head_slots, case.page, packing.state_bytes
    _, theirs = wanted = make_pages(case.order, *sizes)
    fmt.store(theirs, slots, key.cpu(), None if value is None else value.cpu(), SCALES)
    buffer, _ = make_pages(case.order, *sizes)
    buffer = buffer.to(DEVICE)
    ours = buffer.as_strided(theirs.shape, theirs.stride(), theirs.storage_offset())
    triton_store.store(ours, slots.to(DEVICE), key, value, fmt, SCALES)
    return (buffer.cpu(), ours.cpu()), wanted


def check(
    case: Case, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor | None
) -> None:
    (buffer, ours), (wanted_buffer, theirs) = stored(case, slots, key, value)
    if torch.equal(buffer, wanted_buffer):
        return
    fmt = case.fmt
    assert isinstance(fmt, TurboQuant), f"{int((ours != theirs).sum())} bytes differ"
    assert_equal_but_for_roots(fmt, case, ours, theirs)


def assert_equal_but_for_roots(
    fmt: TurboQuant, case: Case, ours: torch.Tensor, theirs: torch.Tensor
) -> None:
    layout = fmt.layout(*case.sizes, case.dtype)
    for side, plane in layout.planes():
        mine = layout.unpack(layout.plane_view(ours, side, plane), side, plane)
        other = layout.unpack(layout.plane_view(theirs, side, plane), side, plane)
        for name in mine:
            equal = (mine[name] == other[name]) | (mine[name] != mine[name])
            assert int((~equal).sum()) <= 2 * name.startswith("k_"), name


def some_slots(case: Case, tokens: int) -> torch.Tensor:
    """A slot per token; every fourth token is skipped."""
    slots = torch.randperm(BLOCKS * case.page)[:tokens]
    slots[::4] = -1
    return slots


def run(case: Case) -> None:
    key, value = vectors(case, 11)
    check(case, some_slots(case, 9), key, value)  # two rows of padding


@pytest.mark.parametrize("case", cases_of(pairwise(FACTORS, allowed)), ids=str)
def test_bytes_equal_the_formats(case: Case) -> None:
    run(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", cases_of(list(grid(FACTORS, allowed))), ids=str)
def test_bytes_equal_the_formats_everywhere(case: Case) -> None:
    run(case)


SPECIAL = {
    "zeros": (0.0,),
    "minus zero": (-0.0, 0.0),
    "constant": (2.5,),
    "one sided": (1.0, 1.5, 3.0),
    "negative": (-1.0, -2.0),
    "huge": (3e38, -2e38, 1.0),
    "tiny": (1e-40, -1e-38, 1e-9),
    "not finite": (torch.inf, -torch.inf, torch.nan, 1.0),
    "halves": (0.5, -0.5, 1.5, -2.5, 127.0),
}


@pytest.mark.parametrize("format_id", FORMATS)
def test_special_vectors(format_id: str) -> None:
    fmt = FORMATS[format_id]
    sizes = (576, 0) if fmt.latent else (64, 64)
    case = Case(
        fmt=fmt, sizes=sizes, page=16, heads=1, order="LBHNC", dtype=torch.float32
    )
    rows = []
    for pattern in SPECIAL.values():
        count = sum(sizes) // len(pattern) + 1
        rows.append(torch.tensor(pattern).repeat(count)[: sum(sizes)])
    x = torch.stack(rows).unsqueeze(1).to(DEVICE)
    key, value = x[..., : sizes[0]], x[..., sizes[0] :] if sizes[1] else None
    (_, ours), (_, theirs) = stored(case, torch.arange(len(rows)), key, value)
    layout = fmt.layout(*sizes, case.dtype)
    for side, plane in layout.planes():
        mine = layout.unpack(layout.plane_view(ours, side, plane), side, plane)
        other = layout.unpack(layout.plane_view(theirs, side, plane), side, plane)
        for name, field in mine.items():
            a, b = field.float(), other[name].float()
            assert bool(((a == b) | (a.isnan() & b.isnan())).all()), name


def test_pages_at_odd_bytes_are_written_bytewise() -> None:
    """Scales at odd offsets, and a page that starts at an odd address."""
    fmt = by_name("int4_per_token_head")
    for sizes in ((90, 90), (64, 64)):
        packing = fmt.packing(2, *sizes)
        shape = BLOCKS, packing.head_slots, 16, packing.state_bytes
        key = torch.randn(5, 2, sizes[0], dtype=torch.bfloat16)
        count = torch.Size(shape).numel()
        buffers = [torch.zeros(count + 1, dtype=torch.uint8) for _ in range(2)]
        fmt.store(buffers[0][1:].view(shape), torch.arange(5), key, key)
        ours = buffers[1].to(DEVICE)
        slots = torch.arange(5, device=DEVICE)
        moved = key.to(DEVICE)
        triton_store.store(ours[1:].view(shape), slots, moved, moved, fmt)
        assert torch.equal(ours.cpu(), buffers[0])


@pytest.mark.parametrize("far", [0, 1, 2], ids=["blocks", "heads", "states"])
def test_pages_may_reach_beyond_31_bits(far: int) -> None:
    """The memory between is reserved, never touched."""
    fmt = by_name("int8_per_token_head")
    width = fmt.packing(3, 64, 64).state_bytes
    shape = (3, 3, 3, width)
    strides = [9 * width, 3 * width, width, 1]
    strides[far] = 2**30 + 2**12
    reach = sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) + 1
    pages = torch.empty(reach, dtype=torch.uint8, device=DEVICE)
    pages = pages.as_strided(shape, strides)
    key = torch.randn(3, 3, 64, dtype=torch.bfloat16)
    slots = torch.tensor([1, 5, 8])
    moved = key.to(DEVICE)
    triton_store.store(pages, slots.to(DEVICE), moved, moved, fmt)
    wanted = torch.zeros(shape, dtype=torch.uint8)
    fmt.store(wanted, slots, key, key)
    for slot in slots.tolist():
        block, state = divmod(slot, 3)
        assert torch.equal(pages[block, :, state].cpu(), wanted[block, :, state])


def test_an_empty_batch_writes_nothing() -> None:
    fmt = by_name("fp8_e4m3")
    pages = torch.full((1, 1, 16, 128), 7, dtype=torch.uint8, device=DEVICE)
    key = torch.zeros(0, 1, 64, device=DEVICE)
    slots = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    triton_store.store(pages, slots, key, key, fmt)
    assert bool((pages == 7).all())


def test_what_does_not_fit_is_named() -> None:
    key, slots = torch.zeros(1, 2, 64, device=DEVICE), torch.zeros(1, device=DEVICE)
    pages = torch.zeros(1, 1, 16, 128, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(ValueError, match="2 head slots, the pages"):
        triton_store.store(pages, slots, key, key, by_name("fp8_e4m3"))
    with pytest.raises(ValueError, match="for 3 slots"):
        longer = torch.zeros(3, device=DEVICE)
        triton_store.store(pages, longer, key[:, :1], key[:, :1], by_name("fp8_e4m3"))
    with pytest.raises(ValueError, match="deepseek_v4:cells has no Triton kernel"):
        triton_store.store(pages, slots, key, None, by_id("deepseek_v4"))
    odd = torch.zeros(1 + 16 * 256, dtype=torch.uint8, device=DEVICE)[1:]
    with pytest.raises(ValueError, match="is not aligned to its 2 bytes"):
        moved = key[:, :1].bfloat16()
        triton_store.store(
            odd.view(1, 1, 16, 256), slots, moved, moved, by_name("bfloat16")
        )


def test_a_plugins_format_is_not_taken_for_one_of_its_mode() -> None:
    fmt = Odd("odd")
    assert fmt.mode is by_name("fp8_e4m3").mode
    assert not triton_store.serves(fmt)
    key, slots = torch.zeros(1, 2, 64, device=DEVICE), torch.zeros(1, device=DEVICE)
    pages = torch.zeros(1, 6, 16, 257, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(ValueError, match="odd:cells has no Triton kernel"):
        triton_store.store(pages, slots, key, key, fmt)


def names_of(module: ModuleType) -> Iterator[str]:
    """Every NAME of `C.NAME` in a module of kernels."""
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "C":
            yield node.attr


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.__name__.split("_")[-1])
def test_kernels_name_the_fields_of_tables(module: ModuleType) -> None:
    known = set()
    for fmt in FORMATS.values():
        sizes = (576, 0) if fmt.latent else (64, 64)
        layout = fmt.layout(*sizes)
        known |= set(layout.constants())
        known |= {f"{field.name.upper()}_DTYPE" for field in layout.fields}
    names = set(names_of(module))
    assert names and names <= known
