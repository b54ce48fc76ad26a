"""What an attention layer registers, publishes, loads and computes."""

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F

from tests.model_executor.paged import PagedRunner
from vllm.config import CacheConfig, VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.attention import (
    _largest_kernel_block_within,
    extract_layer_index,
)
from vllm.v1.attention.backend import AttentionType, MultipleOf
from vllm.v1.attention.backends.reference import ReferenceAttentionBackend
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.kv_formats import all_formats, by_name
from vllm.v1.page_planning import packed_spec

HEADS, KV_HEADS, SIZE = 4, 2, 64
DTYPES = [fmt.name for fmt in all_formats() if not fmt.latent]


def config_with(cache_dtype: str = "auto", skip: list[str] | None = None) -> VllmConfig:
    cache = CacheConfig(cache_dtype=cache_dtype, kv_cache_dtype_skip_layers=skip or [])
    return VllmConfig(cache_config=cache)


def layer(config: VllmConfig, index: int = 0, **how: Any) -> Attention:
    values = {
        "num_kv_heads": KV_HEADS,
        "prefix": f"model.layers.{index}.self_attn.attn",
    }
    with set_current_vllm_config(config):
        return Attention(HEADS, SIZE, SIZE**-0.5, **(values | how))


@pytest.fixture(autouse=True)
def bf16_models() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(before)


def test_a_layer_registers_under_its_prefix_once() -> None:
    config = config_with()
    first = layer(config)
    layers = config.compilation_config.static_forward_context
    assert layers == {"model.layers.0.self_attn.attn": first}
    with pytest.raises(ValueError, match=r"duplicate.*layers\.0"):
        layer(config)


@pytest.mark.parametrize("cache_dtype", DTYPES)
def test_the_spec_is_raw_and_the_backend_can_pack_it(cache_dtype: str) -> None:
    config = config_with(cache_dtype)
    attention = layer(config)
    fmt = by_name(cache_dtype)
    spec = attention.get_kv_cache_spec(config)
    assert type(spec) is FullAttentionSpec
    assert not spec.is_packed
    assert spec.block_size == config.cache_config.block_size
    assert (spec.num_kv_heads, spec.head_size, spec.head_size_v) == (2, SIZE, SIZE)
    assert spec.dtype == fmt.storage_dtype(torch.bfloat16)
    assert spec.kv_quant_mode == fmt.mode
    packed = packed_spec(attention.attn_backend, spec, fmt, "x", torch.bfloat16)
    packing = fmt.packing(KV_HEADS, SIZE, SIZE, torch.bfloat16)
    assert packed.num_heads == packing.head_slots
    assert packed.state_content_size_bytes == packing.state_bytes


def test_the_spec_follows_a_block_size_chosen_after_construction() -> None:
    config = config_with()
    attention = layer(config)
    config.cache_config.block_size = 48
    assert attention.get_kv_cache_spec(config).block_size == 48


@pytest.mark.parametrize("kind", [AttentionType.ENCODER, AttentionType.ENCODER_ONLY])
def test_encoder_layers_have_no_cache(kind: AttentionType) -> None:
    config = config_with()
    attention = layer(config, attn_type=AttentionType.DECODER)
    attention.attn_type = kind
    assert attention.get_kv_cache_spec(config) is None


class SpyBackend(ReferenceAttentionBackend):
    """Remembers what went through the packing hook."""

    sizes: ClassVar[list[Any]] = [16, 32, 64]
    seen: ClassVar[list[Any]] = []

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[Any]:
        return SpyBackend.sizes

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        cls.seen.append(spec)
        return super().customize_spec(spec)


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> type[SpyBackend]:
    monkeypatch.setattr(SpyBackend, "seen", [])
    return SpyBackend


@pytest.mark.parametrize("cache_dtype", DTYPES)
def test_a_window_is_probed_with_one_token_through_the_hook(
    cache_dtype: str, spy: type[SpyBackend]
) -> None:
    config = config_with(cache_dtype)
    attention = layer(config, per_layer_sliding_window=40, attn_backend=spy)
    fmt = by_name(cache_dtype)
    packing = fmt.packing(KV_HEADS, SIZE, SIZE, torch.bfloat16)
    per_token = packing.head_slots * packing.state_bytes
    config.cache_config.skip_page_size_padded = per_token * 32 + 1
    spec = attention.get_kv_cache_spec(config)
    (probe,) = spy.seen
    assert (type(probe), probe.block_size) == (SlidingWindowSpec, 1)
    assert (type(spec), spec.sliding_window) == (SlidingWindowSpec, 40)
    assert not spec.is_packed, "the returned spec is raw"
    assert spec.block_size == 32, "the largest kernel block that fits the shared page"
    assert spec.page_size_padded == per_token * 32 + 1


def test_a_window_without_a_shared_page_takes_the_smallest_kernel_block(
    spy: type[SpyBackend],
) -> None:
    config = config_with()
    spec = layer(config, per_layer_sliding_window=40, attn_backend=spy)
    spec = spec.get_kv_cache_spec(config)
    assert (spec.block_size, spec.page_size_padded) == (16, None)


@pytest.mark.parametrize(
    ("sizes", "per_token", "budget", "expected"),
    [
        ([16, 32, 64], 4096, 73_728, 16),
        ([MultipleOf(16)], 4096, 73_728, 16),
        ([16, 32, 64], 1024, 73_728, 64),
        ([16, 32, 64], 4096, None, 16),
        ([16, 32, 64], 0, 73_728, 16),
        ([64, MultipleOf(16)], 4096, 73_728, 64),
        ([], 4096, 73_728, 48),
    ],
)
def test_largest_kernel_block(
    sizes: list[Any], per_token: int, budget: int | None, expected: int, monkeypatch
) -> None:
    monkeypatch.setattr(SpyBackend, "sizes", sizes)
    found = _largest_kernel_block_within(
        SpyBackend, config_with(), per_token, budget, fallback=48
    )
    assert found == expected


@pytest.mark.parametrize(
    ("skip", "index", "window", "expected"),
    [
        ([], 1, None, "int8_per_token_head"),
        (["1"], 1, None, "auto"),
        (["1"], 11, None, "int8_per_token_head"),
        (["sliding_window"], 1, 8, "auto"),
        (["sliding_window"], 1, None, "int8_per_token_head"),
        (["0", "sliding_window", "2"], 2, None, "auto"),
        (["none"], 1, None, "int8_per_token_head"),
    ],
)
def test_skipped_layers_keep_the_models_own_dtype(
    skip: list[str], index: int, window: int | None, expected: str
) -> None:
    config = config_with("int8_per_token_head", skip)
    attention = layer(config, index, per_layer_sliding_window=window)
    assert attention.kv_cache_dtype == expected
    assert attention.impl.kv_cache_dtype == expected
    spec = attention.get_kv_cache_spec(config)
    assert spec.dtype == by_name(expected).storage_dtype(torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "index"),
    [("model.layers.3.self_attn.attn", 3), ("12", 12), ("a.0", 0)],
)
def test_layer_index(name: str, index: int) -> None:
    assert extract_layer_index(name) == index


@pytest.mark.parametrize("name", ["model.attn", "a.1.b.2", "layer3", ""])
def test_a_name_without_one_index_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="exactly one"):
        extract_layer_index(name)


def test_scales_are_one_unless_the_checkpoint_has_them() -> None:
    attention = layer(config_with("fp8"))
    assert (attention._k_scale_float, attention._v_scale_float) == (1.0, 1.0)
    attention.load_kv_scale("k", torch.tensor([0.25]))
    attention.load_kv_scale("v", torch.tensor(0.5))
    assert (attention._k_scale_float, attention._v_scale_float) == (0.25, 0.5)
    assert (float(attention._k_scale), float(attention._v_scale)) == (0.25, 0.5)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), [1.0, 2.0]])
def test_scales_that_would_destroy_the_cache_are_refused(scale: Any) -> None:
    attention = layer(config_with("fp8"))
    with pytest.raises(ValueError, match=r"layers\.0.*k_scale"):
        attention.load_kv_scale("k", torch.tensor(scale))
    assert attention._k_scale_float == 1.0


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="no multiple"):
        layer(config_with(), num_kv_heads=3)


def test_a_shared_cache_must_belong_to_an_earlier_layer() -> None:
    config = config_with()
    with pytest.raises(ValueError, match="built before"):
        layer(config, kv_sharing_target_layer_name="model.layers.7.self_attn.attn")
    layer(config)
    layer(config, 1, kv_sharing_target_layer_name="model.layers.0.self_attn.attn")


@pytest.mark.parametrize("flag", ["use_alibi_sqrt", "mm_prefix_clamp_sliding_window"])
def test_options_that_would_be_ignored_are_refused(flag: str) -> None:
    with pytest.raises(ValueError, match="not supported"):
        layer(config_with(), **{flag: True})


def test_without_metadata_the_output_is_zeros() -> None:
    config = config_with()
    attention = layer(config)
    query = torch.randn(5, HEADS * SIZE)
    kv = torch.randn(5, KV_HEADS * SIZE)
    with set_forward_context(None, config):
        found = attention(query, kv, kv)
    assert found.shape == (5, HEADS * SIZE)
    assert found.dtype == query.dtype
    assert not found.any()


def test_outside_of_a_forward_pass_the_call_is_loud() -> None:
    with pytest.raises(RuntimeError, match="forward context"):
        layer(config_with())(torch.zeros(1, HEADS * SIZE), None, None)


class OneLayer(torch.nn.Module):
    """Feeds fixed Q, K, V to one layer, so that PagedRunner can drive it."""

    def __init__(self, attention: Attention, tokens: int) -> None:
        super().__init__()
        self.attention = attention
        generator = torch.Generator().manual_seed(3)
        shapes = (HEADS, KV_HEADS, KV_HEADS)
        self.qkv = [
            torch.randn(tokens, heads * SIZE, generator=generator).float()
            for heads in shapes
        ]

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        dtype = self.attention.model_dtype
        return self.attention(*(x[positions].to(dtype) for x in self.qkv))

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("split_heads", [False, True])
def test_attention_over_pages_equals_dense_attention(
    window: int | None, split_heads: bool
) -> None:
    torch.set_default_dtype(torch.float32)
    config = config_with()
    model = OneLayer(layer(config, per_layer_sliding_window=window), tokens=37)
    query, key, value = (x.unflatten(-1, (-1, SIZE)).transpose(0, 1) for x in model.qkv)
    if split_heads:
        model.qkv = [x.unflatten(-1, (-1, SIZE)) for x in model.qkv]
    runner = PagedRunner(model, config, 37)
    parts = [runner.step([0] * 30), *(runner.step([0]) for _ in range(7))]
    offsets = torch.arange(37)[:, None] - torch.arange(37)
    mask = (offsets >= 0) & (offsets < (window or 37))
    dense = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, enable_gqa=True
    )
    expected = dense.transpose(0, 1).flatten(1)
    torch.testing.assert_close(torch.cat(parts), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cache_dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_scales_apply_on_the_way_in_and_on_the_way_out(cache_dtype: str) -> None:
    torch.set_default_dtype(torch.float32)
    config = config_with(cache_dtype)
    attention = layer(config)
    attention.load_kv_scale("k", 0.25)
    attention.load_kv_scale("v", 0.5)
    model = OneLayer(attention, tokens=33)
    runner = PagedRunner(model, config, 33)
    found = torch.cat([runner.step([0] * 32), runner.step([0])])
    fmt, cast = by_name(cache_dtype), {"fp8_e4m3": torch.float8_e4m3fn}
    kind = cast.get(cache_dtype, torch.float8_e5m2)
    assert fmt.name == cache_dtype
    query, key, value = (x.unflatten(-1, (-1, SIZE)).transpose(0, 1) for x in model.qkv)
    limit = torch.finfo(kind).max
    key = (key / 0.25).clamp(-limit, limit).to(kind).float() * 0.25
    value = (value / 0.5).clamp(-limit, limit).to(kind).float() * 0.5
    dense = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=True
    )
    expected = dense.transpose(0, 1).flatten(1)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
