"""The impl's half of the contract: write states into pages, attend to what is stored.

Knows signatures only. Refuses to know how a state is stored (see `kv_formats`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import StrEnum
from typing import Any, Generic, Protocol, TypeVar

import torch

from vllm.v1.attention.metadata import AttentionMetadata
from vllm.v1.kv_formats import KVQuantMode, by_name

T = TypeVar("T", bound=AttentionMetadata)


class AttentionType(StrEnum):
    """Which tokens a layer attends to; only DECODER layers own a KV cache."""

    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


class AttentionLayer(Protocol):
    """What an impl may read from the layer that calls it."""

    layer_name: str
    kv_cache_dtype: str
    num_kv_heads: int
    head_size: int
    head_size_v: int
    _k_scale: torch.Tensor
    _v_scale: torch.Tensor
    _k_scale_float: float
    _v_scale_float: float


class AttentionImplBase(ABC, Generic[T]):
    """What every impl shares, latent or not."""

    num_heads: int
    head_size: int
    scale: float
    can_return_lse_for_decode: bool = False
    supports_quant_query_input: bool = False

    @abstractmethod
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Called once, after the model's weights are in place."""

    def step_args(self, layer: Any, kv_cache: torch.Tensor, size_v: int) -> Any:
        """What a step plan calls kernels with for `layer`, whose values have `size_v`
        elements; None where there are no such kernels."""
        return None

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Whether `forward` can write a quantised output itself."""
        return False


class AttentionImpl(AttentionImplBase[T], Generic[T]):
    """Writes states into pages and attends to what is stored there.

    `forward` and `do_kv_cache_update` get the layer's pages as `kv_cache`
    [B, H, N, C] in the spec's dtype; `kv_cache.view(torch.uint8)` is the byte view.
    """

    kv_cache_dtype: str

    @abstractmethod
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
    ) -> None: ...

    @property
    def kv_quant_mode(self) -> KVQuantMode:
        """The mode of this layer's format."""
        return by_name(self.kv_cache_dtype).mode

    @abstractmethod
    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: T,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Fills `output` [T, Hq, Dv] from `query` [T, Hq, D] and the pages.

        Does not write pages unless the backend's `forward_includes_kv_cache_update`.
        """

    def do_kv_cache_update(
        self,
        layer: AttentionLayer,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Writes one state per slot: `key` [T, Hkv, D], `value` [T, Hkv, Dv].

        Slots of -1 are skipped. Must be defined unless `forward` updates the cache.
        """
        raise NotImplementedError(
            f"{type(self).__name__} neither writes the KV cache in forward() nor "
            "defines do_kv_cache_update()."
        )
