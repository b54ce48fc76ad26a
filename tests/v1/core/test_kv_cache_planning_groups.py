"""Which layers share block ids, and how pages become equal."""

from dataclasses import replace

import pytest
import torch

from tests.v1.spec_samples import config, full, in_format, sliding
from vllm.v1.core.kv_cache_utils import (
    _approximate_gcd,
    _get_kv_cache_groups_uniform_groups,
    get_kv_cache_groups,
    group_and_unify_kv_cache_specs,
    is_kv_cache_spec_uniform,
    unify_hybrid_kv_cache_specs,
    unify_kv_cache_spec_page_size,
)
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    HiddenStateCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    SpecError,
    UniformTypeKVCacheSpecs,
)


def group_names(specs: dict, **settings) -> list[list[str]]:
    return [g.layer_names for g in get_kv_cache_groups(config(**settings), specs)]


def layers(**counts: int) -> dict:
    """full=2, sw=3 gives full0, full1, sw0, sw1, sw2."""
    make = {"full": full, "sw": sliding}
    return {f"{k}{i}": make[k]() for k, n in counts.items() for i in range(n)}


def chunked(**changes) -> ChunkedLocalAttentionSpec:
    base = dict(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.float32)
    return ChunkedLocalAttentionSpec(**{**base, "attention_chunk_size": 512, **changes})


# --- grouping by ratio ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "sizes"),
    [
        (dict(full=10, sw=20), [10, 10, 10]),
        (dict(sw=12, full=13), [12, 13]),
        (dict(full=8, sw=9), [8, 9]),
        (dict(full=6, sw=5), [6, 5]),
        (dict(full=2, sw=4), [2, 2, 2]),
    ],
)
def test_groups_have_about_equally_many_layers(counts: dict, sizes: list[int]) -> None:
    assert [len(names) for names in group_names(layers(**counts))] == sizes


def test_layers_are_dealt_out_in_turn() -> None:
    assert group_names(layers(full=2, sw=3)) == [
        ["full0", "full1"],
        ["sw0", "sw2"],
        ["sw1"],
    ]


def test_layers_whose_specs_merge_share_a_bucket() -> None:
    specs = {"a": full(), "b": full(sliding_window=4), "c": sliding(), "d": sliding()}
    groups = get_kv_cache_groups(config(), specs)
    assert [g.layer_names for g in groups] == [["a", "b"], ["c", "d"]]
    assert groups[0].kv_cache_spec == full(sliding_window=4)


def test_every_layer_is_in_exactly_one_group() -> None:
    specs = layers(full=5, sw=17)
    names = [name for group in group_names(specs) for name in group]
    assert sorted(names) == sorted(specs)


def test_planning_leaves_its_input_alone() -> None:
    specs = layers(full=1, sw=1)
    before = dict(specs)
    get_kv_cache_groups(config(no_hybrid=True), specs)
    assert specs == before


def test_uniform_specs() -> None:
    assert is_kv_cache_spec_uniform({})
    assert is_kv_cache_spec_uniform(layers(full=2))
    assert is_kv_cache_spec_uniform({"a": full(), "b": full(sliding_window=1)})
    assert not is_kv_cache_spec_uniform(layers(full=1, sw=1))
    assert not is_kv_cache_spec_uniform(
        {"a": sliding(), "b": sliding(sliding_window=2)}
    )
    two_windows = {"a": full(sliding_window=1), "b": full(sliding_window=2)}
    assert not is_kv_cache_spec_uniform(two_windows)


# --- equal pages ----------------------------------------------------------------------


def pages(specs: dict) -> dict[str, int]:
    return {
        n: s.page_size_bytes for n, s in unify_kv_cache_spec_page_size(specs).items()
    }


def test_equal_pages_stay_as_they_are() -> None:
    specs = layers(full=1, sw=1)
    assert unify_kv_cache_spec_page_size(specs) == specs
    assert unify_kv_cache_spec_page_size({}) == {}


def test_scales_that_break_a_ratio_cost_a_few_percent() -> None:
    name = "int8_per_token_head"
    local = in_format(
        name, SlidingWindowSpec, num_kv_heads=8, head_size=256, sliding_window=1024
    )
    wide = in_format(name, num_kv_heads=2, head_size=512)
    assert (local.state_content_bytes, wide.state_content_bytes) == (520, 1032)
    unified = unify_kv_cache_spec_page_size({"local": local, "wide": wide})
    target = 16 * 520 * 8
    assert {s.page_size_bytes for s in unified.values()} == {target}
    assert unified["wide"].block_size == 32
    assert unified["wide"].page_size_padded == target
    assert unified["wide"].unpadded_page_size_bytes / target > 0.99
    assert unified["local"] == local


@pytest.mark.parametrize("name", ["turboquant_4bit_nc", "nvfp4", "fp8"])
def test_attention_pages_never_reach_twice_their_size(name: str) -> None:
    dense = in_format("bfloat16", indexes_kv_by_block_stride=True)
    packed = replace(
        in_format(name, SlidingWindowSpec, sliding_window=64),
        indexes_kv_by_block_stride=True,
    )
    unified = unify_kv_cache_spec_page_size({"dense": dense, "packed": packed})
    assert unified["dense"] == dense
    new = unified["packed"]
    assert new.page_size_bytes == dense.page_size_bytes
    assert new.block_size == 16 * (dense.page_size_bytes // packed.page_size_bytes)
    assert new.page_size_bytes < 2 * new.unpadded_page_size_bytes
    for field in ("num_head_slots", "state_content_bytes", "kv_quant_mode"):
        assert getattr(new, field) == getattr(packed, field)
    assert type(new).merge([new, new]) == new


def test_explicit_padding_grows_with_the_blocks() -> None:
    small = sliding(page_size_padded=20_000, indexes_kv_by_block_stride=True)
    unified = unify_kv_cache_spec_page_size({"a": full(head_size=256), "b": small})
    assert unified["b"].block_size == 48
    assert unified["b"].page_size_bytes == full(head_size=256).page_size_bytes
    assert unified["b"].page_size_padded >= 3 * 20_000


@pytest.mark.parametrize("factor", [1, 2, 3])
def test_a_state_is_padded_to_the_attention_page(factor: int) -> None:
    page = full().page_size_bytes
    mamba = MambaSpec(16, ((page // (4 * factor),),), (torch.float32,))
    assert pages({"a": full(), "m": mamba}) == {"a": page, "m": page}


def test_packed_attention_is_padded_to_a_larger_state() -> None:
    attention = in_format("turboquant_4bit_nc", num_kv_heads=1)
    mamba = MambaSpec(16, ((4096,),), (torch.uint8,))
    unified = unify_kv_cache_spec_page_size({"a": attention, "m": mamba})
    assert {s.page_size_bytes for s in unified.values()} == {4096}
    assert unified["a"].block_size == 16


def test_aligned_latent_pages_unify_and_still_merge() -> None:
    latent = MLAAttentionSpec(
        block_size=64,
        num_kv_heads=1,
        head_size=584,
        dtype=torch.uint8,
        alignment=576,
        indexes_kv_by_block_stride=True,
    )
    mamba = MambaSpec(16, ((576 * 100,),), (torch.uint8,))
    new = unify_kv_cache_spec_page_size({"a": latent, "m": mamba})["a"]
    assert new.page_size_bytes == 57_600
    assert new.merge([new, new]) == new


# --- local layers that keep every token -----------------------------------------------


def test_promotion_keeps_window_packing_and_padding() -> None:
    padded = sliding(page_size_padded=32 * 1024, sliding_window=1024)
    specs = {"a": full(), "b": padded}
    unify_hybrid_kv_cache_specs(specs)
    assert specs["a"] == full()
    assert specs["b"] == full(page_size_padded=32 * 1024, sliding_window=1024)

    quantised = in_format("nvfp4", SlidingWindowSpec, sliding_window=8, block_size=8)
    specs = {"a": in_format("nvfp4"), "b": quantised}
    unify_hybrid_kv_cache_specs(specs)
    assert specs["b"] == replace(in_format("nvfp4"), sliding_window=8)


def test_promotion_of_chunks_and_latent_windows() -> None:
    specs = {"a": full(), "b": chunked()}
    unify_hybrid_kv_cache_specs(specs)
    assert specs["b"] == full(attention_chunk_size=512)
    shape = dict(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.uint8)
    specs = {
        "a": MLAAttentionSpec(**shape),
        "b": SlidingWindowMLASpec(**shape, sliding_window=4),
    }
    unify_hybrid_kv_cache_specs(specs)
    assert specs["b"] == MLAAttentionSpec(**shape, sliding_window=4)


def test_two_windows_beside_full_layers_share_a_group_of_their_own_specs() -> None:
    specs = {
        "a": full(),
        "b": sliding(sliding_window=1),
        "c": sliding(sliding_window=2),
    }
    groups = get_kv_cache_groups(config(no_hybrid=True), specs)
    assert len(groups) == 1
    kept = groups[0].kv_cache_spec
    assert isinstance(kept, UniformTypeKVCacheSpecs)
    windows = [s.sliding_window for s in kept.kv_cache_specs.values()]
    assert windows == [None, 1, 2]


def test_local_layers_without_full_ones_cannot_be_promoted() -> None:
    with pytest.raises(ValueError, match="--disable-hybrid-kv-cache-manager"):
        unify_hybrid_kv_cache_specs({"a": sliding(), "b": chunked()})


def test_uniform_models_need_no_promotion() -> None:
    specs = layers(sw=2)
    unify_hybrid_kv_cache_specs(specs)
    assert specs == layers(sw=2)


def test_latent_and_window_pages_that_do_not_fit_keep_every_token() -> None:
    latent = MLAAttentionSpec(
        block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16
    )
    specs = {"latent": latent, "sw": sliding()}
    (group,) = get_kv_cache_groups(config(), specs)
    assert group.kv_cache_spec.kv_cache_specs == {
        "latent": latent,
        "sw": full(sliding_window=1),
    }


# --- hidden states --------------------------------------------------------------------


def hidden(size: int, block_size: int = 16) -> HiddenStateCacheSpec:
    return HiddenStateCacheSpec(
        block_size=block_size, num_kv_heads=2, head_size=size, dtype=torch.float32
    )


def test_hidden_states_take_the_page_of_the_others() -> None:
    specs = {**layers(full=2, sw=2), "h": hidden(256)}
    groups = get_kv_cache_groups(config(), specs)
    assert [g.layer_names for g in groups][-1] == ["h"]
    spec = groups[-1].kv_cache_spec
    assert {g.kv_cache_spec.page_size_bytes for g in groups} == {full().page_size_bytes}
    assert spec.block_size == 8  # 16,384 bytes hold eight states of 2 x 256 floats


def test_blocks_grow_where_one_hidden_state_does_not_fit() -> None:
    specs = {**layers(full=2, sw=2), "h": hidden(4096)}
    groups = get_kv_cache_groups(config(), specs)
    assert [g.kv_cache_spec.block_size for g in groups] == [32, 32, 1]
    assert {g.kv_cache_spec.page_size_bytes for g in groups} == {2 * 16_384}


# --- packed groups of latent layers ---------------------------------------------------


def latent(head_size: int, **changes) -> MLAAttentionSpec:
    base = dict(block_size=256, num_kv_heads=1, head_size=head_size, dtype=torch.uint8)
    return MLAAttentionSpec(**{**base, **changes})


def latent_window(head_size: int, window: int, block_size: int) -> SlidingWindowMLASpec:
    return SlidingWindowMLASpec(
        block_size=block_size,
        num_kv_heads=1,
        head_size=head_size,
        dtype=torch.uint8,
        sliding_window=window,
    )


def packed_model() -> dict:
    specs = {f"main{i}": latent(584, compress_ratio=4) for i in range(3)}
    specs |= {f"index{i}": latent(132, compress_ratio=4) for i in range(2)}
    specs |= {f"sw{i}": latent_window(584, 128, 64) for i in range(6)}
    specs |= {f"state{i}": latent_window(64, 8, 4) for i in range(3)}
    return specs


def test_latent_windows_become_packed_groups() -> None:
    specs = packed_model()
    grouped = group_and_unify_kv_cache_specs(specs)
    assert grouped is not None
    assert [len(g.kv_cache_specs) for g in grouped] == [5, 6, 3]
    groups = _get_kv_cache_groups_uniform_groups(grouped)
    assert [g.layer_names for g in groups] == [
        ["main0", "main1", "main2", "index0", "index1"],
        ["sw0", "sw2", "sw4"],
        ["sw1", "sw3", "sw5"],
        ["state0", "state1", "state2"],
    ]
    assert groups == get_kv_cache_groups(config(), specs)


def test_packed_groups_are_for_latent_models_with_several_pages() -> None:
    assert group_and_unify_kv_cache_specs(layers(full=1, sw=1)) is None
    assert group_and_unify_kv_cache_specs({"a": latent(584)}) is None
    one_page = {"a": latent(584, block_size=64), "b": latent_window(584, 128, 64)}
    assert group_and_unify_kv_cache_specs(one_page) is None
    assert group_and_unify_kv_cache_specs({**packed_model(), "odd": full()}) is None
    with pytest.raises(SpecError, match="different block sizes"):
        group_and_unify_kv_cache_specs(
            {**packed_model(), "odd": latent(8, block_size=8)}
        )


def test_a_window_group_needs_whole_tuples() -> None:
    specs = packed_model() | {"odd": latent_window(8, 128, 64)}
    grouped = group_and_unify_kv_cache_specs(specs)
    assert grouped is not None
    with pytest.raises(SpecError, match="equally many layers"):
        _get_kv_cache_groups_uniform_groups(grouped)


@pytest.mark.parametrize(
    ("values", "lower", "divisor"),
    [([3, 6, 3], 3, 3), ([31, 61, 30], 31, 31), ([4, 8], 4, 8), ([5], 5, 5)],
)
def test_approximate_divisor_pads_least(values, lower, divisor) -> None:
    cost = {d: sum(-v % d for v in values) for d in range(lower, max(values) + 1)}
    best = min(cost.values())
    assert cost[_approximate_gcd(values, lower_bound=lower)] == best
    if divisor != 8:
        assert _approximate_gcd(values, lower_bound=lower) == divisor
