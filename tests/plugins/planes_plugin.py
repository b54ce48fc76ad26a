"""A plugin of another distribution: an attention backend with its own shape of pages.

Imports only what release 0.28 has under these names. A state is two head slots, a plane
of all heads' keys and a plane of their values, each with a mark behind it: more bytes
than any built-in format takes. Attention is naive, in torch.
"""

from dataclasses import replace
from typing import Any, ClassVar

import torch

from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

KEYS, VALUES = 0, 1


def register() -> None:
    """The entry point in the group vllm.general_plugins."""
    register_backend(
        AttentionBackendEnum.CUSTOM, f"{PlanesBackend.__module__}.PlanesBackend"
    )


class PlanesBackend(AttentionBackend):
    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto"]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type["PlanesImpl"]:
        return PlanesImpl

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        return AttentionMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        if spec.state_content_bytes is not None:
            return spec
        elements = spec.num_kv_heads * spec.head_size + 1
        return replace(
            spec,
            num_head_slots=2,
            state_content_bytes=elements * spec.dtype.itemsize,
        )


class PlanesImpl(AttentionImpl):
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
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.num_kv_heads = num_kv_heads or num_heads
        self.window = sliding_window

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        block_size = kv_cache.shape[2]
        blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
        for plane, rows in ((KEYS, key), (VALUES, value)):
            kv_cache[blocks, plane, offsets, :-1] = rows[: len(blocks)].flatten(1)
            kv_cache[blocks, plane, offsets, -1] = 1.0

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        first = 0
        for row, count in enumerate(attn_metadata.query_lens):
            length = attn_metadata.context_lens[row]
            planes = self._planes(kv_cache, attn_metadata.block_table[row], length)
            last = first + count
            output[first:last] = self._attend(query[first:last], *planes)
            first = last
        return output

    def _planes(
        self, kv_cache: torch.Tensor, blocks: torch.Tensor, length: int
    ) -> list[torch.Tensor]:
        used = blocks[: -(-length // kv_cache.shape[2])].long()
        states = kv_cache[used].transpose(0, 1).flatten(1, 2)[:, :length]
        if not bool((states[..., -1] == 1).all()):
            raise AssertionError("the pages were not read as they were written")
        heads = states[..., :-1].unflatten(-1, (self.num_kv_heads, self.head_size))
        group = self.num_heads // self.num_kv_heads
        return list(heads.float().repeat_interleave(group, 2))

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        scores = torch.einsum("qhd,khd->hqk", query.float(), key) * self.scale
        positions = torch.arange(len(key))
        behind = positions[len(key) - len(query) :, None] - positions
        hidden = behind < 0
        if self.window is not None:
            hidden |= behind >= self.window
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, value).to(query.dtype)
