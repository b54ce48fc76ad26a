"""Zeroes whole blocks of a set of caches by the fastest means of their device: one
launch of the CUDA library or of Triton, or torch's own kernel cache by cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from vllm.utils.import_utils import has_module, resolve
from vllm.v1.attention.ops import cuda_kernels

_TRITON = "vllm.v1.attention.ops.triton_blocks:BlockMover"


class BlockZeroer(Protocol):
    """Zeroes the bytes of the caches' views, not the padding between pages."""

    def zero(self, blocks: torch.Tensor) -> None:
        """Zeroes these blocks, int64 [n] on the caches' device."""


class TorchBlocks:
    """A BlockZeroer that needs nothing but torch."""

    def __init__(self, caches: Sequence[torch.Tensor]) -> None:
        self._caches = list(caches)

    def zero(self, blocks: torch.Tensor) -> None:
        for cache in self._caches:
            cache.index_fill_(0, blocks, 0)


def block_zeroer(caches: Sequence[torch.Tensor]) -> BlockZeroer:
    """A zeroer of caches [num_blocks, ...], uint8 views of one device."""
    if _on_gpu(caches[0]):
        if not cuda_kernels.why_unavailable():
            return cuda_kernels.BlockMover(caches)
        if has_module("triton"):
            zeroer: BlockZeroer = resolve(_TRITON)(caches)
            return zeroer
    return TorchBlocks(caches)


def _on_gpu(cache: torch.Tensor) -> bool:
    return cache.device.type == "cuda"  # AMD's devices have this type too
