"""FLASH_ATTN: facts of the flash-attention kernels. Dense and fp8 pages only, so there
is nothing to publish: their size follows from heads, head size and dtype.

This build does not call the kernels: the package flash-attn takes pages of multiples of
256 tokens, which no other backend's blocks are, and its fork for small pages is part of
upstream's own builds. The name says so when it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from vllm.v1.attention.backend import AttentionType, CacheDType, MultipleOf
from vllm.v1.attention.backends.optional import OptionalBackend

if TYPE_CHECKING:
    from vllm.platforms.interface import DeviceCapability

_MAX_HEAD_SIZE = 256
_HEAD_SIZE_STEP = 8


class FlashAttentionBackend(OptionalBackend):
    """Head sizes in steps of 8 up to 256; compute capability 8.0 or newer."""

    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = [
        "auto",
        "float16",
        "bfloat16",
        "fp8",
        "fp8_e4m3",
    ]
    supported_attn_types = tuple(AttentionType)
    supported_devices = ("cuda",)
    fallback = "TRITON_ATTN or FLASHINFER"

    @staticmethod
    def get_name() -> str:
        return "FLASH_ATTN"

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % _HEAD_SIZE_STEP == 0 and head_size <= _MAX_HEAD_SIZE

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        return capability >= (8, 0)

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: CacheDType | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        device_capability: DeviceCapability | None,
    ) -> str | None:
        if has_sink and device_capability is not None and device_capability < (9, 0):
            return "attention sinks need compute capability 9.0"
        return None
