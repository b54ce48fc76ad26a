"""Arbitrary specs and models for hypothesis: every kind, dense and packed."""

from typing import Any

import torch
from hypothesis import strategies as st

from tests.v1.spec_samples import in_format
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

K_AND_V = ("bfloat16", "fp8", "int8_per_token_head", "nvfp4", "turboquant_4bit_nc")
LATENT = ("bfloat16", "fp8", "fp8_ds_mla")
BLOCKS = (16, 32, 64)
# Kinds with their fields of their own, in tokens.
KINDS: dict[type[AttentionSpec], str] = {
    FullAttentionSpec: "",
    SlidingWindowSpec: "sliding_window",
    ChunkedLocalAttentionSpec: "attention_chunk_size",
    RSWASpec: "rswa_window",
    SinkFullAttentionSpec: "sink_len",
    CrossAttentionSpec: "",
}
LATENT_KINDS: dict[type[AttentionSpec], str] = {
    MLAAttentionSpec: "",
    SlidingWindowMLASpec: "sliding_window",
    HiddenStateCacheSpec: "",
}


@st.composite
def attention_specs(draw: Any) -> AttentionSpec:
    """A layer of K and V."""
    kind = draw(st.sampled_from(list(KINDS)))
    own = {KINDS[kind]: draw(st.sampled_from((16, 64, 128)))} if KINDS[kind] else {}
    return in_format(
        draw(st.sampled_from(K_AND_V)),
        kind,
        block_size=draw(st.sampled_from(BLOCKS)),
        num_kv_heads=draw(st.sampled_from((1, 2, 8))),
        head_size=draw(st.sampled_from((64, 128, 256))),
        indexes_kv_by_block_stride=draw(st.booleans()),
        **own,
    )


@st.composite
def latent_specs(draw: Any) -> AttentionSpec:
    """A layer of latents."""
    kind = draw(st.sampled_from(list(LATENT_KINDS)))
    window = LATENT_KINDS[kind]
    own = {window: draw(st.sampled_from((16, 64)))} if window else {}
    return in_format(
        draw(st.sampled_from(LATENT)),
        kind,
        block_size=draw(st.sampled_from(BLOCKS)),
        num_kv_heads=1,
        head_size=576,
        head_size_v=0,
        alignment=draw(st.sampled_from((None, 1024))),
        **own,
    )


@st.composite
def state_specs(draw: Any) -> MambaSpec:
    """A layer with a recurrent state, whole words long."""
    return MambaSpec(
        block_size=draw(st.sampled_from((*BLOCKS, 512))),
        shapes=((draw(st.integers(1, 20_000)),), (3, 8)),
        dtypes=(torch.float32, torch.bfloat16),
        mamba_cache_mode=draw(st.sampled_from(("none", "align", "all"))),
    )


specs = st.one_of(attention_specs(), latent_specs(), state_specs())


@st.composite
def models(draw: Any) -> dict[str, KVCacheSpec]:
    """Layers by name: up to four specs, each of some layers, in any order."""
    of_each = draw(
        st.lists(st.tuples(specs, st.integers(1, 5)), min_size=1, max_size=4)
    )
    layers = [spec for spec, count in of_each for _ in range(count)]
    order = draw(st.permutations(range(len(layers))))
    return {f"layer.{i}": layers[place] for i, place in enumerate(order)}
