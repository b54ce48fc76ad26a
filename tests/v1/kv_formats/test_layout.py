"""Layout algebra: every byte of a page has exactly one owner, and views find it."""

import pytest
import torch

from tests.v1.kv_formats.helpers import (
    AXIS_ORDERS,
    HEAD_SIZES,
    arranged_formats,
    format_id,
    heads_of,
    make_pages,
    size_pairs,
)
from vllm.v1.kv_formats import Extent, Field, KVFormat, StateLayout, by_name

STATES = (4, 16)
FORMATS = pytest.mark.parametrize("fmt", arranged_formats(), ids=format_id)


def _owners(layout: StateLayout, heads: int, states: int) -> dict[int, str]:
    """Page offset -> "field head state byte", by `offset` alone."""
    owners: dict[int, str] = {}
    for f in layout.fields:
        for head in range(heads):
            for state in range(states):
                for byte in range(f.nbytes):
                    at = layout.offset(
                        f.name,
                        byte,
                        head=head,
                        state=state,
                        num_heads=heads,
                        num_states=states,
                    )
                    owner = f"{f.name} {head} {state} {byte}"
                    assert at not in owners, f"{owner} overlaps {owners[at]}"
                    owners[at] = owner
    return owners


@FORMATS
def test_every_byte_is_covered_once(fmt: KVFormat) -> None:
    for sizes in size_pairs(fmt):
        layout = fmt.layout(*sizes)
        heads = heads_of(fmt, sizes, 2)
        some = STATES if layout.extent is not Extent.TILE else (16, 32)
        for states in some if sizes[0] == HEAD_SIZES[0] else some[:1]:
            owners = _owners(layout, heads, states)
            fields = sum(f.nbytes for f in layout.fields)
            page = heads * layout.num_sides * states * layout.nbytes
            assert len(owners) == heads * states * fields
            assert min(owners) == 0 and max(owners) < page
            padding = layout.num_sides * layout.nbytes - fields
            assert page - len(owners) == heads * states * padding
            assert 0 <= padding < layout.align


def touch(
    layout: StateLayout,
    pages: torch.Tensor,
    f: Field,
    head: int,
    state: int,
    byte: int,
) -> None:
    """Sets one byte of a record of block 1 to 1, by the parts of its plane."""
    for start, part in layout.parts(pages, f.side, f.plane):
        groups, lanes, units, unit = part.shape[3:]
        unit_id, inner = divmod(byte - start, unit)
        if 0 <= unit_id < units:
            tile, turn = divmod(state, groups * lanes)
            part[1, head, tile, turn // lanes, turn % lanes, unit_id, inner] = 1


@FORMATS
def test_views_and_offsets_agree(fmt: KVFormat) -> None:
    for sizes in size_pairs(fmt):
        layout = fmt.layout(*sizes)
        heads = heads_of(fmt, sizes, 2)
        slots = heads * layout.num_sides
        states = 32 if layout.extent is Extent.TILE else 8
        buffer, pages = make_pages("LBHNC", 2, slots, states, layout.nbytes)
        page = slots * states * layout.nbytes
        for f in layout.fields:
            start = layout.record_offset(f.name)
            for head, state in ((0, 0), (heads - 1, 3), (0, 7), (0, states - 3)):
                for byte in {0, f.nbytes // 2, f.nbytes - 1} if f.nbytes else ():
                    buffer.fill_(0)
                    touch(layout, pages, f, head, state, start + byte)
                    at = layout.offset(
                        f.name,
                        byte,
                        head=head,
                        state=state,
                        num_heads=heads,
                        num_states=states,
                    )
                    # layer 1 of 2, block 1 of 2
                    assert buffer[3 * page + at] == 1, (f.name, head, state, byte)


@FORMATS
def test_torn_axis_orders_are_refused(fmt: KVFormat) -> None:
    sizes = size_pairs(fmt)[0]
    layout = fmt.layout(*sizes)
    slots = heads_of(fmt, sizes) * layout.num_sides
    for order in AXIS_ORDERS:
        _, pages = make_pages(order, 2, slots, 16, layout.nbytes)
        # With one head slot the axes H and N cannot be torn apart.
        if layout.extent.allows(order) or (slots == 1 and not layout.why_torn(pages)):
            layout.check_pages(pages)
        else:
            with pytest.raises(ValueError, match="axis order"):
                layout.check_pages(pages)


def test_one_head_per_side_is_never_torn_by_its_own_slot() -> None:
    layout = by_name("nvfp4").layout(64, 64)
    _, pages = make_pages("LHBNC", 2, 2, 16, layout.nbytes)
    layout.check_pages(pages)


def test_extents_of_the_orders() -> None:
    allowed = {
        extent: [order for order in AXIS_ORDERS if extent.allows(order)]
        for extent in Extent
    }
    assert allowed[Extent.STATE] == list(AXIS_ORDERS)
    assert allowed[Extent.HEAD] == ["LBHNC", "LHBNC", "BLHNC", "BHLNC"]
    assert allowed[Extent.SIDE] == ["LBHNC", "BLHNC"]
    assert allowed[Extent.TILE] == allowed[Extent.HEAD]


def test_states_in_tiles_take_turns() -> None:
    """One state after the other gives 32 bits of K; two give an element of V."""
    fmt = by_name("bfloat16", "tile16")
    pages = torch.zeros(1, 1, 32, fmt.layout(4, 2).nbytes, dtype=torch.uint8)
    key = torch.arange(32 * 4).view(32, 1, 4).bfloat16()
    value = -torch.arange(32 * 2).view(32, 1, 2).bfloat16()
    fmt.store(pages, torch.arange(32), key, value)
    for tile in range(2):
        stored = pages.flatten().view(torch.bfloat16)[96 * tile : 96 * (tile + 1)]
        first = key[16 * tile : 16 * (tile + 1), 0]
        assert torch.equal(
            stored[:64], first.unflatten(1, (2, 2)).transpose(0, 1).flatten()
        )
        pairs = value[16 * tile : 16 * (tile + 1), 0].unflatten(0, (8, 2))
        assert torch.equal(stored[64:], pairs.transpose(1, 2).flatten())


def test_tiles_need_whole_tiles_of_states() -> None:
    fmt = by_name("fp8", "tile16")
    pages = torch.zeros(2, 1, 24, fmt.layout(64, 64).nbytes, dtype=torch.uint8)
    with pytest.raises(ValueError, match="use a multiple of 16"):
        fmt.store(pages, torch.arange(3), torch.zeros(3, 1, 64), torch.zeros(3, 1, 64))
    layout = fmt.layout(64, 64)
    with pytest.raises(ValueError, match="through parts"):
        layout.plane_view(pages, 0, 0)
    with pytest.raises(ValueError, match="through parts"):
        layout.view(pages, "k")


def test_typed_views_share_memory_and_refuse_odd_bytes() -> None:
    layout = by_name("int8_per_token_head").layout(64, 64)
    pages = torch.zeros(2, 3, 16, layout.nbytes, dtype=torch.uint8)
    scales = layout.view(pages, "k_scale")
    assert scales.shape == (2, 3, 16, 1) and scales.dtype == torch.float32
    scales[1, 2, 3] = 1.5
    raw = pages[1, 2, 3, 64:68].contiguous().view(torch.float32)
    assert raw.item() == 1.5
    assert layout.view(pages, "v").dtype == torch.int8
    odd = by_name("turboquant_3bit_nc").layout(72, 72)
    pages = torch.zeros(2, 3, 16, odd.nbytes, dtype=torch.uint8)
    with pytest.raises(ValueError, match="bytewise"):
        odd.view(pages, "k_norm")


def test_interleaved_views_split_the_states() -> None:
    layout = by_name("nvfp4").layout(64, 64)
    pages = torch.zeros(2, 6, 16, layout.nbytes, dtype=torch.uint8)
    assert layout.view(pages, "v_scales").shape == (2, 3, 4, 4, 4)
    assert layout.view(pages, "k_scales").shape == (2, 3, 16, 4)
    with pytest.raises(ValueError, match="multiple of 4"):
        layout.view(pages.view(-1)[: 36 * layout.nbytes].view(1, 6, 6, -1), "v_scales")


def test_constants_carry_the_names_of_the_table() -> None:
    layout = by_name("fp8_ds_mla").layout(576, 0)
    constants = layout.constants()
    assert constants["STATE_BYTES"] == 656
    assert constants["NOPE_SCALE_OFFSET"] == 512
    assert constants["ROPE_OFFSET"] == 528 and constants["ROPE_COUNT"] == 64
    scales = by_name("deepseek_v4").layout(512, 0).constants()
    assert scales["NOPE_SCALE_REGION"] == 576 and scales["NOPE_SCALE_STRIDE"] == 8


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ((Field("a", "u8", 1), Field("a", "u8", 1)), "duplicate"),
        ((Field("a", "u8", 1, plane=1), Field("b", "u8", 1)), "memory order"),
        ((Field("a", "u8", 1), Field("b", "u8", 1, plane=1)), "extent"),
        ((Field("a", "u8", 1), Field("b", "u8", 2, side=1)), "unequal"),
    ],
)
def test_impossible_tables_are_refused(fields: tuple[Field, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StateLayout(fields)


def test_unknown_fields_and_wrong_pages_are_refused() -> None:
    layout = by_name("fp8").layout(64, 64)
    with pytest.raises(ValueError, match="expected one of k, v"):
        layout.offset("scale")
    for pages in (
        torch.zeros(1, 1, 16, 100, dtype=torch.uint8),
        torch.zeros(1, 1, 16, 128),
    ):
        with pytest.raises(ValueError, match="pages"):
            layout.view(pages, "k")
