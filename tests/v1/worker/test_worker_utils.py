"""Zeroing touches exactly the named blocks; kernel blocks suit every backend."""

from unittest import mock

import pytest
import torch

from tests.v1.worker.test_kv_cache_init import (
    STRIDES,
    Backend,
    KVFirstBackend,
    full,
    plain_config,
    stacked_config,
)
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    KVQuantMode,
    SlidingWindowMLASpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker import utils as worker_utils
from vllm.v1.worker.kv_cache_init import BoundLayer, create_kv_caches
from vllm.v1.worker.utils import (
    AttentionGroup,
    KVBlockZeroer,
    add_kv_sharing_layers_to_kv_cache_groups,
    make_attention_groups,
    prepare_kernel_block_sizes,
    select_common_block_size,
)

CPU = torch.device("cpu")


class Layer:
    def __init__(self, backend=Backend):
        self.kv_cache = None
        self.backend = backend

    def get_attn_backend(self):
        return self.backend


def zeroed(config: KVCacheConfig, layout, block_ids, kernel=None, backend=Backend):
    """Fills every byte with 255, zeroes blocks, and returns the layers' backings."""
    layers = {name: Layer(backend) for name in config.layer_specs()}
    groups = make_attention_groups(config, layers)
    sizes = [kernel or g.kv_cache_spec.block_size for g in config.kv_cache_groups]
    bound = {
        name: BoundLayer(backend=backend, kernel_block_size=sizes[0]) for name in layers
    }
    caches, _ = create_kv_caches(config, layout, bound, CPU)
    backings = {}
    for name, cache in caches.items():
        layers[name].kv_cache = cache
        backings[name] = torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage())
        backings[name].fill_(255)
    flat = [group for members in groups for group in members]
    zeroer = KVBlockZeroer(CPU, flat, sizes, "auto", layers)
    zeroer.zero_block_ids(block_ids)
    return backings


def test_packed_pages_keep_their_tails_and_neighbours():
    spec = SlidingWindowMLASpec(
        block_size=64,
        num_kv_heads=1,
        head_size=512,
        dtype=torch.uint8,
        sliding_window=128,
        alignment=576,
        state_content_bytes=584,
        model_version="deepseek_v4",
    )
    assert spec.page_size_bytes == 37_440 and spec.unpadded_page_size_bytes == 37_376
    stride, names = 4 * 37_440, ["l0", "l1", "l2", "l3"]
    uniform = UniformTypeKVCacheSpecs(
        block_size=64, kv_cache_specs=dict.fromkeys(names, spec)
    )
    tensors = [
        KVCacheTensor(
            size=100 * stride, shared_by=[name], offset=i * 37_440, block_stride=stride
        )
        for i, name in enumerate(names)
    ]
    config = KVCacheConfig(100, tensors, [KVCacheGroupSpec(names, uniform)])
    backing = zeroed(config, KVCacheLayout.BLHNC, [0, 57, 99])["l0"]
    total = backing.numel()
    assert total == 14_976_000
    written = (backing == 0).nonzero().squeeze(1)
    assert written.max() == total - 65
    pages = (backing == 0).view(100, 4, 37_440)
    assert pages[[0, 57, 99], :, :37_376].all()
    assert not pages[[0, 57, 99], :, 37_376:].any()
    others = [i for i in range(100) if i not in (0, 57, 99)]
    assert not pages[others].any()


@pytest.mark.parametrize("layout", list(KVCacheLayout), ids=lambda la: la.name)
def test_every_layout_loses_exactly_its_blocks(layout):
    backing = zeroed(stacked_config(layout), layout, [1, 3])["a"]
    strides = STRIDES[layout.name]
    want = torch.full_like(backing, 255)
    want.as_strided((2, 4, 8, 16, 512), strides)[:, [1, 3]] = 0
    assert torch.equal(backing, want)


def test_a_manager_block_is_all_its_kernel_blocks():
    backing = zeroed(plain_config(full(block_size=64)), KVCacheLayout.LBHNC, [2], 16)
    blocks = (backing["a"] == 0).view(4, -1)
    assert blocks[2].all() and not blocks[[0, 1, 3]].any()


def test_dense_and_packed_layers_are_zeroed_side_by_side():
    packed = full(
        dtype=torch.uint8,
        kv_quant_mode=KVQuantMode.TURBOQUANT_4BIT_NC,
        state_content_bytes=134,
        page_size_padded=20_000,
    )
    dense = full(num_kv_heads=2, page_size_padded=20_000)
    groups = [KVCacheGroupSpec(["p"], packed), KVCacheGroupSpec(["d"], dense)]
    tensor = KVCacheTensor(size=5 * 20_000, shared_by=["p", "d"])
    config = KVCacheConfig(5, [tensor], groups)
    blocks = (zeroed(config, KVCacheLayout.LBHNC, [0, 4])["p"] == 0).view(5, -1)
    longest = max(packed.unpadded_page_size_bytes, dense.unpadded_page_size_bytes)
    assert blocks[[0, 4], :longest].all()
    assert not blocks[[0, 4], longest:].any() and not blocks[1:4].any()


def test_bytes_under_two_formats_are_zeroed_once(monkeypatch):
    views = []
    monkeypatch.setattr(
        worker_utils, "block_zeroer", lambda found: views.append(found) or mock.Mock()
    )
    specs = {"wide": full(), "narrow": full(num_kv_heads=2), "apart": full()}
    backing = torch.zeros(2, 4, 70_000, dtype=torch.uint8)
    layers, groups = {}, []
    for i, (name, spec) in enumerate(specs.items()):
        layers[name] = Layer()
        layers[name].kv_cache = backing[int(name == "apart"), :, : spec.page_size_bytes]
        groups.append(AttentionGroup(Backend, [name], spec, i))
    KVBlockZeroer(CPU, groups, [16] * 3, "auto", layers)
    (found,) = views
    assert [v.data_ptr() for v in found] == [half.data_ptr() for half in backing]
    assert all(v.shape == (4, specs["wide"].page_size_bytes) for v in found)


def test_kv_first_caches_lose_both_planes_of_a_block():
    config = plain_config(full(), names=("a",))
    backing = zeroed(config, KVCacheLayout.LBHNC, [1], backend=KVFirstBackend)["a"]
    blocks = (backing == 0).view(4, -1)
    assert blocks[1].all() and not blocks[[0, 2, 3]].any()


def test_zeroing_nothing_does_nothing():
    assert (zeroed(plain_config(full()), KVCacheLayout.LBHNC, [])["a"] == 255).all()


class Takes(Backend):
    sizes: tuple = ()

    @classmethod
    def get_supported_kernel_block_sizes(cls):
        return list(cls.sizes)


def taking(*block_sizes):
    return type("Takes", (Takes,), {"sizes": block_sizes})


@pytest.mark.parametrize(
    ("manager", "backends", "want"),
    [
        (48, [taking(MultipleOf(16))], 48),
        (48, [taking(16, 32)], 16),
        (128, [taking(16, 32, 64), taking(MultipleOf(32))], 64),
        (64, [taking(64), taking(MultipleOf(1))], 64),
        (256, [taking(MultipleOf(16)), taking(16, 64)], 64),
    ],
)
def test_the_largest_common_kernel_block_is_taken(manager, backends, want):
    assert select_common_block_size(manager, backends) == want


def test_backends_without_a_common_kernel_block_are_refused():
    with pytest.raises(ValueError, match=r"blocks of 80 tokens.*--block-size"):
        select_common_block_size(80, [taking(32), taking(16)])


def test_states_of_several_tokens_are_not_split():
    spec = SlidingWindowMLASpec(
        block_size=256,
        num_kv_heads=1,
        head_size=512,
        dtype=torch.uint8,
        sliding_window=128,
        compress_ratio=4,
    )
    config = plain_config(spec, names=("a",))
    groups = [[AttentionGroup(taking(64), ["a"], spec, 0)]]
    assert prepare_kernel_block_sizes(config, groups) == [256]


def test_layers_are_grouped_by_backend_and_spec():
    other = taking(16)
    specs = {"a": full(), "b": full(), "c": full(head_size=64), "d": full()}
    uniform = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=specs)
    config = KVCacheConfig(1, [], [KVCacheGroupSpec(list(specs), uniform)])
    layers = {name: Layer(other if name == "d" else Backend) for name in specs}
    (groups,) = make_attention_groups(config, layers)
    assert [group.layer_names for group in groups] == [["a", "b"], ["c"], ["d"]]
    assert all(group.kv_cache_group_id == 0 for group in groups)


def test_builders_see_the_spec_in_kernel_blocks():
    group = AttentionGroup(Backend, ["a"], full(block_size=64), 0)
    group.create_metadata_builders(None, CPU, 16)
    assert group.get_metadata_builder().kv_cache_spec == full()


def test_sharing_layers_join_their_targets_group():
    groups = [KVCacheGroupSpec(["a"], full()), KVCacheGroupSpec(["b"], full())]
    runner_only = set()
    add_kv_sharing_layers_to_kv_cache_groups({"c": "b", "d": "a"}, groups, runner_only)
    assert [g.layer_names for g in groups] == [["a", "d"], ["b", "c"]]
    assert runner_only == {"c", "d"}
    with pytest.raises(ValueError, match="'x'"):
        add_kv_sharing_layers_to_kv_cache_groups({"e": "x"}, groups)


def test_the_zeroer_skips_layers_without_pages_of_their_own():
    cache = torch.full((3, 1, 2, 4), 7, dtype=torch.uint8)
    layer, sharing = Layer(), Layer()
    layer.kv_cache = cache
    spec = FullAttentionSpec(
        block_size=2, num_kv_heads=1, head_size=2, dtype=torch.uint8
    )
    group = AttentionGroup(Backend, ["a", "s"], spec, 0)
    zeroer = KVBlockZeroer(CPU, [group], [2], "auto", {"a": layer, "s": sharing}, {"s"})
    zeroer.warmup(3)
    assert not cache[0].any() and (cache[1:] == 7).all()
