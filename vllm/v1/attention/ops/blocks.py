"""Zeroes and copies whole blocks of a set of caches by the fastest means of their
device: one launch of the CUDA library or of Triton, or torch's own kernels cache by
cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from vllm.utils.import_utils import has_module, resolve
from vllm.v1.attention.ops import cuda_kernels

_TRITON = "vllm.v1.attention.ops.triton_blocks:BlockMover"


class BlockZeroer(Protocol):
    """Moves the bytes of the caches' views, not the padding between pages."""

    def zero(self, blocks: torch.Tensor) -> None:
        """Zeroes these blocks, int64 [n] on the caches' device."""

    def copy(self, pairs: torch.Tensor) -> None:
        """Copies blocks, int64 [n, 2] of (source, target) on the caches' device. No
        block is both a source and a target of one call."""


class TorchBlocks:
    """A BlockZeroer that needs nothing but torch."""

    def __init__(self, caches: Sequence[torch.Tensor]) -> None:
        self._caches = [as_words(cache) for cache in caches]

    def zero(self, blocks: torch.Tensor) -> None:
        for cache in self._caches:
            cache.index_fill_(0, blocks, 0)

    def copy(self, pairs: torch.Tensor) -> None:
        """All sources are read before a target is written."""
        sources, targets = pairs.unbind(1)
        for cache in self._caches:
            cache[targets] = cache[sources]


class BlockCopier:
    """Copies blocks of caches [num_blocks, ...] of one device, any pairs at once."""

    def __init__(self, caches: Sequence[torch.Tensor]) -> None:
        self._caches = list(caches)
        self._movers = [block_zeroer(self._caches)] if caches else []

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies (source, target) pairs as if all sources were read first."""
        for mover in self._movers if copies else ():
            pairs = torch.tensor(copies, dtype=torch.int64)
            sources, targets = zip(*copies, strict=True)
            if set(sources) & set(targets):
                mover = TorchBlocks(self._caches)
            mover.copy(pairs.to(self._caches[0].device))


def block_zeroer(caches: Sequence[torch.Tensor]) -> BlockZeroer:
    """What zeroes and copies caches [num_blocks, ...] of one device."""
    if _on_gpu(caches[0]):
        if not cuda_kernels.why_unavailable():
            return cuda_kernels.BlockMover(caches)
        if has_module("triton"):
            zeroer: BlockZeroer = resolve(_TRITON)(caches)
            return zeroer
    return TorchBlocks(caches)


def as_words(cache: torch.Tensor) -> torch.Tensor:
    """The bytes of a cache [num_blocks, ...] as [num_blocks, words] of 8 bytes where
    its blocks allow that, or as they are: torch fills element by element."""
    if cache.numel() == 0 or not cache[0].is_contiguous():
        return cache
    data = cache.view(torch.uint8).flatten(1)
    places = (data.shape[1], data.stride(0), data.data_ptr())
    return data if any(place % 8 for place in places) else data.view(torch.int64)


def _on_gpu(cache: torch.Tensor) -> bool:
    return cache.device.type == "cuda"  # AMD's devices have this type too
