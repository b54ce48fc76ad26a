"""Pages give back what was stored, in every axis order, and nothing else changes."""

import pytest
import torch

from tests.v1.kv_formats.helpers import (
    AXIS_ORDERS,
    SENTINEL,
    arranged_formats,
    format_id,
    heads_of,
    make_pages,
    named_formats,
    size_pairs,
    vectors,
)
from vllm.v1.kv_formats import KVFormat, KVScales, by_name, rearrange

ARRANGED = pytest.mark.parametrize("fmt", arranged_formats(), ids=format_id)
FORMATS = pytest.mark.parametrize("fmt", named_formats(), ids=format_id)
BLOCKS = 5
SCALES = KVScales(k=0.5, v=2.0)


def _pages(
    fmt: KVFormat, sizes: tuple[int, int], order: str = "LBHNC", states: int = 16
) -> tuple[torch.Tensor, torch.Tensor]:
    heads = heads_of(fmt, sizes)
    packing = fmt.packing(heads, *sizes)
    cells = packing.head_slots, states, packing.state_bytes
    return make_pages(order, BLOCKS, *cells)


def _equal(got: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@ARRANGED
@pytest.mark.parametrize("order", AXIS_ORDERS)
def test_load_gives_the_round_trip_of_what_was_stored(
    fmt: KVFormat, order: str
) -> None:
    for sizes in size_pairs(fmt)[::2]:
        _, pages = _pages(fmt, sizes, order)
        key, value = vectors(40, pages.shape[1] if sizes[1] == 0 else 3, sizes)
        block_ids = torch.tensor([3, 0, 4])
        slots = (block_ids[:, None] * 16 + torch.arange(16)).flatten()[:40]
        layout = fmt.layout(*sizes)
        if layout.why_torn(pages):
            assert not layout.extent.allows(order)
            with pytest.raises(ValueError, match="axis order"):
                fmt.store(pages, slots, key, value)
            continue
        fmt.store(pages, slots, key, value, SCALES)
        got = fmt.load(pages, block_ids, 40, *sizes, key.dtype, SCALES)
        assert _equal(got, fmt.roundtrip(key, value, SCALES)), sizes


@ARRANGED
@pytest.mark.parametrize("states", [16, 32, 64, 128])
def test_block_sizes(fmt: KVFormat, states: int) -> None:
    sizes = size_pairs(fmt)[0]
    _, pages = _pages(fmt, sizes, states=states)
    key, value = vectors(states + 3, heads_of(fmt, sizes), sizes, torch.bfloat16)
    slots = torch.cat((torch.arange(states) + states, torch.arange(3) + 4 * states))
    fmt.store(pages, slots, key, value)
    blocks = torch.tensor([1, 4], dtype=torch.int32)
    got = fmt.load(pages, blocks, states + 3, *sizes, key.dtype)
    assert _equal(got, fmt.roundtrip(key, value))


@ARRANGED
def test_no_other_byte_changes(fmt: KVFormat) -> None:
    for order in ("LBHNC", "BLNHC", "BHLNC"):
        for sizes in size_pairs(fmt)[:2]:
            buffer, pages = _pages(fmt, sizes, order)
            layout = fmt.layout(*sizes)
            if layout.why_torn(pages):
                continue
            heads = heads_of(fmt, sizes)
            key, value = vectors(4, heads, sizes)
            fmt.store(pages, torch.tensor([33, -1, 7, -1]), key, value)
            # Writing sentinels over the two states restores the whole buffer.
            for side, plane in layout.planes():
                for _, part in layout.parts(pages, side, plane):
                    for block, state in ((2, 1), (0, 7)):
                        groups, lanes = part.shape[3:5]
                        tile, turn = divmod(state, groups * lanes)
                        part[block, :, tile, turn // lanes, turn % lanes] = SENTINEL
            assert (buffer == SENTINEL).all()


@FORMATS
def test_skipped_slots_and_padding_rows_are_ignored(fmt: KVFormat) -> None:
    sizes = size_pairs(fmt)[0]
    buffer, pages = _pages(fmt, sizes)
    key, value = vectors(6, heads_of(fmt, sizes), sizes)
    fmt.store(pages, torch.tensor([-1, -1]), key, value)
    fmt.store(pages, torch.tensor([], dtype=torch.int64), key, value)
    assert (buffer == SENTINEL).all()
    fmt.store(pages, torch.tensor([-1, 17], dtype=torch.int32), key, value)
    got = fmt.load(pages, torch.tensor([1]), 2, *sizes, key.dtype)
    row = slice(1, 2)
    wanted = fmt.roundtrip(key[row], None if value is None else value[row])
    assert _equal(tuple(x[row] for x in got), wanted)


@FORMATS
def test_states_can_be_written_one_by_one(fmt: KVFormat) -> None:
    sizes = size_pairs(fmt)[0]
    buffer, pages = _pages(fmt, sizes)
    other, bulk = _pages(fmt, sizes)
    key, value = vectors(20, heads_of(fmt, sizes), sizes)
    slots = torch.randperm(80, generator=torch.Generator().manual_seed(0))[:20]
    fmt.store(bulk, slots, key, value)
    for i in range(20):
        row = slice(i, i + 1)
        fmt.store(pages, slots[row], key[row], None if value is None else value[row])
    assert torch.equal(buffer, other)


@FORMATS
def test_typed_cache_tensors_are_accepted(fmt: KVFormat) -> None:
    sizes = size_pairs(fmt)[0]
    _, pages = _pages(fmt, sizes)
    typed = pages.view(fmt.storage_dtype(torch.float32))
    key, value = vectors(5, heads_of(fmt, sizes), sizes)
    fmt.store(typed, torch.arange(5), key, value)
    got = fmt.load(typed, torch.tensor([0]), 5, *sizes, key.dtype)
    assert _equal(got, fmt.roundtrip(key, value))


def test_auto_stores_the_dtype_of_the_vectors() -> None:
    auto = by_name("auto")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        named = auto.resolve(dtype)
        key, value = vectors(5, 3, (64, 64), dtype)
        packing = named.packing(3, 64, 64, dtype)
        pages = torch.zeros(BLOCKS, 3, 16, packing.state_bytes, dtype=torch.uint8)
        auto.store(pages, torch.arange(5), key, value)
        got = auto.load(pages, torch.tensor([0]), 5, 64, 64, dtype)
        assert _equal(got, (key, value))
        typed, block = pages.view(dtype), torch.tensor([0])
        got = auto.load(typed, block, 5, 64, 64, torch.float32)
        assert _equal(got, (key.float(), value.float()))


def test_wide_and_narrow_strides_give_the_same_bytes() -> None:
    """Odd page sizes and offsets force the bytewise path of the copies."""
    fmt = by_name("int4_per_token_head")
    key, value = vectors(20, 2, (6, 6))
    cell = fmt.layout(6, 6).nbytes
    assert cell % 2 == 0
    aligned = torch.zeros(2, 2, 16, cell, dtype=torch.uint8)
    odd = torch.zeros(2 * 2 * 16 * cell + 9, dtype=torch.uint8)[9:].view(aligned.shape)
    for pages in (aligned, odd):
        fmt.store(pages, torch.arange(20), key, value)
    assert torch.equal(aligned, odd)
    blocks = torch.tensor([0, 1])
    loads = [fmt.load(p, blocks, 20, 6, 6, torch.float32) for p in (aligned, odd)]
    assert _equal(*loads)


def test_padded_pages_keep_their_tail() -> None:
    fmt = by_name("deepseek_v4")
    page = -(-64 * fmt.record_bytes // fmt.page_alignment) * fmt.page_alignment
    buffer = torch.full((3 * page,), SENTINEL, dtype=torch.uint8)
    pages = buffer.as_strided((3, 1, 64, fmt.record_bytes), (page, page, 584, 1))
    key, _ = vectors(192, 1, (512, 0))
    fmt.store(pages, torch.arange(192), key, None)
    tails = buffer.view(3, page)[:, 64 * fmt.record_bytes :]
    assert tails.shape[1] == 64 and (tails == SENTINEL).all()
    got = fmt.load(pages, torch.arange(3), 192, 512, 0, torch.float32)
    assert _equal(got, fmt.roundtrip(key, None))


@pytest.mark.parametrize("head_size", [64, 128])
def test_nvfp4_value_scales_are_swizzled(head_size: int) -> None:
    """Row and column of a scale as published for head sizes that fill 4 x S tiles."""
    fmt = by_name("nvfp4")
    groups = head_size // 16
    key, value = vectors(16, 2, (head_size, head_size))
    _, pages = make_pages("LBHNC", 1, 4, 16, fmt.layout(head_size, head_size).nbytes)
    fmt.store(pages, torch.arange(16), key, value)
    scales = fmt.encode(key, value)["v_scales"].view(torch.uint8)
    flat = pages.flatten()
    region = flat.numel() - 2 * 16 * groups
    for head in range(2):
        tile = flat[region + head * 16 * groups :][: 16 * groups].view(16, groups)
        for t in range(16):
            for s in range(groups):
                row = 4 * (t // 4) + s // (groups // 4)
                column = (s % (groups // 4)) * 4 + t % 4
                assert tile[row, column] == scales[t, head, s]


def test_nvfp4_value_scales_interleave_for_any_number_of_groups() -> None:
    fmt, groups = by_name("nvfp4"), 6
    key, value = vectors(16, 2, (96, 96))
    _, pages = make_pages("LBHNC", 1, 4, 16, fmt.layout(96, 96).nbytes)
    fmt.store(pages, torch.arange(16), key, value)
    scales = fmt.encode(key, value)["v_scales"].view(torch.uint8)
    region = pages.flatten()[-2 * 16 * groups :].view(2, -1)
    for head in range(2):
        for t in range(16):
            for s in range(groups):
                at = (t // 4) * 4 * groups + 4 * s + t % 4
                assert region[head, at] == scales[t, head, s]


@ARRANGED
def test_rearranging_is_lossless(fmt: KVFormat) -> None:
    for sizes in size_pairs(fmt)[:3]:
        default = fmt.arranged("cells")
        _, source = _pages(default, sizes)
        key, value = vectors(80, heads_of(fmt, sizes), sizes)
        default.store(source, torch.arange(80), key, value)
        _, target = _pages(fmt, sizes)
        _, back = _pages(default, sizes)
        fmt_first = default, source, fmt, target
        rearrange(*fmt_first, *sizes, torch.bfloat16)
        blocks = torch.arange(BLOCKS)
        got = fmt.load(target, blocks, 80, *sizes, key.dtype)
        assert _equal(got, default.load(source, blocks, 80, *sizes, key.dtype))
        back.copy_(source)
        rearrange(fmt, target, default, back, *sizes, torch.bfloat16)
        assert torch.equal(back, source)


def test_wrong_shapes_are_refused_in_words() -> None:
    fmt = by_name("fp8")
    key, value = vectors(4, 3, (64, 64))
    pages = torch.zeros(2, 2, 16, 128, dtype=torch.uint8)
    with pytest.raises(ValueError, match="3 KV heads need 3 head slots"):
        fmt.store(pages, torch.arange(4), key, value)
    with pytest.raises(ValueError, match="block ids"):
        fmt.load(pages, torch.tensor([0]), 17, 64, 64, torch.float32)
    with pytest.raises(ValueError, match="128 bytes"):
        fmt.load(pages[..., :64], torch.tensor([0]), 3, 64, 64, torch.float32)
    with pytest.raises(IndexError):
        fmt.store(pages[:, :1], torch.tensor([32]), key[:1, :1], value[:1, :1])
