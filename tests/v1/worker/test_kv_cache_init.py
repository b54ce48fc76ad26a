"""Views cover the pages of the plan: right strides, no byte twice, nothing outside."""

import pytest
import torch

from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.ops.blocks import BlockCopier
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.kv_cache_init import (
    BoundLayer,
    allocate_pages,
    bind_kv_caches,
    byte_view,
    create_kv_caches,
    kernel_byte_view,
    zeroed_bytes,
)

CPU = torch.device("cpu")
# Byte strides of (L, B, H, N, C) for 2 layers, 4 blocks, 8 heads, 16 states, 512 bytes.
STRIDES = {
    "LBHNC": (262144, 65536, 8192, 512, 1),
    "LBNHC": (262144, 65536, 512, 4096, 1),
    "LHBNC": (262144, 8192, 32768, 512, 1),
    "BLHNC": (65536, 131072, 8192, 512, 1),
    "BLNHC": (65536, 131072, 512, 4096, 1),
    "BHLNC": (8192, 131072, 16384, 512, 1),
}


class Backend(AttentionBackend):
    @staticmethod
    def get_name():
        return "TEST"

    @staticmethod
    def get_impl_cls():
        raise NotImplementedError


class HeadlessBackend(Backend):
    """One latent per token, no axis for heads, as MLA backends shape their caches."""

    @staticmethod
    def get_kv_cache_shape(blocks, block_size, heads, head_size, dtype="auto"):
        return blocks, block_size, head_size

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension=False):
        return (0, 1, 2)


class KVFirstBackend(Backend):
    """K and V planes of all blocks, in a shape from before packed content."""

    @staticmethod
    def get_kv_cache_shape(blocks, block_size, heads, head_size, dtype="auto"):
        return 2, blocks, block_size, heads, head_size

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension=False):
        return (1, 0, 2, 3, 4)


def full(**changes) -> FullAttentionSpec:
    defaults = {
        "block_size": 16,
        "num_kv_heads": 8,
        "head_size": 128,
        "dtype": torch.bfloat16,
    }
    return FullAttentionSpec(**{**defaults, **changes})


def plain_config(spec, num_blocks=4, names=("a", "b")) -> KVCacheConfig:
    size = spec.page_size_bytes * num_blocks
    tensors = [KVCacheTensor(size=size, shared_by=[name]) for name in names]
    return KVCacheConfig(num_blocks, tensors, [KVCacheGroupSpec(list(names), spec)])


def stacked_config(layout: KVCacheLayout) -> KVCacheConfig:
    """Both layers in one tensor with layer and block strides, as STRIDES has them."""
    strides = STRIDES[layout.name]
    tensor = KVCacheTensor(
        size=2 * 4 * 65536,
        layers=["a", "b"],
        layer_stride=strides[0],
        block_stride=strides[1],
    )
    return KVCacheConfig(4, [tensor], [KVCacheGroupSpec(["a", "b"], full())])


def touched(view: torch.Tensor) -> torch.Tensor:
    """Offsets, in bytes from the backing's start, of every byte of a byte view."""
    size = view.untyped_storage().nbytes()
    return torch.arange(size).as_strided(
        view.shape, view.stride(), view.storage_offset()
    )


@pytest.mark.parametrize("layout", list(KVCacheLayout), ids=lambda la: la.name)
def test_views_of_all_layouts_have_their_strides_and_share_no_byte(layout):
    pages = allocate_pages(stacked_config(layout), CPU)
    views = [byte_view(pages[name], layout) for name in ("a", "b")]
    want = STRIDES[layout.name]
    for place, view in enumerate(views):
        assert view.shape == (4, 8, 16, 512)
        assert view.stride() == want[1:]
        assert view.storage_offset() == place * want[0]
    offsets = torch.cat([touched(view).reshape(-1) for view in views])
    assert torch.equal(offsets.sort().values, torch.arange(2 * 4 * 65536))


@pytest.mark.parametrize("layout", list(KVCacheLayout), ids=lambda la: la.name)
def test_a_tensor_per_layer_is_covered_once(layout):
    pages = allocate_pages(plain_config(full()), CPU)
    for name in ("a", "b"):
        view = byte_view(pages[name], layout)
        offsets = touched(view).reshape(-1).sort().values
        assert torch.equal(offsets, torch.arange(4 * 65536))
    assert pages["a"].backing.data_ptr() != pages["b"].backing.data_ptr()


def test_padded_pages_start_at_multiples_of_the_padded_size():
    config = plain_config(full(page_size_padded=70_000))
    view = byte_view(allocate_pages(config, CPU)["a"], KVCacheLayout.LBHNC)
    assert view.stride(0) == 70_000 and view.shape == (4, 8, 16, 512)
    with pytest.raises(ValueError, match="block-compact"):
        byte_view(allocate_pages(config, CPU)["a"], KVCacheLayout.LHBNC)


@pytest.mark.parametrize("name", ["LBHNC", "LBNHC"])
def test_kernel_blocks_are_dense_pages_of_their_own(name):
    layout = KVCacheLayout.from_name(name)
    pages = allocate_pages(plain_config(full(block_size=64)), CPU)["a"]
    view = kernel_byte_view(pages, layout, 16)
    assert view.shape == (16, 8, 16, 512)
    assert view.stride() == STRIDES[name][1:]
    # Kernel blocks 4 b … 4 b + 3 lie inside manager block b.
    offsets = touched(view).flatten(1)
    for block in range(16):
        inside = offsets[block] // (8 * 64 * 512)
        assert (inside == block // 4).all()


@pytest.mark.parametrize(
    ("spec", "layout"),
    [
        (full(block_size=64, page_size_padded=300_000), "LBHNC"),
        (full(block_size=64), "LHBNC"),
    ],
)
def test_a_kernel_split_of_pages_that_are_not_dense_is_refused(spec, layout):
    pages = allocate_pages(plain_config(spec), CPU)["a"]
    with pytest.raises(ValueError, match=f"{layout}.*--block-size to 16"):
        kernel_byte_view(pages, KVCacheLayout.from_name(layout), 16)


def test_layers_see_the_spec_dtype_over_the_same_bytes():
    packed = full(
        dtype=torch.uint8,
        kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD,
        state_content_bytes=264,
    )
    for spec, last in ((full(), 256), (packed, 264)):
        layer = BoundLayer(backend=Backend, kernel_block_size=16)
        bound, managed = create_kv_caches(
            plain_config(spec, names=("a",)), KVCacheLayout.LBHNC, {"a": layer}, CPU
        )
        assert bound["a"].dtype == spec.dtype
        assert bound["a"].shape == (4, 8, 16, last)
        assert bound["a"].data_ptr() == managed["a"].data_ptr()


def test_states_that_are_no_whole_elements_are_refused():
    spec = full(state_content_bytes=511)
    layer = BoundLayer(backend=Backend, kernel_block_size=16)
    with pytest.raises(ValueError, match=r"layer 'a'.*torch.bfloat16"):
        create_kv_caches(
            plain_config(spec, names=("a",)), KVCacheLayout.LBHNC, {"a": layer}, CPU
        )


def test_groups_share_a_tensor_and_packed_tensors_share_one_backing():
    window = SlidingWindowSpec(
        block_size=16,
        num_kv_heads=8,
        head_size=128,
        dtype=torch.bfloat16,
        sliding_window=32,
    )
    groups = [KVCacheGroupSpec(["a"], full()), KVCacheGroupSpec(["w"], window)]
    shared = KVCacheConfig(
        4, [KVCacheTensor(size=4 * 65536, shared_by=["a", "w"])], groups
    )
    pages = allocate_pages(shared, CPU)
    assert pages["a"].backing is pages["w"].backing
    stride = 65536 + 70_000
    uniform = UniformTypeKVCacheSpecs(
        block_size=16,
        kv_cache_specs={"a": full(), "b": full(page_size_padded=70_000)},
    )
    tensors = [
        KVCacheTensor(size=4 * stride, shared_by=["a"], block_stride=stride),
        KVCacheTensor(
            size=4 * stride, shared_by=["b"], offset=65536, block_stride=stride
        ),
    ]
    packed = KVCacheConfig(4, tensors, [KVCacheGroupSpec(["a", "b"], uniform)])
    pages = allocate_pages(packed, CPU)
    assert pages["a"].backing is pages["b"].backing
    views = [byte_view(pages[name], KVCacheLayout.BLHNC) for name in "ab"]
    assert [v.storage_offset() for v in views] == [0, 65536]
    assert [v.stride(0) for v in views] == [stride, stride]


BROKEN_PLANS = {
    "wrong size": (
        [KVCacheTensor(size=4 * 65536 + 2, shared_by=["a"])],
        "does not hold 4 blocks",
    ),
    "layer without a tensor": ([], "no tensor of the plan"),
    "two layers of a group over the same bytes": (
        [KVCacheTensor(size=4 * 65536, shared_by=["a", "b"])],
        "overwrite each other",
    ),
    "tensor for an unknown layer": (
        [KVCacheTensor(size=4 * 65536, shared_by=["zz"])],
        "in no group",
    ),
    "backings of different sizes": (
        [
            KVCacheTensor(size=4 * 131072, shared_by=["a"], block_stride=131072),
            KVCacheTensor(
                size=4 * 131073, shared_by=["b"], offset=65536, block_stride=131072
            ),
        ],
        "share one backing",
    ),
    "page outside of its block": (
        [
            KVCacheTensor(size=4 * 131072, shared_by=["a"], block_stride=131072),
            KVCacheTensor(
                size=4 * 131072, shared_by=["b"], offset=65538, block_stride=131072
            ),
        ],
        "does not fit a block",
    ),
}


@pytest.mark.parametrize("case", BROKEN_PLANS)
def test_a_broken_plan_is_refused_by_name(case):
    tensors, message = BROKEN_PLANS[case]
    config = KVCacheConfig(4, tensors, [KVCacheGroupSpec(["a", "b"], full())])
    with pytest.raises(ValueError, match=message):
        allocate_pages(config, CPU)


def test_a_view_beyond_the_backing_is_refused():
    tensor = KVCacheTensor(
        size=4 * 65536, layers=["a"], layer_stride=4 * 65536, block_stride=65537
    )
    config = KVCacheConfig(4, [tensor], [KVCacheGroupSpec(["a"], full())])
    with pytest.raises(ValueError, match="outside of the backing"):
        byte_view(allocate_pages(config, CPU)["a"], KVCacheLayout.LBHNC)


def test_a_backend_with_a_shape_of_its_own_is_honoured():
    layer = BoundLayer(backend=KVFirstBackend, kernel_block_size=16)
    bound, _ = create_kv_caches(
        plain_config(full(), names=("a",)), KVCacheLayout.LBHNC, {"a": layer}, CPU
    )
    assert bound["a"].shape == (2, 4, 16, 8, 128)
    assert bound["a"].stride() == (16 * 8 * 128, 2 * 16 * 8 * 128, 1024, 128, 1)


class TokensFirstBackend(Backend):
    """Blocks, then tokens, then heads, K and V beside one another."""

    @staticmethod
    def get_kv_cache_shape(blocks, block_size, heads, head_size, dtype="auto"):
        return blocks, heads, block_size, 2 * head_size

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension=False):
        return (0, 2, 1, 3)


class PlanesFirstBackend(KVFirstBackend):
    """All K planes, then all V planes: a block is not one run of bytes."""

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension=False):
        return (0, 1, 2, 3, 4)


@pytest.mark.parametrize(
    ("backend", "stride"),
    [
        (KVFirstBackend, (16 * 8 * 128, 35_000, 1024, 128, 1)),
        (TokensFirstBackend, (35_000, 256, 2048, 1)),
    ],
)
def test_padding_follows_each_block_of_such_a_shape(backend, stride):
    config = plain_config(full(page_size_padded=70_000), names=("a",))
    layer = BoundLayer(backend=backend, kernel_block_size=16)
    bound, managed = create_kv_caches(config, KVCacheLayout.LBNHC, {"a": layer}, CPU)
    view = bound["a"]
    assert view.stride() == stride
    view.fill_(1)
    pages = view.untyped_storage()
    filled = torch.tensor(pages, dtype=torch.uint8).view(4, 70_000) != 0
    assert filled[:, :65_536].any() and not filled[:, 65_536:].any()
    assert managed["a"].shape == (4, 8, 16, 256)


@pytest.mark.parametrize(
    ("spec", "backend", "kernel"),
    [
        (full(page_size_padded=70_000), PlanesFirstBackend, 16),
        (full(block_size=32, page_size_padded=140_000), TokensFirstBackend, 16),
    ],
    ids=["planes of all blocks", "kernel blocks"],
)
def test_padded_pages_that_such_a_shape_would_tear_are_refused(spec, backend, kernel):
    layer = BoundLayer(backend=backend, kernel_block_size=kernel)
    with pytest.raises(ValueError, match="dense pages"):
        create_kv_caches(
            plain_config(spec, names=("a",)), KVCacheLayout.LBNHC, {"a": layer}, CPU
        )


def test_a_single_head_slot_has_no_axis_where_the_backend_wants_none():
    spec = MLAAttentionSpec(
        block_size=64,
        num_kv_heads=1,
        head_size=576,
        dtype=torch.bfloat16,
        page_size_padded=80_000,
    )
    layer = BoundLayer(backend=HeadlessBackend, kernel_block_size=64)
    bound, managed = create_kv_caches(
        plain_config(spec, names=("a",)), KVCacheLayout.LBNHC, {"a": layer}, CPU
    )
    assert bound["a"].shape == (4, 64, 576) and bound["a"].stride(0) == 40_000
    assert managed["a"].shape == (4, 1, 64, 576)


def test_recurrent_states_follow_one_another_in_their_page():
    spec = MambaSpec(
        block_size=16,
        shapes=((3, 4), (5,)),
        dtypes=(torch.bfloat16, torch.float32),
        page_size_padded=64,
    )
    bound, _ = create_kv_caches(
        plain_config(spec, names=("a",)), KVCacheLayout.LBHNC, {}, CPU
    )
    conv, ssm = bound["a"]
    assert conv.shape == (4, 3, 4) and conv.dtype == torch.bfloat16
    assert ssm.shape == (4, 5) and ssm.dtype == torch.float32
    conv[2] = 1
    ssm[2] = 2
    backing = torch.empty(0, dtype=torch.uint8).set_(conv.untyped_storage())
    assert backing.nonzero().min() >= 2 * 64 and backing.nonzero().max() < 2 * 64 + 44
    assert not conv[[0, 1, 3]].any() and not ssm[[0, 1, 3]].any()


def test_sharing_layers_get_their_targets_cache():
    class Layer:
        kv_cache = None

    layers = {"a": Layer(), "b": Layer()}
    cache = torch.zeros(1)
    bind_kv_caches({"a": cache}, layers, {"b": "a"})
    assert layers["a"].kv_cache is cache and layers["b"].kv_cache is cache
    with pytest.raises(ValueError, match="'b' shares the KV cache of 'c'"):
        bind_kv_caches({"a": cache}, layers, {"b": "c"})
    with pytest.raises(ValueError, match="'x'"):
        bind_kv_caches({"x": cache}, layers, {})


def test_blocks_are_copied_whole():
    cache = torch.arange(24.0).view(4, 6)
    want = cache.clone()
    want[3], want[0] = want[1].clone(), want[2].clone()
    copier = BlockCopier([cache])
    copier.copy([(1, 3), (2, 0)])
    copier.copy([])
    assert torch.equal(cache, want)


def test_memory_is_zero_and_has_the_asked_size():
    for size in (0, 3, 5 << 20):
        memory = zeroed_bytes(size, CPU)
        assert memory.shape == (size,) and not memory.any()
