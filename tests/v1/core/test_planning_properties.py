"""Any layers get a plan without overlap and waste, or an error in words."""

from itertools import combinations_with_replacement
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from tests.v1.spec_samples import config
from tests.v1.spec_strategies import models, specs
from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_utils import (
    get_kv_cache_capacity,
    get_kv_cache_configs,
    get_kv_cache_groups,
    needed_memory,
    pool_bytes_per_block,
)
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    SpecMergeError,
)
from vllm.v1.worker.kv_cache_init import LayerPages, allocate_pages

FEW = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
CPU = torch.device("cpu")
ENCODER_TOKENS = 1024  # of tests.v1.spec_samples.config


# --- merging --------------------------------------------------------------------------


@FEW
@given(specs, st.integers(1, 4))
def test_merging_equal_specs_gives_that_spec(spec: KVCacheSpec, count: int) -> None:
    assert spec.merge([spec] * count) == spec


@FEW
@given(specs, specs)
def test_merging_does_not_depend_on_the_order(a: KVCacheSpec, b: KVCacheSpec) -> None:
    def merged(*pair: KVCacheSpec) -> Any:
        try:
            return pair[0].merge(pair)
        except SpecMergeError as error:
            assert len(str(error).split()) > 5
            return None

    assert merged(a, b) == merged(b, a)


# --- plans ----------------------------------------------------------------------------


def blocks_held(spec: KVCacheSpec, length: int, in_flight: int) -> int:
    """Blocks of one request of `length` tokens, counted from the spec's definition."""
    size = spec.block_size
    if isinstance(spec, MambaSpec):
        return {"none": 1, "align": 2, "all": cdiv(length, size)}[spec.mamba_cache_mode]
    if isinstance(spec, SlidingWindowSpec):
        return cdiv(min(spec.sliding_window - 1 + in_flight, length), size) + 1
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return cdiv(min(spec.attention_chunk_size + in_flight, length), size)
    if isinstance(spec, CrossAttentionSpec):
        return cdiv(ENCODER_TOKENS, size)
    return cdiv(length, size)


def check_no_two_live_pages_overlap(plan: KVCacheConfig) -> None:
    """A block id belongs to one group at a time: only pages of one id in two groups may
    share bytes."""
    places = allocate_pages(plan, CPU)
    group_of = {
        name: i for i, g in enumerate(plan.kv_cache_groups) for name in g.layer_names
    }
    ids = sorted({0, 1, plan.num_blocks - 1} & set(range(plan.num_blocks)))
    pages = [(name, block) for name in places for block in ids]
    for (a, i), (b, j) in combinations_with_replacement(pages, 2):
        if (a, i) == (b, j) or (i == j and group_of[a] != group_of[b]):
            continue
        if places[a].backing is places[b].backing:
            first, second = sorted((page_of(places[a], i), page_of(places[b], j)))
            assert first[1] <= second[0], f"{a}:{i} and {b}:{j}"
    for name, place in places.items():
        assert page_of(place, plan.num_blocks - 1)[1] <= place.backing.numel(), name


def page_of(place: LayerPages, block: int) -> tuple[int, int]:
    start = place.start + block * place.block_stride
    return start, start + place.spec.page_size_bytes


def check_padding(plan: KVCacheConfig, given_specs: dict[str, KVCacheSpec]) -> None:
    """States are padded as they must; attention, beyond what it asked for, by less than
    its own bytes."""
    for name, spec in plan.layer_specs().items():
        states = spec.unpadded_page_size_bytes
        assert spec.page_size_bytes >= states
        asked = getattr(given_specs[name], "alignment", None) or 0
        if isinstance(spec, AttentionSpec) and not isinstance(
            spec, HiddenStateCacheSpec
        ):
            assert spec.page_size_bytes < 2 * states + asked, name
            for field in ("num_heads", "state_content_size_bytes", "kv_quant_mode"):
                assert getattr(spec, field) == getattr(given_specs[name], field), field


def is_in_words(error: Exception, layers: dict[str, KVCacheSpec]) -> bool:
    """Names a layer, a kind or a way out; never a bare assertion."""
    text = str(error)
    known = {*layers, *(type(spec).__name__ for spec in layers.values())}
    return isinstance(error, ValueError) and any(word in text for word in known)


@settings(FEW, max_examples=300)
@given(
    models(),
    st.integers(1, 600),
    st.integers(1, 300),
    st.integers(1, 3),
    st.floats(0, 1, exclude_max=True),
    st.booleans(),
)
def test_a_plan_or_words(
    layers: dict[str, KVCacheSpec],
    length: int,
    in_flight: int,
    requests: int,
    rest: float,
    no_hybrid: bool,
) -> None:
    cfg = config(length, max_in_flight_tokens=in_flight, no_hybrid=no_hybrid)
    try:
        groups = get_kv_cache_groups(cfg, layers)
    except (AssertionError, NotImplementedError, ValueError) as error:
        event(type(error).__name__)
        assert is_in_words(error, layers), repr(error)
        return
    per_block = pool_bytes_per_block(cfg, groups)
    memory = needed_memory(cfg, groups) * requests + int(rest * per_block)
    (plan,) = get_kv_cache_configs(cfg, [layers], [memory])
    event(f"{len(plan.kv_cache_groups)} groups")

    # Every layer has one place; every byte that makes a block is used for one.
    assert sorted(n for g in plan.kv_cache_groups for n in g.layer_names) == sorted(
        layers
    )
    assert plan.num_blocks == memory // per_block
    packed = [t.size for t in plan.kv_cache_tensors if t.block_stride]
    total = sum(t.size for t in plan.kv_cache_tensors if not t.block_stride)
    assert total + (packed[0] if packed else 0) == plan.num_blocks * per_block
    check_no_two_live_pages_overlap(plan)
    check_padding(plan, layers)

    held = sum(
        max(
            blocks_held(g.layer_spec(name), length, in_flight) for name in g.layer_names
        )
        for g in plan.kv_cache_groups
    )
    tokens, concurrency = get_kv_cache_capacity(cfg, plan)
    assert concurrency == pytest.approx(plan.num_blocks / held)
    assert concurrency >= requests
    assert tokens == int(concurrency * length)


@FEW
@given(models(), st.integers(1, 600))
def test_a_block_less_than_one_request_needs_is_refused_with_numbers(
    layers: dict[str, KVCacheSpec], length: int
) -> None:
    cfg = config(length, max_in_flight_tokens=64)
    try:
        groups = get_kv_cache_groups(cfg, layers)
    except (NotImplementedError, ValueError):
        return
    short = needed_memory(cfg, groups) - 1
    if short > 0:
        with pytest.raises(ValueError, match=f"{short:,} bytes"):
            get_kv_cache_configs(cfg, [layers], [short])


def hidden(block_size: int, **fields: Any) -> HiddenStateCacheSpec:
    sizes = {"num_kv_heads": 1, "head_size": 576, "dtype": torch.bfloat16}
    return HiddenStateCacheSpec(block_size=block_size, **sizes, **fields)


@pytest.mark.parametrize(
    "layers",
    [
        {"a": hidden(16), "b": hidden(32)},
        {
            "a": MambaSpec(16, ((1,),), (torch.float32,)),
            "b": hidden(16, alignment=1024),
        },
    ],
    ids=["hidden states alone", "hidden states with an alignment"],
)
def test_rare_models_have_a_plan(layers: dict[str, KVCacheSpec]) -> None:
    cfg = config(100, max_in_flight_tokens=64)
    (plan,) = get_kv_cache_configs(cfg, [layers], [1 << 24])
    check_no_two_live_pages_overlap(plan)
