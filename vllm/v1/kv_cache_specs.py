"""The spec family: what each kind of layer stores, how much of it a request keeps.

Knows bytes per page and per request, by kind. Refuses to know formats' bytes, backends,
managers and the other layers of a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, ClassVar

import torch

from vllm.utils.math_utils import cdiv, round_up
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_spec_base import (
    ANY,
    UNIQUE_OR_NONE,
    AttentionSpec,
    KVCacheSpec,
    checked_padding,
)
from vllm.v1.kv_cache_spec_registry import SpecError

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def _aligned(spec: AttentionSpec, alignment: int | None) -> None:
    """Pads the page of a spec under construction to a multiple of `alignment`.

    An explicit larger padding is kept, rounded up too, so that a page that was unified
    with others survives replace() and merge().
    """
    if not alignment:
        return
    unpadded = spec.unpadded_page_size_bytes
    padded = round_up(max(unpadded, spec.page_size_padded or 0), alignment)
    if padded != unpadded:
        object.__setattr__(spec, "page_size_padded", padded)


def _compressed(spec: AttentionSpec, compress_ratio: int) -> int:
    """States per block when one state stands for `compress_ratio` tokens."""
    if spec.block_size < compress_ratio:
        raise SpecError(
            f"{type(spec).__name__}: a block of {spec.block_size} tokens is shorter "
            f"than one state of {compress_ratio} tokens; raise the block size"
        )
    return spec.block_size // compress_ratio


@dataclass(frozen=True, kw_only=True)
class FullAttentionSpec(AttentionSpec):
    """Keeps every token. A recorded window or chunk belongs to a promoted layer: the
    layer computes with it, the pool does not free by it."""

    sliding_window: int | None = field(default=None, metadata=UNIQUE_OR_NONE)
    attention_chunk_size: int | None = field(default=None, metadata=UNIQUE_OR_NONE)
    non_causal: bool = field(default=False, metadata=ANY)

    exclusive_fields: ClassVar[tuple[str, ...]] = (
        "sliding_window",
        "attention_chunk_size",
    )

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        max_len = vllm_config.model_config.max_model_len
        ranks = vllm_config.parallel_config.decode_context_parallel_size
        return cdiv(cdiv(max_len, ranks), self.block_size) * self.page_size_bytes


@dataclass(frozen=True, kw_only=True)
class MLAAttentionSpec(FullAttentionSpec):
    """Latent attention: one head, no V of its own. `alignment` is in bytes."""

    cache_dtype_str: str | None = None
    alignment: int | None = None
    compress_ratio: int = 1
    model_version: str | None = None
    non_causal_multi_token_decode: bool = field(default=False, metadata=ANY)
    head_size_v: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        _aligned(self, self.alignment)

    @property
    def storage_block_size(self) -> int:
        return _compressed(self, self.compress_ratio)


@dataclass(frozen=True, kw_only=True)
class HiddenStateCacheSpec(MLAAttentionSpec):
    """Stores hidden states for extraction; planned beside the attention layers."""


@dataclass(frozen=True, kw_only=True)
class RSWASpec(FullAttentionSpec):
    """Full bound on memory; its manager frees outside of `rswa_window` tokens."""

    rswa_window: int


@dataclass(frozen=True)
class SinkFullAttentionSpec(FullAttentionSpec):
    """Full attention with `sink_len` leading tokens that are never freed."""

    sink_len: int | None = None


@dataclass(frozen=True, kw_only=True)
class ChunkedLocalAttentionSpec(AttentionSpec):
    """Attends within chunks of `attention_chunk_size` tokens."""

    attention_chunk_size: int

    def max_admission_blocks_per_request(
        self, max_in_flight_tokens: int, max_model_len: int
    ) -> int:
        """Blocks that a request holds at most, at planning and at admission."""
        tokens = min(self.attention_chunk_size + max_in_flight_tokens, max_model_len)
        return cdiv(tokens, self.block_size)

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        blocks = self.max_admission_blocks_per_request(
            vllm_config.max_in_flight_tokens, vllm_config.model_config.max_model_len
        )
        return blocks * self.page_size_bytes

    def is_uniform_with_collection(
        self, kv_cache_specs: Mapping[str, KVCacheSpec]
    ) -> bool:
        return all(
            isinstance(spec, ChunkedLocalAttentionSpec)
            and spec.attention_chunk_size == self.attention_chunk_size
            for spec in kv_cache_specs.values()
        )


@dataclass(frozen=True, kw_only=True)
class SlidingWindowSpec(AttentionSpec):
    """Attends to the last `sliding_window` tokens; older blocks are freed."""

    sliding_window: int
    extra_retained_tokens: int = 0

    def max_admission_blocks_per_request(
        self, max_in_flight_tokens: int, max_model_len: int
    ) -> int:
        """Blocks that a request holds at most, at planning and at admission.

        One block more than the tokens need: a window may start inside a block.
        """
        kept = self.sliding_window - 1 + self.extra_retained_tokens
        tokens = min(kept + max_in_flight_tokens, max_model_len)
        return cdiv(tokens, self.block_size) + 1

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        ranks = vllm_config.parallel_config.decode_context_parallel_size
        if ranks != 1:
            raise SpecError(
                f"sliding-window layers do not run with decode_context_parallel_size "
                f"{ranks}: use 1"
            )
        blocks = self.max_admission_blocks_per_request(
            vllm_config.max_in_flight_tokens, vllm_config.model_config.max_model_len
        )
        return blocks * self.page_size_bytes

    def is_uniform_with_collection(
        self, kv_cache_specs: Mapping[str, KVCacheSpec]
    ) -> bool:
        return all(
            isinstance(spec, SlidingWindowSpec)
            and spec.sliding_window == self.sliding_window
            for spec in kv_cache_specs.values()
        )


@dataclass(frozen=True, kw_only=True)
class SlidingWindowMLASpec(SlidingWindowSpec):
    """Latent attention within a window. `alignment` is in bytes."""

    cache_dtype_str: str | None = None
    alignment: int | None = None
    compress_ratio: int = 1
    model_version: str | None = None
    head_size_v: int = 0

    known_model_versions: ClassVar[tuple[str | None, ...]] = (None, "deepseek_v4")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model_version not in self.known_model_versions:
            raise SpecError(
                f"SlidingWindowMLASpec.model_version is {self.model_version!r}: "
                f"expected one of {self.known_model_versions}"
            )
        _aligned(self, self.alignment)

    @property
    def storage_block_size(self) -> int:
        return _compressed(self, self.compress_ratio)

    def is_uniform_with_collection(
        self, kv_cache_specs: Mapping[str, KVCacheSpec]
    ) -> bool:
        return all(
            isinstance(spec, SlidingWindowMLASpec)
            and spec.sliding_window == self.sliding_window
            for spec in kv_cache_specs.values()
        )


@dataclass(frozen=True)
class MambaSpec(KVCacheSpec):
    """A recurrent state: one page per block, whatever `block_size` is."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    page_size_padded: int | None = None
    mamba_type: MambaAttentionBackendEnum = MambaAttentionBackendEnum.MAMBA2
    mamba_cache_mode: str = "none"
    num_speculative_blocks: int = 0

    @property
    def unpadded_page_size_bytes(self) -> int:
        """Bytes of all states."""
        return sum(
            prod(shape) * dtype.itemsize
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )

    @property
    def page_size_bytes(self) -> int:
        return checked_padding(self, self.page_size_padded)

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        blocks = 1
        if self.mamba_cache_mode == "all":
            blocks = cdiv(vllm_config.model_config.max_model_len, self.block_size)
        elif self.mamba_cache_mode == "align":
            blocks = 2
        return (blocks + self.num_speculative_blocks) * self.page_size_bytes

    def max_num_blocks_per_req(self, vllm_config: VllmConfig, max_len: int) -> int:
        """Rows are indexed by position in mode "align", else by state."""
        if self.mamba_cache_mode == "align":
            return cdiv(max_len, self.block_size) + self.num_speculative_blocks
        return cdiv(self.max_memory_usage_bytes(vllm_config), self.page_size_bytes)

    def is_uniform_with_collection(
        self, kv_cache_specs: Mapping[str, KVCacheSpec]
    ) -> bool:
        return all(
            isinstance(spec, MambaSpec)
            and spec.num_speculative_blocks == self.num_speculative_blocks
            for spec in kv_cache_specs.values()
        )


@dataclass(frozen=True)
class EncoderOnlyAttentionSpec(AttentionSpec):
    """Attends without a cache."""

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        return 0


@dataclass(frozen=True)
class CrossAttentionSpec(AttentionSpec):
    """Keeps the encoder's tokens of a request."""

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        tokens = vllm_config.scheduler_config.max_num_encoder_input_tokens
        return cdiv(tokens, self.block_size) * self.page_size_bytes
