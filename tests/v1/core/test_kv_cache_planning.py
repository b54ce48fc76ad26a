"""From specs to plans: tensors, several workers, mixed formats, scheduler's view."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch

from tests.v1.spec_samples import config, full, in_format, sliding
from vllm.v1.core import block_hash, kv_cache_utils
from vllm.v1.core.kv_cache_utils import (
    _get_kv_cache_config_packed,
    _get_packed_kv_cache_layout,
    _use_packed_kv_cache_config,
    generate_scheduler_kv_cache_config,
    get_kv_cache_config_from_groups,
    get_kv_cache_configs,
    pool_bytes_per_block,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MLAAttentionSpec,
    RSWASpec,
    SpecError,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_spec_base import KVCacheSpec

PAGE = full().page_size_bytes  # 16,384 bytes


def plan(specs: dict, memory: int, **settings) -> KVCacheConfig:
    settings.setdefault("max_model_len", 16)
    settings.setdefault("max_in_flight_tokens", 16)
    return get_kv_cache_configs(config(**settings), [specs], [memory])[0]


def tensor(blocks: int, *layers: str, page: int = PAGE) -> KVCacheTensor:
    return KVCacheTensor(size=page * blocks, shared_by=list(layers))


# --- one worker -----------------------------------------------------------------------


def test_equal_layers_make_one_group_and_a_tensor_each() -> None:
    assert plan({"a": full(), "b": full()}, PAGE * 2 * 32) == KVCacheConfig(
        num_blocks=32,
        kv_cache_tensors=[tensor(32, "a"), tensor(32, "b")],
        kv_cache_groups=[KVCacheGroupSpec(["a", "b"], full())],
    )


def test_groups_share_tensors_by_place() -> None:
    names = [f"full.{i}" for i in range(3)] + [f"sw.{i}" for i in range(7)]
    specs = {n: full() if n.startswith("full") else sliding() for n in names}
    found = plan(specs, PAGE * 3 * 32)
    assert found.num_blocks == 32
    assert [g.layer_names for g in found.kv_cache_groups] == [
        ["full.0", "full.1", "full.2"],
        ["sw.0", "sw.3", "sw.6"],
        ["sw.1", "sw.4"],
        ["sw.2", "sw.5"],
    ]
    assert found.kv_cache_tensors == [
        tensor(32, "full.0", "sw.0", "sw.1", "sw.2"),
        tensor(32, "full.1", "sw.3", "sw.4", "sw.5"),
        tensor(32, "full.2", "sw.6"),
    ]


def test_without_the_hybrid_manager_windows_are_recorded_not_applied() -> None:
    found = plan({"a": full(), "b": sliding()}, PAGE * 2 * 32, no_hybrid=True)
    assert found.num_blocks == 32
    assert found.kv_cache_groups == [
        KVCacheGroupSpec(["a", "b"], full(sliding_window=1))
    ]


def test_unlike_pages_of_one_kind_make_one_group_without_padding() -> None:
    specs = {"a": full(head_size=128), "b": full()}
    found = plan(specs, PAGE * 3 * 32)
    assert found.num_blocks == 32
    assert found.kv_cache_tensors == [
        tensor(32, "a", page=2 * PAGE),
        tensor(32, "b"),
    ]
    group = found.kv_cache_groups[0].kv_cache_spec
    assert group == UniformTypeKVCacheSpecs(16, specs)


def test_blocks_grow_where_pages_divide() -> None:
    found = plan({"a": full(), "b": sliding(head_size=32)}, PAGE * 32)
    assert found.kv_cache_tensors == [tensor(32, "a", "b")]
    assert found.kv_cache_groups[1].kv_cache_spec == sliding(
        head_size=32, block_size=32
    )


def test_dense_blocks_that_cannot_be_padded_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="layer 'a' has pages") as caught:
        plan({"a": full(), "b": sliding(head_size=96)}, 1 << 30)
    assert isinstance(caught.value, ValueError)
    assert "16384" in str(caught.value)
    assert "24576" in str(caught.value)


def test_the_known_number_of_blocks() -> None:
    spec = full(block_size=544, num_kv_heads=2, head_size=256, dtype=torch.bfloat16)
    specs = {f"{i}": spec for i in range(12)}
    assert plan(specs, 20 << 30, max_model_len=544).num_blocks == 1606


def test_a_model_without_cache_has_the_null_block_only() -> None:
    empty = KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[])
    assert plan({}, 0) == empty
    assert get_kv_cache_config_from_groups(config(), [], 0) == empty


def test_an_override_decides_the_number_of_blocks() -> None:
    found = plan({"a": full()}, 0, num_gpu_blocks_override=16)
    assert found.num_blocks == 16
    assert found.kv_cache_tensors == [tensor(16, "a")]


# --- formats --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "fp8",
        "int8_per_token_head",
        "int4_per_token_head",
        "nvfp4",
        "turboquant_k8v4",
        "turboquant_3bit_nc",
    ],
)
@pytest.mark.parametrize("num_layers", [4, 30])
def test_dense_boundary_layers_cost_their_bytes_and_nothing_else(
    name: str, num_layers: int
) -> None:
    dense, packed = in_format("bfloat16"), in_format(name)
    skipped = {0, 1, num_layers - 2, num_layers - 1}
    specs = {f"{i}": dense if i in skipped else packed for i in range(num_layers)}
    memory = 1 << 30
    found = plan(specs, memory)
    per_block = sum(spec.page_size_bytes for spec in specs.values())
    assert found.num_blocks == memory // per_block
    assert sum(t.size for t in found.kv_cache_tensors) == found.num_blocks * per_block
    assert [t.shared_by for t in found.kv_cache_tensors] == [[n] for n in specs]
    assert len(found.kv_cache_groups) == 1
    assert found.kv_cache_groups[0].kv_cache_spec.block_size == 16
    assert found.layer_specs() == specs
    assert found.has_mixed_precision_kv_cache == (num_layers > 4)


def test_formats_and_layout_are_recorded_for_the_layers_of_a_worker() -> None:
    ids = {"a": "fp8_e4m3:cells", "b": "bfloat16:cells"}
    workers = [{"a": in_format("fp8")}, {"b": in_format("bfloat16")}]
    configs = get_kv_cache_configs(
        config(16),
        workers,
        [1 << 30] * 2,
        layer_formats=ids,
        kv_cache_layout="LBHNC",
    )
    assert [c.layer_formats for c in configs] == [{"a": ids["a"]}, {"b": ids["b"]}]
    assert {c.kv_cache_layout for c in configs} == {"LBHNC"}


# --- several workers ------------------------------------------------------------------


def test_workers_agree_on_the_smaller_number_of_blocks() -> None:
    specs = {"a": full(), "b": full()}
    configs = get_kv_cache_configs(
        config(16), [specs, specs], [PAGE * 2 * 10, PAGE * 2 * 20]
    )
    assert [c.num_blocks for c in configs] == [10, 10]
    assert configs[0] == configs[1]


def test_pipeline_stages_have_the_same_groups_and_their_own_layers() -> None:
    one = {"a": full(), "b": sliding()}
    two = {"c": full()}
    configs = get_kv_cache_configs(
        config(16, max_in_flight_tokens=16), [one, two, {}], [PAGE * 10] * 2 + [0]
    )
    assert [[g.layer_names for g in c.kv_cache_groups] for c in configs] == [
        [["a"], [], ["b"]],
        [[], ["c"], []],
        [[], [], []],
    ]
    assert [c.num_blocks for c in configs] == [10, 10, 10]
    assert [c.kv_cache_tensors for c in configs] == [
        [tensor(10, "a", "b")],
        [tensor(10, "c")],
        [],
    ]


def test_a_uniform_group_is_projected_layer_by_layer() -> None:
    one, two = {"a": full()}, {"b": full(head_size=32)}
    configs = get_kv_cache_configs(config(16), [one, two], [PAGE * 10] * 2)
    assert [c.num_blocks for c in configs] == [10, 10]
    specs = [c.kv_cache_groups[0].kv_cache_spec for c in configs]
    assert [list(s.kv_cache_specs) for s in specs] == [["a"], ["b"]]
    assert configs[1].kv_cache_tensors == [tensor(10, "b", page=PAGE // 2)]


def test_specs_of_one_layer_must_agree() -> None:
    with pytest.raises(AssertionError, match="'a' has different"):
        get_kv_cache_configs(
            config(16), [{"a": full()}, {"a": full(head_size=32)}], [1 << 30] * 2
        )


def test_an_unknown_spec_class_is_named_before_planning() -> None:
    with pytest.raises(ValueError, match="'odd'"):
        get_kv_cache_configs(config(), [{"odd": KVCacheSpec(16)}], [1 << 30])


# --- the scheduler's view -------------------------------------------------------------


def test_the_scheduler_sees_one_spec_per_group() -> None:
    specs = {"a": full(), "b": full(head_size=32)}
    found = plan(specs, PAGE * 30)
    seen = generate_scheduler_kv_cache_config([found])
    assert seen.kv_cache_groups[0].kv_cache_spec == full()
    assert isinstance(found.kv_cache_groups[0].kv_cache_spec, UniformTypeKVCacheSpecs)
    other = copy.deepcopy(found)
    other.num_blocks += 1
    with pytest.raises(AssertionError, match="different numbers of blocks"):
        generate_scheduler_kv_cache_config([found, other])


def test_the_scheduler_takes_a_spec_from_a_stage_that_has_the_group() -> None:
    configs = get_kv_cache_configs(
        config(16),
        [{}, {"a": full(), "b": full(head_size=32)}],
        [0, PAGE * 30],
    )
    seen = generate_scheduler_kv_cache_config(configs)
    assert seen.kv_cache_groups[0].kv_cache_spec == full()


def test_a_manager_that_frees_never_manages_full_layers() -> None:
    shape = dict(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.float32)
    specs = {"a": RSWASpec(**shape, rswa_window=4), "b": FullAttentionSpec(**shape)}
    seen = generate_scheduler_kv_cache_config([plan(specs, PAGE * 30)])
    assert type(seen.kv_cache_groups[0].kv_cache_spec) is FullAttentionSpec


def test_plans_survive_the_engine_boundary() -> None:
    specs = {"a": in_format("bfloat16"), "b": in_format("nvfp4")}
    found = plan(specs, 1 << 24)
    back = pickle.loads(pickle.dumps(found))
    assert back == found
    assert back.layer_specs()["b"].num_head_slots == 16
    assert back.layer_specs()["b"].state_content_bytes == 72


# --- packed groups --------------------------------------------------------------------


def latent(**changes) -> MLAAttentionSpec:
    base = dict(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.uint8)
    return MLAAttentionSpec(**{**base, **changes})


def packed_groups() -> list[KVCacheGroupSpec]:
    one = {"a": latent(), "b": latent(head_size=32)}
    two = {"c": latent(), "d": latent(), "e": latent(head_size=32)}
    return [
        KVCacheGroupSpec(list(specs), UniformTypeKVCacheSpecs(16, specs))
        for specs in (one, two)
    ]


def test_packed_groups_overlay_one_backing() -> None:
    groups = packed_groups()
    assert _use_packed_kv_cache_config(config(), groups)
    stride, by_offset = _get_packed_kv_cache_layout(groups)
    assert stride == 1024 + 1024 + 512 == pool_bytes_per_block(config(), groups)
    assert by_offset == {0: ["a", "c"], 1024: ["b", "d"], 2048: ["e"]}
    blocks, tensors = _get_kv_cache_config_packed(config(), groups, stride * 10 + 1)
    assert blocks == 10
    assert {t.size for t in tensors} == {stride * 10}
    assert {t.block_stride for t in tensors} == {stride}
    assert [t.offset for t in tensors] == [0, 1024, 2048]


def test_pages_of_a_packed_group_do_not_overlap() -> None:
    groups = packed_groups()
    stride, by_offset = _get_packed_kv_cache_layout(groups)
    start = {name: offset for offset, names in by_offset.items() for name in names}
    for group in groups:
        end = 0
        for name in group.layer_names:
            assert start[name] >= end
            end = start[name] + group.layer_spec(name).page_size_bytes
        assert end <= stride


def test_the_known_packed_geometry() -> None:
    specs = {
        f"{i}": latent(block_size=64, head_size=584, alignment=576) for i in range(4)
    }
    group = KVCacheGroupSpec(list(specs), UniformTypeKVCacheSpecs(64, specs))
    stride, by_offset = _get_packed_kv_cache_layout([group, group])
    assert stride == 149_760
    assert list(by_offset) == [0, 37_440, 74_880, 112_320]
    blocks, tensors = _get_kv_cache_config_packed(config(), [group], 14_976_000)
    assert (blocks, tensors[0].size) == (100, 14_976_000)


def test_a_connector_may_ask_for_blocks_across_layers() -> None:
    transfer = SimpleNamespace(
        kv_connector_extra_config={"enable_cross_layers_blocks": "True"}
    )
    groups = [KVCacheGroupSpec(["a"], full()), KVCacheGroupSpec(["b"], sliding())]
    assert not _use_packed_kv_cache_config(config(), groups)
    asked = config(kv_transfer_config=transfer)
    assert _use_packed_kv_cache_config(asked, groups)
    assert not _use_packed_kv_cache_config(asked, groups[:1])


def test_groups_of_one_pool_need_equal_pages() -> None:
    groups = [
        KVCacheGroupSpec(["a"], full()),
        KVCacheGroupSpec(["b"], full(head_size=8)),
    ]
    with pytest.raises(SpecError, match="unify"):
        pool_bytes_per_block(config(), groups)


def test_the_facade_follows_the_hash_root() -> None:
    assert kv_cache_utils.NONE_HASH is block_hash.NONE_HASH
    for name in kv_cache_utils.__all__:
        assert hasattr(kv_cache_utils, name)
    with pytest.raises(AttributeError):
        _ = kv_cache_utils.no_such_name
