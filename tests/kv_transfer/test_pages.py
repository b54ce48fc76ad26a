"""Blocks move byte for byte, in every format and axis order; unlike pages are refused.

The reference is the logical view of a block: [H, N, C] of its layer.
"""

import ctypes
from dataclasses import replace
from itertools import product

import pytest
import torch

from tests.kv_transfer.caches import (
    block_bytes,
    caches_of,
    plan_of,
    spec_of,
    states,
)
from vllm.distributed.kv_transfer.kv_connector.utils import (
    BlockMover,
    FingerprintMismatch,
    LayoutFingerprint,
    layout_fingerprint,
    page_table,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.kv_formats import all_formats, by_name

FORMATS = [fmt.resolve(torch.bfloat16) for fmt in all_formats()]
LAYOUTS = [
    KVCacheLayout.LBNHC,
    KVCacheLayout.LBHNC,
    KVCacheLayout.LHBNC,
    KVCacheLayout.BLNHC,
    KVCacheLayout.BLHNC,
]
CASES = [
    pytest.param(fmt, layout, id=f"{fmt.name}-{layout.name}")
    for fmt, layout in product(FORMATS, LAYOUTS)
    if fmt.extent().allows(layout.name) or fmt.latent
]


def two_layers(fmt, layout):
    spec = spec_of(fmt)
    layers = {name: (spec, fmt.format_id) for name in ("model.0", "model.1")}
    return plan_of(layers, layout)


@pytest.mark.parametrize("fmt, layout", CASES)
def test_a_block_moves_byte_for_byte(fmt, layout) -> None:
    plan = two_layers(fmt, layout)
    source, target = caches_of(plan, 1), caches_of(plan, 2)
    before = {
        (name, block): block_bytes(cache, block)
        for name, cache in target.items()
        for block in range(plan.num_blocks)
    }
    ours, theirs = BlockMover(plan, source), BlockMover(plan, target)
    spec = plan.kv_cache_groups[0].kv_cache_spec
    assert ours.block_bytes == [2 * spec.unpadded_page_size_bytes]
    buffer = torch.zeros(ours.block_bytes[0], dtype=torch.uint8)
    ours.read(0, 3, buffer)
    theirs.write(0, 5, buffer)
    for name, cache in target.items():
        for block in range(plan.num_blocks):
            expected = (
                block_bytes(source[name], 3) if block == 5 else before[name, block]
            )
            assert block_bytes(cache, block) == expected


@pytest.mark.parametrize("fmt, layout", CASES)
def test_the_page_table_names_every_byte_once(fmt, layout) -> None:
    plan = two_layers(fmt, layout)
    caches = caches_of(plan, 1)
    mover = BlockMover(plan, caches)
    buffer = torch.zeros(mover.block_bytes[0], dtype=torch.uint8)
    for block in (0, 4):
        mover.read(0, block, buffer)
        copied = b"".join(
            ctypes.string_at(row.address + block * row.block_stride, row.num_bytes)
            for row in page_table(plan, caches)
        )
        assert copied == buffer.numpy().tobytes()
    if layout.layer_outermost and layout.block_compact:
        assert len(page_table(plan, caches)) == 2  # one run of bytes a layer


def test_nothing_but_whole_blocks_of_the_pool_is_copied() -> None:
    plan = two_layers(by_name("bfloat16"), KVCacheLayout.LBNHC)
    mover = BlockMover(plan, caches_of(plan, 1))
    size = mover.block_bytes[0]
    good = torch.zeros(size, dtype=torch.uint8)
    for block, buffer in (
        (-1, good),
        (plan.num_blocks, good),
        (0, good[:-1]),
        (0, torch.zeros(2 * size, dtype=torch.uint8)[::2]),
        (0, torch.zeros(size, dtype=torch.int8)),
    ):
        for copy in (mover.read, mover.write):
            with pytest.raises(ValueError, match="expected"):
                copy(0, block, buffer)


def test_states_and_pages_of_several_groups_move() -> None:
    fmt = by_name("bfloat16")
    padded = spec_of(fmt, page_size_padded=1 << 15)
    layers = {"a": (padded, fmt.format_id), "s": (states(), "")}
    plan = plan_of(layers, KVCacheLayout.LBNHC, group_sizes=(1, 1))
    source, target = caches_of(plan, 1), caches_of(plan, 2)
    ours, theirs = BlockMover(plan, source), BlockMover(plan, target)
    assert ours.block_bytes[0] == padded.unpadded_page_size_bytes
    assert ours.block_bytes[1] == 2 * 3 * 8 + 4 * 2 * 4 * 4
    for group_id, name in enumerate(layers):
        buffer = torch.zeros(ours.block_bytes[group_id], dtype=torch.uint8)
        ours.read(group_id, 1, buffer)
        theirs.write(group_id, 2, buffer)
        assert block_bytes(target[name], 2) == block_bytes(source[name], 1)


# --- fingerprints ---------------------------------------------------------------------


def print_of(*fmts, layout=KVCacheLayout.LBNHC) -> LayoutFingerprint:
    layers = {f"model.{i}": (spec_of(fmt), fmt.format_id) for i, fmt in enumerate(fmts)}
    return layout_fingerprint(plan_of(layers, layout))


@pytest.mark.parametrize(
    "mine, theirs",
    [
        (by_name("fp8_e4m3"), by_name("fp8_e5m2")),
        *[
            (fmt, fmt.arranged(other))
            for fmt in FORMATS
            for other in fmt.arrangements
            if other != fmt.arrangement
        ],
    ],
    ids=lambda fmt: fmt.format_id,
)
def test_equal_sizes_of_unlike_bytes_are_refused_by_name(mine, theirs) -> None:
    assert spec_of(mine).page_size_bytes == spec_of(theirs).page_size_bytes
    with pytest.raises(FingerprintMismatch) as refused:
        print_of(mine).check_same(print_of(theirs), "the other engine")
    for part in (mine.format_id, theirs.format_id, "model.0", "the other engine"):
        assert part in str(refused.value)


def test_every_fact_of_a_layer_counts() -> None:
    mine = print_of(by_name("bfloat16"), by_name("bfloat16"))
    mine.check_same(LayoutFingerprint.from_dict(mine.to_dict()), "itself")
    layer = mine.layers[1]
    for name in ("head_slots", "states", "state_bytes", "block_size", "group_id"):
        changed = replace(layer, **{name: getattr(layer, name) + 1})
        other = LayoutFingerprint(layers=(mine.layers[0], changed))
        assert other.digest != mine.digest
        with pytest.raises(FingerprintMismatch, match=f"{name}.*model.1"):
            mine.check_same(other, "another engine")
    with pytest.raises(FingerprintMismatch, match="1 layers"):
        mine.check_same(LayoutFingerprint(layers=mine.layers[:1]), "another engine")
    heads_first = print_of(*[by_name("bfloat16")] * 2, layout=KVCacheLayout.LBHNC)
    with pytest.raises(FingerprintMismatch, match=r"axis_order HNC.*NHC"):
        mine.check_same(heads_first, "another engine")


def test_the_place_of_layers_and_blocks_does_not_count() -> None:
    fmt = by_name("bfloat16")
    apart = print_of(fmt, layout=KVCacheLayout.LBNHC)
    apart.check_same(print_of(fmt, layout=KVCacheLayout.BLNHC), "another engine")


def test_states_are_named_by_shapes_and_dtypes() -> None:
    plan = plan_of({"s": (states(), "")}, KVCacheLayout.LBNHC)
    (layer,) = layout_fingerprint(plan).layers
    assert layer.format_id == "states:bfloat16[3, 8]+float32[2, 4, 4]"


def test_bytes_without_a_name_do_not_leave() -> None:
    fmt = by_name("bfloat16")
    plan = plan_of({"a": (spec_of(fmt), "")}, KVCacheLayout.LBNHC)
    with pytest.raises(ValueError, match="no format id"):
        layout_fingerprint(plan)
    plan.kv_cache_layout = None
    with pytest.raises(ValueError, match="not recorded"):
        layout_fingerprint(plan)
    with pytest.raises(ValueError, match="not a layout fingerprint"):
        LayoutFingerprint.from_dict({"layers": [{"nonsense": 1}]})
    with pytest.raises(ValueError, match="layers a have no registered"):
        page_table(plan, {})
