"""Orders of axes: strides, padded pages, and which order an engine uses."""

from math import prod

import pytest

from vllm.v1.kv_cache_layout import (
    DEFAULT_LAYOUTS,
    KVCacheLayout,
    LayoutDeclaration,
    compute_layout_strides,
    resolve_kv_cache_layout,
)

SHAPE = (2, 4, 8, 16, 512)  # L, B, H, N, C bytes
# strides (L, B, H, N, C), L outermost, block compact, B outermost, tail is H, N, C
TABLE = {
    "LBHNC": ((262144, 65536, 8192, 512, 1), True, True, False, True),
    "LBNHC": ((262144, 65536, 512, 4096, 1), True, True, False, False),
    "LHBNC": ((262144, 8192, 32768, 512, 1), True, False, False, False),
    "BLHNC": ((65536, 131072, 8192, 512, 1), False, True, True, True),
    "BLNHC": ((65536, 131072, 512, 4096, 1), False, True, True, False),
    "BHLNC": ((8192, 131072, 16384, 512, 1), False, False, True, False),
}
every_layout = pytest.mark.parametrize("layout", KVCacheLayout, ids=lambda x: x.name)


@every_layout
def test_strides_and_flags_of_every_order(layout: KVCacheLayout) -> None:
    strides, layer_outer, compact, block_outer, head_major = TABLE[layout.name]
    assert compute_layout_strides(layout, SHAPE) == strides
    assert layout.layer_outermost == layer_outer
    assert layout.block_compact == compact
    assert layout.block_outermost == block_outer
    assert layout.head_major == head_major


@every_layout
def test_strides_reach_every_byte_once(layout: KVCacheLayout) -> None:
    shape = (2, 3, 2, 4, 5)
    strides = compute_layout_strides(layout, shape)
    reached = [0]
    for size, stride in zip(shape, strides, strict=True):
        reached = [r + i * stride for r in reached for i in range(size)]
    assert sorted(reached) == list(range(prod(shape)))


def test_old_names_are_aliases() -> None:
    assert KVCacheLayout["NHD"] is KVCacheLayout.LBNHC
    assert KVCacheLayout.from_name("hnd") is KVCacheLayout.LBHNC
    assert len(KVCacheLayout) == 6
    with pytest.raises(ValueError, match="LBHNC"):
        KVCacheLayout.from_name("NDH")


@pytest.mark.parametrize("name", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
def test_padded_pages_keep_their_distance(name: str) -> None:
    layout = KVCacheLayout[name]
    padded = compute_layout_strides(layout, SHAPE, page_size_padded=70000)
    dense = compute_layout_strides(layout, SHAPE)
    assert padded[2:] == dense[2:]
    assert min(padded[:2]) == 70000
    outer = 4 if layout.layer_outermost else 2
    assert max(padded[:2]) == 70000 * outer


def test_a_plan_may_fix_the_distance_of_blocks() -> None:
    strides = compute_layout_strides(
        KVCacheLayout.LBHNC,
        (4, 100, 1, 64, 584),
        fixed={
            0: 37440,
            1: 149760,
        },
    )
    assert strides == (37440, 149760, 37376, 584, 1)


@pytest.mark.parametrize("name", ["LHBNC", "BHLNC"])
def test_a_torn_page_cannot_be_padded(name: str) -> None:
    layout = KVCacheLayout[name]
    with pytest.raises(ValueError, match="H of 8"):
        compute_layout_strides(layout, SHAPE, page_size_padded=70000)
    one_head = (2, 4, 1, 16, 512)
    assert 9000 in compute_layout_strides(layout, one_head, page_size_padded=9000)


def test_wrong_shapes_and_short_padding_are_refused() -> None:
    with pytest.raises(ValueError, match="axes L, B, H, N, C"):
        compute_layout_strides(KVCacheLayout.LBHNC, (2, 4, 8))
    with pytest.raises(ValueError, match="below the page of 65536 bytes"):
        compute_layout_strides(KVCacheLayout.LBHNC, SHAPE, page_size_padded=65535)


# --- resolution -----------------------------------------------------------------------


def takes(owner: str, *names: str) -> LayoutDeclaration:
    layouts = tuple(KVCacheLayout.from_name(name) for name in names)
    return LayoutDeclaration(owner=owner, layouts=layouts)


def test_nothing_declared_gives_the_default() -> None:
    assert resolve_kv_cache_layout() is DEFAULT_LAYOUTS[0] is KVCacheLayout.LBNHC
    assert resolve_kv_cache_layout([takes("any")]) is KVCacheLayout.LBNHC
    assert set(DEFAULT_LAYOUTS) == set(KVCacheLayout)


def test_one_declaration_keeps_its_order() -> None:
    found = resolve_kv_cache_layout([takes("a", "BLHNC", "LBHNC")] * 2)
    assert found is KVCacheLayout.BLHNC


def test_several_declarations_meet_where_most_are_happy() -> None:
    declarations = [
        takes("a", "LBHNC", "BLHNC"),
        takes("b", "BLHNC", "LBHNC", "LBNHC"),
        takes("c", "BLHNC", "LBHNC"),
    ]
    assert resolve_kv_cache_layout(declarations) is KVCacheLayout.BLHNC
    assert resolve_kv_cache_layout(declarations[:2]) is KVCacheLayout.LBHNC


def test_declarations_that_exclude_each_other_are_listed() -> None:
    with pytest.raises(
        ValueError, match="CPU_ATTN takes LBHNC; TURBOQUANT takes LBNHC"
    ):
        resolve_kv_cache_layout([takes("CPU_ATTN", "HND"), takes("TURBOQUANT", "NHD")])


def test_unlike_pages_need_whole_blocks() -> None:
    both = [takes("a", "LHBNC", "LBHNC")]
    assert resolve_kv_cache_layout(both) is KVCacheLayout.LHBNC
    assert resolve_kv_cache_layout(both, pages_differ=True) is KVCacheLayout.LBHNC
    with pytest.raises(ValueError, match="a takes LHBNC"):
        resolve_kv_cache_layout([takes("a", "LHBNC")], pages_differ=True)


def test_packed_groups_need_blocks_outermost() -> None:
    found = resolve_kv_cache_layout(needs_block_outermost=True)
    assert found is KVCacheLayout.BLNHC
    with pytest.raises(ValueError, match="blocks outermost"):
        resolve_kv_cache_layout([takes("a", "LBHNC")], needs_block_outermost=True)


def test_wishes_are_ranked() -> None:
    any_of = [takes("a", "LBHNC", "LBNHC")]
    assert resolve_kv_cache_layout(any_of, env="NHD") is KVCacheLayout.LBNHC
    assert (
        resolve_kv_cache_layout(any_of, env="HND", connector="NHD")
        is KVCacheLayout.LBHNC
    )
    assert resolve_kv_cache_layout(any_of, connector="NHD") is KVCacheLayout.LBNHC
    assert resolve_kv_cache_layout(any_of, connector="BLHNC") is KVCacheLayout.LBHNC
    assert (
        resolve_kv_cache_layout(any_of, recorded=KVCacheLayout.NHD, env="HND")
        is KVCacheLayout.LBNHC
    )


def test_an_impossible_environment_or_record_is_an_error() -> None:
    with pytest.raises(
        ValueError, match=r"VLLM_KV_CACHE_LAYOUT=NHD .*expected one of LB"
    ):
        resolve_kv_cache_layout([takes("CPU_ATTN", "HND")], env="NHD")
    with pytest.raises(ValueError, match="unknown KV cache layout 'XYZ'"):
        resolve_kv_cache_layout(env="XYZ")
    with pytest.raises(ValueError, match="LBNHC was resolved before"):
        resolve_kv_cache_layout([takes("a", "HND")], recorded=KVCacheLayout.NHD)
