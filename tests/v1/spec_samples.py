"""One sample of every spec class, stand-ins for backends and configuration."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_formats import by_name

# Packing that no default would give, so that a lost field is seen.
PACKED: dict[str, Any] = dict(
    block_size=64,
    num_kv_heads=2,
    head_size=128,
    dtype=torch.uint8,
    kv_quant_mode=KVQuantMode.NVFP4,
    page_size_padded=1 << 20,
    indexes_kv_by_block_stride=True,
    num_head_slots=4,
    state_content_bytes=72,
)
LATENT: dict[str, Any] = {
    **PACKED,
    "num_kv_heads": 1,
    "head_size": 576,
    "head_size_v": 32,
    "cache_dtype_str": "fp8_ds_mla",
    "alignment": 512,
    "compress_ratio": 4,
    "model_version": "deepseek_v4",
}

SAMPLES: tuple[KVCacheSpec, ...] = (
    FullAttentionSpec(**PACKED, head_size_v=96, sliding_window=32, non_causal=True),
    FullAttentionSpec(**PACKED, attention_chunk_size=64),
    MLAAttentionSpec(**LATENT, non_causal_multi_token_decode=True, sliding_window=8),
    HiddenStateCacheSpec(**LATENT),
    RSWASpec(**PACKED, head_size_v=96, rswa_window=128),
    SinkFullAttentionSpec(**PACKED, head_size_v=96, sink_len=4),
    ChunkedLocalAttentionSpec(**PACKED, head_size_v=96, attention_chunk_size=64),
    SlidingWindowSpec(
        **PACKED, head_size_v=96, sliding_window=32, extra_retained_tokens=3
    ),
    SlidingWindowMLASpec(**LATENT, sliding_window=32, extra_retained_tokens=1),
    MambaSpec(
        block_size=64,
        shapes=((3, 8), (2, 4, 4)),
        dtypes=(torch.bfloat16, torch.float32),
        page_size_padded=4096,
        mamba_cache_mode="align",
        num_speculative_blocks=2,
    ),
    EncoderOnlyAttentionSpec(**PACKED, head_size_v=96),
    CrossAttentionSpec(**PACKED, head_size_v=96),
)
ATTENTION_SAMPLES = tuple(s for s in SAMPLES if isinstance(s, AttentionSpec))


def sample_id(spec: KVCacheSpec) -> str:
    return type(spec).__name__


def full(**changes: Any) -> FullAttentionSpec:
    """A small dense layer: 16 tokens x 2 heads x 64 elements, 16,384 bytes a page."""
    base = dict(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.float32)
    return FullAttentionSpec(**{**base, **changes})


def sliding(**changes: Any) -> SlidingWindowSpec:
    base = dict(
        block_size=16,
        num_kv_heads=2,
        head_size=64,
        dtype=torch.float32,
        sliding_window=1,
    )
    return SlidingWindowSpec(**{**base, **changes})


def in_format(
    name: str,
    spec_class: type[AttentionSpec] = FullAttentionSpec,
    model_dtype: torch.dtype = torch.bfloat16,
    *,
    packed: bool = True,
    **changes: Any,
) -> Any:
    """A spec that stores format `name`, raw or packed."""
    fmt = by_name(name)
    base = dict(
        block_size=16,
        num_kv_heads=8,
        head_size=128,
        dtype=fmt.storage_dtype(model_dtype),
        kv_quant_mode=fmt.mode,
    )
    spec = spec_class(**{**base, **changes})
    return spec.packed(fmt, model_dtype) if packed else spec


@dataclass(frozen=True)
class Multiple:
    """A kernel block size: any multiple of `base`."""

    base: int


class Backend:
    """Packs every format it is given by name; kernels take multiples of 16 tokens."""

    sizes: tuple[Any, ...] = (Multiple(16),)
    min_block_alignment = 1
    hook_calls = 0

    def __init__(self, name: str = "auto", **facts: Any) -> None:
        self.fmt = by_name(name)
        self.__dict__.update(facts)

    def get_name(self) -> str:
        return "SAMPLE"

    def get_supported_kernel_block_sizes(self) -> list[Any]:
        return list(self.sizes)

    def customize_spec(self, spec: AttentionSpec) -> AttentionSpec:
        self.hook_calls += 1
        if spec.kv_quant_mode == self.fmt.mode and not spec.is_packed:
            return spec.packed(self.fmt)
        return spec


def config(max_model_len: int = 4096, **changes: Any) -> Any:
    """What planning reads of a VllmConfig."""
    cfg = SimpleNamespace(
        model_config=SimpleNamespace(
            max_model_len=max_model_len,
            original_max_model_len=changes.pop("original_max_model_len", None),
        ),
        cache_config=SimpleNamespace(
            num_gpu_blocks_override=changes.pop("num_gpu_blocks_override", None),
            gpu_memory_utilization=0.9,
            kv_cache_memory_bytes=None,
            kv_cache_size_tokens=None,
            kv_cache_max_concurrency=None,
        ),
        scheduler_config=SimpleNamespace(
            disable_hybrid_kv_cache_manager=changes.pop("no_hybrid", False),
            max_num_encoder_input_tokens=1024,
        ),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=changes.pop("dcp", 1)
        ),
        kv_transfer_config=changes.pop("kv_transfer_config", None),
        max_in_flight_tokens=changes.pop("max_in_flight_tokens", 8192),
    )
    if changes:
        raise TypeError(f"unknown settings: {sorted(changes)}")
    return cfg
