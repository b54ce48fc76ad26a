"""What a latent attention layer registers, publishes, and keeps to itself."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from vllm.config import CacheConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention.mla_attention import (
    MLAAttention,
    MLACommonBackend,
)
from vllm.model_executor.layers.linear import ColumnParallelLinear
from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseBackend
from vllm.v1.kv_cache_interface import MLAAttentionSpec, SlidingWindowMLASpec
from vllm.v1.kv_formats import all_formats, by_name
from vllm.v1.page_planning import packed_spec

HEADS, NOPE, ROPE, V, LORA = 4, 24, 64, 20, 512
LATENT_FORMATS = [fmt.name for fmt in all_formats() if fmt.latent_capable]
# Bytes per token of one layer, as DeepSeek-V3 stores it.
BYTES = {
    "auto": 1152,
    "fp8": 576,
    "fp8_ds_mla": 656,
    "nvfp4_ds_mla": 352,
    "int8_per_token_head": 584,
    "fp8_per_token_head": 584,
    "int4_per_token_head": 296,
}


@pytest.fixture(autouse=True)
def bf16_models() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(before)


def config_with(cache_dtype: str = "auto", skip: list[str] | None = None) -> VllmConfig:
    cache = CacheConfig(cache_dtype=cache_dtype, kv_cache_dtype_skip_layers=skip or [])
    return VllmConfig(cache_config=cache)


def layer(
    config: VllmConfig, index: int = 0, lora: int = LORA, **how: Any
) -> MLAAttention:
    kv_b_proj = ColumnParallelLinear(lora, HEADS * (NOPE + V), bias=False)
    torch.nn.init.normal_(kv_b_proj.weight)
    with set_current_vllm_config(config):
        return MLAAttention(
            HEADS,
            0.1,
            NOPE,
            ROPE,
            V,
            None,
            lora,
            kv_b_proj,
            prefix=f"model.layers.{index}.self_attn.attn",
            **how,
        )


def test_a_layer_registers_under_its_prefix_once() -> None:
    config = config_with()
    first = layer(config)
    layers = config.compilation_config.static_forward_context
    assert layers == {"model.layers.0.self_attn.attn": first}
    with pytest.raises(ValueError, match=r"duplicate.*layers\.0"):
        layer(config)


@pytest.mark.parametrize("name", LATENT_FORMATS)
def test_the_spec_is_one_raw_latent_head(name: str) -> None:
    config = config_with(name)
    attention = layer(config)
    config.cache_config.block_size = 48
    fmt = by_name(name)
    spec = attention.get_kv_cache_spec(config)
    assert type(spec) is MLAAttentionSpec
    assert (spec.num_kv_heads, spec.head_size, spec.head_size_v) == (1, LORA + ROPE, 0)
    assert spec.block_size == 48 and spec.cache_dtype_str == name
    assert spec.dtype == fmt.storage_dtype(torch.bfloat16)
    assert spec.kv_quant_mode == fmt.mode
    # Published by name only where the mode does not tell the bytes.
    assert spec.is_packed == fmt.opaque
    packed = packed_spec(attention.attn_backend, spec, fmt, "x", torch.bfloat16)
    expected = fmt.bytes_per_token(1, LORA + ROPE, 0, torch.bfloat16)
    assert packed.unpadded_page_size_bytes == 48 * expected
    if name in BYTES:
        assert expected == BYTES[name]


def test_a_forgotten_publication_is_loud() -> None:
    config = config_with("fp8_ds_mla")
    attention = layer(config)
    attention.kv_cache_dtype = "fp8"
    with pytest.raises(ValueError, match=r"layer 'x'.*CPU_MLA.*656"):
        packed_spec(
            attention.attn_backend,
            attention.get_kv_cache_spec(config),
            by_name("fp8_ds_mla"),
            "x",
        )


def test_a_window_makes_a_windowed_spec() -> None:
    config = config_with("fp8_ds_mla")
    spec = layer(config, sliding_window=32).get_kv_cache_spec(config)
    assert type(spec) is SlidingWindowMLASpec
    assert spec.sliding_window == 32 and spec.state_content_size_bytes == 656


def test_skipped_layers_stay_dense_by_index_only() -> None:
    config = config_with("fp8_ds_mla", skip=["1", "sliding_window"])
    layers = [layer(config, index, sliding_window=8) for index in range(3)]
    stored = [la.kv_cache_dtype for la in layers]
    assert stored == ["fp8_ds_mla", "auto", "fp8_ds_mla"]
    assert layers[1].get_kv_cache_spec(config).state_content_size_bytes == 1152


class Sparse(FlashMLASparseBackend):
    """Its facts, with an impl that any machine has."""

    required_packages = ()
    impl_path = "vllm.v1.attention.backends.mla.reference:MLAReferenceImpl"


@pytest.mark.parametrize(
    ("asked", "stored"),
    [
        ("auto", "auto"),
        ("fp8", "fp8_ds_mla"),
        ("fp8_ds_mla", "fp8_ds_mla"),
        ("nvfp4_ds_mla", "nvfp4_ds_mla"),
    ],
)
def test_what_a_backend_means_by_a_name_stays_in_its_layer(
    asked: str, stored: str
) -> None:
    config = config_with(asked)
    sparse = layer(config, 0, attn_backend=Sparse)
    other = layer(config, 1)
    assert (sparse.kv_cache_dtype, other.kv_cache_dtype) == (stored, asked)
    assert config.cache_config.cache_dtype == asked
    spec = sparse.get_kv_cache_spec(config)
    packed = packed_spec(Sparse, spec, by_name(stored))
    assert packed.state_content_size_bytes == BYTES[stored]


def test_another_latent_is_refused_before_anything_is_built() -> None:
    with pytest.raises(ValueError, match=r"fp8_ds_mla.*head_size=320.*512 . 64"):
        layer(config_with("fp8_ds_mla"), lora=256)


def test_the_up_projection_is_kept_once_as_views() -> None:
    config = config_with()
    attention = layer(config)
    (kv_b_proj,) = attention._kv_b_proj
    kv_b_proj.process_weights_after_loading()
    attention.process_weights_after_loading()
    weight = kv_b_proj.weight
    assert kv_b_proj.packed is None and weight is not None
    by_head = weight.view(HEADS, NOPE + V, LORA)
    torch.testing.assert_close(attention.W_UK_T, by_head[:, :NOPE])
    torch.testing.assert_close(attention.W_UV, by_head[:, NOPE:].transpose(1, 2))
    for view in (attention.W_UK_T, attention.W_UV):
        assert view.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
    assert not list(attention.parameters())


def test_public_names_are_the_backends_own() -> None:
    assert issubclass(layer(config_with()).attn_backend, MLACommonBackend)
