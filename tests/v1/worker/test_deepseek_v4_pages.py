"""DeepSeek-V4's pages from the format's table through the planner to the worker.

Four layers a row: pages of 64 states hold data then scales, padded to whole data
records; zeroing and writing leave the padding alone.
"""

from typing import Any

import pytest
import torch

from tests.v1.spec_samples import config
from tests.v1.worker.test_kv_cache_init import Backend
from tests.v1.worker.test_worker_utils import Layer
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.kv_formats import by_name
from vllm.v1.worker.kv_cache_init import BoundLayer, byte_view, create_kv_caches
from vllm.v1.worker.kv_cache_init import allocate_pages as allocate
from vllm.v1.worker.utils import KVBlockZeroer, make_attention_groups

CPU = torch.device("cpu")
V4, INDEXER = by_name("deepseek_v4"), by_name("dsa_indexer")
BLOCKS, STRIDE, PAGE, PADDED = 100, 149_760, 37_376, 37_440
WINDOWED = ["sw0", "sw1", "sw2", "sw3"]


def spec(cls: type[KVCacheSpec], fmt: Any, block_size: int, **how: Any) -> KVCacheSpec:
    """What such a layer publishes, by the name of its format."""
    return cls(
        block_size=block_size,
        num_kv_heads=1,
        head_size=fmt.head_size,
        dtype=torch.uint8,
        kv_quant_mode=fmt.mode,
        alignment=V4.page_alignment,
        model_version="deepseek_v4",
        cache_dtype_str=fmt.name,
        **how,
    ).packed(fmt)


def plan() -> KVCacheConfig:
    """Four windowed layers, beside three compressed ones with an indexer each."""
    specs = {name: windowed() for name in WINDOWED}
    for i in range(3):
        specs[f"main{i}"] = spec(MLAAttentionSpec, V4, 256, compress_ratio=4)
        specs[f"index{i}"] = spec(MLAAttentionSpec, INDEXER, 256, compress_ratio=4)
    formats = {
        name: INDEXER.format_id if name.startswith("index") else V4.format_id
        for name in specs
    }
    (planned,) = get_kv_cache_configs(
        config(), [specs], [BLOCKS * STRIDE], layer_formats=formats
    )
    return planned


def windowed() -> KVCacheSpec:
    return spec(SlidingWindowMLASpec, V4, 64, sliding_window=128)


def test_the_table_gives_the_page() -> None:
    assert V4.record_bytes == 584 and V4.page_alignment == 576
    page = windowed()
    assert page.unpadded_page_size_bytes == PAGE
    assert page.page_size_bytes == PADDED
    main = spec(MLAAttentionSpec, V4, 256, compress_ratio=4)
    assert (main.num_states, main.page_size_bytes) == (64, PADDED)
    index = spec(MLAAttentionSpec, INDEXER, 256, compress_ratio=4)
    assert (index.unpadded_page_size_bytes, index.page_size_bytes) == (8448, 8640)


def test_the_planner_puts_four_layers_in_a_row() -> None:
    planned = plan()
    assert planned.num_blocks == BLOCKS
    places = {
        name: (tensor.offset, tensor.block_stride, tensor.size)
        for tensor in planned.kv_cache_tensors
        for name in tensor.shared_by
    }
    offsets = [places[name][0] for name in WINDOWED]
    assert offsets == [0, PADDED, 2 * PADDED, 3 * PADDED]
    assert {places[name][1:] for name in places} == {(STRIDE, BLOCKS * STRIDE)}
    assert planned.layer_formats["sw0"] == V4.format_id


def bound(planned: KVCacheConfig) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Views of all layers over one backing full of 255."""
    layers = {
        name: BoundLayer(backend=Backend, kernel_block_size=spec.block_size)
        for name, spec in planned.layer_specs().items()
    }
    caches, _ = create_kv_caches(planned, KVCacheLayout.BLHNC, layers, CPU)
    backing = torch.empty(0, dtype=torch.uint8).set_(caches["sw0"].untyped_storage())
    backing.fill_(255)
    return caches, backing


def test_zeroing_leaves_the_tails_of_pages() -> None:
    planned = plan()
    caches, backing = bound(planned)
    total = backing.numel()
    assert total == 14_976_000
    layers = {name: Layer() for name in planned.layer_specs()}
    for name, layer in layers.items():
        layer.kv_cache = caches[name]
    groups = [
        group
        for members in make_attention_groups(planned, layers)
        for group in members
        if set(group.layer_names) <= set(WINDOWED)
    ]
    sizes = [g.kv_cache_spec.block_size for g in planned.kv_cache_groups]
    KVBlockZeroer(CPU, groups, sizes, "auto", layers).zero_block_ids([0, 57, 99])
    written = (backing == 0).view(BLOCKS, 4, PADDED)
    assert int(written.flatten().nonzero().max()) == total - 65
    assert written[[0, 57, 99], :, :PAGE].all()
    assert not written[[0, 57, 99], :, PAGE:].any()
    assert int(written.sum()) == 3 * 4 * PAGE


@pytest.mark.parametrize("name", ["sw3", "main1", "index2"])
def test_states_are_written_within_their_page_and_read_back(name: str) -> None:
    planned = plan()
    _, backing = bound(planned)
    fmt = INDEXER if name.startswith("index") else V4
    pages = allocate(planned, CPU)[name]
    view = byte_view(pages, KVCacheLayout.BLHNC)
    backing = torch.empty(0, dtype=torch.uint8).set_(view.untyped_storage())
    backing.fill_(255)
    blocks = torch.tensor([7, 3])
    latents = torch.randn(100, 1, fmt.head_size, dtype=torch.bfloat16)
    at = torch.arange(100)
    fmt.store(view, blocks[at // 64] * 64 + at % 64, latents, None)
    found, _ = fmt.load(view, blocks, 100, fmt.head_size, 0, torch.bfloat16)
    expected, _ = fmt.roundtrip(latents, None)
    assert torch.equal(found, expected)
    changed = (backing != 255).nonzero().flatten()
    page = (changed - pages.start) % STRIDE
    assert set(((changed - pages.start) // STRIDE).tolist()) == {3, 7}
    assert int(page.min()) >= 0 and int(page.max()) < 64 * fmt.record_bytes


def test_scales_of_a_page_follow_all_of_its_data() -> None:
    layout = V4.layout(V4.head_size, 0)
    for state in (0, 1, 63):
        data = layout.offset("nope", state=state, num_states=64)
        scale = layout.offset("nope_scale", state=state, num_states=64)
        assert (data, scale) == (576 * state, 36_864 + 8 * state)
