"""Block and page sizes come from every layer's own backend, through its hook."""

import logging
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from vllm.config import CacheConfig, ParallelConfig, SchedulerConfig
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.flashinfer import FlashInferBackend
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend
from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.attention.backends.turboquant_attn import TurboQuantAttentionBackend
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_formats import by_name

BF16 = torch.bfloat16


class Layer:
    """A registered layer: backend, heads, cache dtype."""

    def __init__(
        self,
        backend,
        cache_dtype="auto",
        heads=8,
        head_size=128,
        mla=False,
        window=None,
    ):
        self.backend, self.kv_cache_dtype = backend, cache_dtype
        self.heads, self.head_size, self.mla = heads, head_size, mla
        self.window = window

    def get_attn_backend(self):
        return self.backend

    def get_kv_cache_spec(self, vllm_config):
        fmt = by_name(self.kv_cache_dtype)
        if self.window is not None:
            cls = partial(SlidingWindowSpec, sliding_window=self.window)
        else:
            cls = MLAAttentionSpec if self.mla else FullAttentionSpec
        spec = cls(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=self.heads,
            head_size=self.head_size,
            dtype=fmt.storage_dtype(BF16),
            kv_quant_mode=fmt.mode,
        )
        return spec.packed(fmt) if fmt.opaque else spec


class StateLayer:
    """A layer with a recurrent state."""

    def __init__(self, state_dtype=BF16):
        self.spec = MambaSpec(
            block_size=1,
            shapes=((3, 8192), (32, 128, 128)),
            dtypes=(BF16, state_dtype),
        )

    def get_kv_cache_spec(self, vllm_config):
        return self.spec


def config(
    *layers,
    cache_dtype="auto",
    head_size=128,
    heads=8,
    mla=False,
    no_hybrid=False,
    **cache,
):
    return SimpleNamespace(
        model_config=SimpleNamespace(
            dtype=BF16,
            use_mla=mla,
            get_head_size=lambda: head_size,
            get_num_kv_heads=lambda parallel: heads,
        ),
        cache_config=CacheConfig(cache_dtype=cache_dtype, **cache),
        parallel_config=ParallelConfig(),
        scheduler_config=SchedulerConfig(disable_hybrid_kv_cache_manager=no_hybrid),
        compilation_config=SimpleNamespace(
            static_forward_context={f"layer.{i}": la for i, la in enumerate(layers)}
        ),
    )


def settled(*layers, **kwargs):
    asked = config(*layers, **kwargs)
    CpuPlatform.update_block_size_for_backend(asked)
    return asked.cache_config


def test_like_layers_keep_the_default_block():
    cache = settled(Layer(CPUAttentionBackend), Layer(CPUAttentionBackend))
    assert cache.block_size == 16
    assert cache.skip_page_size_padded is None


class Wide(CPUAttentionBackend):
    @staticmethod
    def get_supported_kernel_block_sizes():
        return [MultipleOf(64)]


class Odd(CPUAttentionBackend):
    @staticmethod
    def get_supported_kernel_block_sizes():
        return [24]


@pytest.mark.parametrize(
    ("backends", "block_size"),
    [
        ([CPUAttentionBackend, Wide], 64),
        ([Wide, CPUAttentionBackend], 64),
        ([Odd, CPUAttentionBackend], 48),
    ],
)
def test_the_block_serves_every_backend_whichever_comes_first(backends, block_size):
    assert settled(*map(Layer, backends)).block_size == block_size


def test_a_fixed_block_size_is_kept_or_refused():
    assert settled(Layer(CPUAttentionBackend), block_size=32).block_size == 32
    with pytest.raises(ValueError, match=r"block size 32 .*layer.1.*multiple of 64"):
        settled(Layer(CPUAttentionBackend), Layer(Wide), block_size=32)


@pytest.mark.parametrize(
    ("backend", "cache_dtype", "head_size", "block_size", "page"),
    [
        (FlashInferBackend, "nvfp4", 64, 64, 36_864),
        (FlashInferBackend, "nvfp4", 128, 64, 73_728),
        (FlashInferBackend, "nvfp4", 256, 64, 147_456),
        (TritonAttentionBackend, "fp8", 128, 32, 65_536),
        (TritonAttentionBackend, "int8_per_token_head", 128, 32, 67_584),
        (TurboQuantAttentionBackend, "turboquant_4bit_nc", 128, 64, 68_608),
        (CPUAttentionBackend, "turboquant_4bit_nc", 128, 64, 68_608),
    ],
)
@pytest.mark.parametrize("dense_first", [True, False])
def test_layers_of_unlike_formats_share_a_page(
    backend, cache_dtype, head_size, block_size, page, dense_first
):
    dense = Layer(CPUAttentionBackend, head_size=head_size, window=256)
    packed = Layer(backend, cache_dtype, head_size=head_size)
    layers = [dense, packed, packed] if dense_first else [packed, packed, dense]
    cache = settled(*layers)
    assert (cache.block_size, cache.skip_page_size_padded) == (block_size, page)


def test_full_attention_layers_of_unlike_formats_keep_the_default_block():
    dense = Layer(CPUAttentionBackend)
    packed = Layer(CPUAttentionBackend, "turboquant_4bit_nc")
    cache = settled(dense, packed, packed, dense)
    assert (cache.block_size, cache.skip_page_size_padded) == (16, None)


def test_layers_of_one_group_share_no_page_whatever_their_window():
    dense = Layer(CPUAttentionBackend, window=256)
    packed = Layer(CPUAttentionBackend, "turboquant_4bit_nc")
    cache = settled(dense, packed, packed, no_hybrid=True)
    assert (cache.block_size, cache.skip_page_size_padded) == (16, None)


@pytest.mark.parametrize(
    ("cache_dtype", "block_size", "padded"),
    [
        ("auto", 544, 1_114_112),
        ("fp8", 1072, None),
        ("nvfp4", 1920, 1_105_920),
        ("int8_per_token_head", 1056, 1_098_240),
        ("int4_per_token_head", 2080, 1_098_240),
        ("turboquant_k8v4", 1424, 1_105_024),
        ("turboquant_4bit_nc", 2096, 1_098_304),
        ("turboquant_k3v4_nc", 2400, 1_104_000),
        ("turboquant_3bit_nc", 2784, 1_102_464),
    ],
)
def test_attention_pages_grow_to_a_recurrent_state(
    cache_dtype, block_size, padded, caplog, monkeypatch
):
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    attention = Layer(CPUAttentionBackend, cache_dtype, heads=2, head_size=256)
    with caplog.at_level(logging.INFO, "vllm"):
        cache = settled(StateLayer(), attention, StateLayer())
    assert cache.block_size == block_size
    assert cache.mamba_page_size_padded == padded
    # Blocks of thousands of tokens pin much of a pool: it is said how large they are.
    assert f"Block size {block_size} tokens" in caplog.text


@pytest.mark.parametrize(
    ("cache_dtype", "block_size"), [("auto", 1920), ("fp8", 3840), ("fp8_ds_mla", 3328)]
)
@pytest.mark.parametrize("backend", [TritonMLABackend, CPUMLABackend])
def test_latent_pages_are_priced_by_what_they_store(cache_dtype, block_size, backend):
    latent = Layer(backend, cache_dtype, heads=1, head_size=576, mla=True)
    cache = settled(latent, StateLayer(torch.float32))
    assert cache.block_size == block_size


def test_every_price_goes_through_the_hook():
    priced = []

    class Spy(CPUAttentionBackend):
        @classmethod
        def customize_spec(cls, spec):
            priced.append(spec)
            return super().customize_spec(spec)

    layers = [Layer(Spy, "int4_per_token_head"), Layer(Spy, "auto"), StateLayer()]
    settled(*layers)
    modes = {spec.kv_quant_mode for spec in priced}
    assert modes == {by_name("int4_per_token_head").mode, by_name("auto").mode}


def test_questions_before_loading_go_through_the_hook():
    asked = config(cache_dtype="int4_per_token_head", heads=2, head_size=256)
    price = CpuPlatform.per_token_page_bytes
    assert price(asked, CPUAttentionBackend) == 528
    assert price(asked, CPUAttentionBackend, BF16, "auto") == 2048
    assert price(asked, CPUAttentionBackend, torch.float32, "auto") == 4096
    asked.compilation_config.static_forward_context["state"] = StateLayer()
    CpuPlatform._align_hybrid_block_size(asked, CPUAttentionBackend)
    assert asked.cache_config.block_size == 2080
    assert asked.cache_config.mamba_page_size_padded == 1_098_240
