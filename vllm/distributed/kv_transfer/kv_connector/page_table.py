"""Where every block's bytes lie, and how they are copied.

Knows addresses, strides and sizes. Refuses to know what the bytes mean.
"""

from collections.abc import Mapping, Sequence
from ctypes import memmove
from dataclasses import dataclass
from itertools import product

import torch

from vllm.v1.kv_cache_interface import KVCacheConfig

#: A cache as the worker registers it: one tensor, or a list of recurrent states.
Cache = torch.Tensor | list[torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class PageRow:
    """One run of bytes that a layer has in every block.

    Block b's run starts at `address + b * block_stride` and has `num_bytes` bytes.
    Padding belongs to no row. `group_id` tells whose block ids b counts.
    """

    layer_name: str
    group_id: int
    address: int
    block_stride: int
    num_bytes: int


def _runs(tensor: torch.Tensor) -> tuple[list[int], int]:
    """How one block [...] of a cache [num_blocks, ...] lies in memory: the byte offsets
    of its contiguous runs, ascending, and the bytes of each."""
    size = tensor.element_size()
    axes = sorted(
        (stride * size, length)
        for stride, length in zip(tensor.stride()[1:], tensor.shape[1:], strict=True)
        if length != 1
    )
    run, outer = size, []
    for stride, length in axes:
        if stride == run and not outer:
            run *= length
        else:
            outer.append((stride, length))
    steps = [[i * stride for i in range(length)] for stride, length in reversed(outer)]
    return [sum(offsets) for offsets in product(*steps)], run


def _tensors(cache: Cache) -> list[torch.Tensor]:
    return cache if isinstance(cache, list) else [cache]


def _groups(
    config: KVCacheConfig, kv_caches: Mapping[str, Cache]
) -> list[list[tuple[str, Cache]]]:
    """Layers with a cache in each group. ValueError for a layer without one."""
    groups = []
    for group in config.kv_cache_groups:
        missing = [name for name in group.layer_names if name not in kv_caches]
        if missing:
            raise ValueError(
                f"layers {', '.join(missing)} have no registered KV cache: expected "
                "one for each layer of the plan"
            )
        groups.append([(name, kv_caches[name]) for name in group.layer_names])
    return groups


def page_table(
    kv_cache_config: KVCacheConfig, kv_caches: Mapping[str, Cache]
) -> list[PageRow]:
    """Every run of bytes of every layer, group by group.

    The rows of one group, in order, cover each byte of its pages once, without padding.
    A layer has one row where its block is one run, one for each head slot where heads
    lie outside of blocks, and one for each recurrent state.
    """
    return [
        PageRow(
            layer_name=name,
            group_id=group_id,
            address=tensor.data_ptr() + offset,
            block_stride=tensor.stride(0) * tensor.element_size(),
            num_bytes=run,
        )
        for group_id, group in enumerate(_groups(kv_cache_config, kv_caches))
        for name, cache in group
        for tensor in _tensors(cache)
        for offsets, run in [_runs(tensor)]
        for offset in offsets
    ]


class BlockMover:
    """Copies whole blocks between the pages of an engine and plain buffers.

    A block of a group is `block_bytes[group_id]` bytes: the rows of `page_table` one
    after another. Works on any device; buffers are on the host.
    """

    def __init__(
        self, kv_cache_config: KVCacheConfig, kv_caches: Mapping[str, Cache]
    ) -> None:
        self.num_blocks = kv_cache_config.num_blocks
        self.block_bytes: list[int] = []
        # For each group: a view [num_blocks, run] uint8 of each row, and where the row
        # starts in a buffer.
        self._rows: list[list[tuple[torch.Tensor, int]]] = []
        for group in _groups(kv_cache_config, kv_caches):
            rows, at = [], 0
            for _, cache in group:
                for tensor in _tensors(cache):
                    offsets, run = _runs(tensor)
                    for offset in offsets:
                        rows.append((_row_view(tensor, offset, run), at))
                        at += run
            self._rows.append(rows)
            self.block_bytes.append(at)
        # Thousands of small copies: a memmove costs a tenth of a tensor's copy. The
        # views keep the memory alive.
        self._on_host = all(
            view.device.type == "cpu" for rows in self._rows for view, _ in rows
        )
        self._addresses = [
            [(v.data_ptr(), v.stride(0), at, v.shape[1]) for v, at in rows]
            for rows in self._rows
        ]

    def read(self, group_id: int, block_id: int, buffer: torch.Tensor) -> None:
        """Copies a block into a host buffer, uint8 [block_bytes or more].

        ValueError for a block or a buffer that is none.
        """
        self._check(group_id, block_id, buffer)
        if self._on_host:
            target = buffer.data_ptr()
            for address, stride, at, run in self._addresses[group_id]:
                memmove(target + at, address + stride * block_id, run)
            return
        for view, at in self._rows[group_id]:
            buffer[at : at + view.shape[1]].copy_(view[block_id])

    def write(self, group_id: int, block_id: int, buffer: torch.Tensor) -> None:
        """Copies a host buffer, uint8 [block_bytes or more], into a block.

        ValueError for a block or a buffer that is none.
        """
        self._check(group_id, block_id, buffer)
        if self._on_host:
            source = buffer.data_ptr()
            for address, stride, at, run in self._addresses[group_id]:
                memmove(address + stride * block_id, source + at, run)
            return
        for view, at in self._rows[group_id]:
            view[block_id].copy_(buffer[at : at + view.shape[1]])

    def _check(self, group_id: int, block_id: int, buffer: torch.Tensor) -> None:
        """Raw addresses follow: nothing outside of a page may be touched."""
        if not 0 <= block_id < self.num_blocks:
            raise ValueError(
                f"block {block_id} is none of the pool: expected 0 to "
                f"{self.num_blocks - 1}"
            )
        if (
            buffer.device.type != "cpu"
            or buffer.dtype != torch.uint8
            or not buffer.is_contiguous()
            or buffer.numel() < self.block_bytes[group_id]
        ):
            raise ValueError(
                f"a buffer of {buffer.numel()} x {buffer.dtype} on {buffer.device} "
                f"does not take a block: expected {self.block_bytes[group_id]} "
                "contiguous bytes on the host"
            )

    def fill(self, group_id: int, block_ids: Sequence[int], value: int) -> None:
        """Sets every byte of some blocks."""
        for view, _ in self._rows[group_id]:
            for block_id in block_ids:
                view[block_id].fill_(value)


def _row_view(tensor: torch.Tensor, offset: int, run: int) -> torch.Tensor:
    storage = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    storage.set_(tensor.untyped_storage())
    size = tensor.element_size()
    start = tensor.storage_offset() * size + offset
    return storage.as_strided(
        (tensor.shape[0], run), (tensor.stride(0) * size, 1), start
    )
