"""Block ids of each request, and the slot of each token, as persistent arrays.

Knows manager blocks and the kernel blocks that they split into. Refuses to know bytes.
"""

from collections.abc import Sequence
from enum import Enum, auto
from math import gcd

import numpy as np
import torch

from vllm.utils.math_utils import round_up
from vllm.v1.utils import CpuGpuBuffer

# A row covers a multiple of this many tokens, so that kernels may read ids in vectors.
_WIDTH_ALIGNMENT = 128


class SlotMappingMode(Enum):
    """What a slot stands for."""

    TOKEN_TO_KV_SLOT = auto()


def block_table_width(
    max_num_blocks: int, block_size: int, kernel_block_size: int
) -> int:
    """Kernel-block entries of a row that holds `max_num_blocks` manager blocks.

    ValueError when kernel blocks do not divide manager blocks.
    """
    if block_size % kernel_block_size:
        raise ValueError(
            f"kernel blocks of {kernel_block_size} tokens do not divide blocks of "
            f"{block_size} tokens: choose a multiple with --block-size"
        )
    alignment = _WIDTH_ALIGNMENT // gcd(_WIDTH_ALIGNMENT, block_size)
    rows = round_up(max_num_blocks, alignment)
    return rows * (block_size // kernel_block_size)


class BlockTable:
    """Kernel-block ids int32 [max_num_reqs, W] of one KV-cache group.

    Block ids come in as manager blocks and are stored as kernel blocks: manager block b
    is kernel blocks b*r … b*r + r - 1, with r = block_size / kernel_block_size.
    """

    def __init__(
        self,
        block_size: int,
        max_num_reqs: int,
        max_num_blocks_per_req: int,
        max_num_batched_tokens: int,
        pin_memory: bool,
        device: torch.device,
        kernel_block_size: int,
        cp_kv_cache_interleave_size: int = 1,
        slot_mapping_mode: SlotMappingMode = SlotMappingMode.TOKEN_TO_KV_SLOT,
    ) -> None:
        self.max_num_reqs = max_num_reqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.pin_memory = pin_memory
        self.device = device
        self.max_num_blocks_per_req = block_table_width(
            max_num_blocks_per_req, block_size, kernel_block_size
        )
        self.block_size = kernel_block_size
        self.blocks_per_kv_block = block_size // kernel_block_size
        self.use_hybrid_blocks = self.blocks_per_kv_block > 1
        self.cp_kv_cache_interleave_size = cp_kv_cache_interleave_size
        self.slot_mapping_mode = slot_mapping_mode
        self.block_table = self._buffer(
            max_num_reqs, self.max_num_blocks_per_req, dtype=torch.int32
        )
        self.slot_mapping = self._buffer(max_num_batched_tokens, dtype=torch.int64)
        self.num_blocks_per_row = np.zeros(max_num_reqs, dtype=np.int32)

    def _buffer(self, *size: int, dtype: torch.dtype) -> CpuGpuBuffer:
        return CpuGpuBuffer(
            *size, dtype=dtype, device=self.device, pin_memory=self.pin_memory
        )

    def append_row(self, block_ids: Sequence[int], row_idx: int) -> None:
        """Adds manager blocks to the end of a row.

        ValueError when the row would be longer than the table is wide.
        """
        if not block_ids:
            return
        ids = np.asarray(block_ids, dtype=np.int32)
        if self.use_hybrid_blocks:
            ids = self.map_to_kernel_blocks(ids, self.blocks_per_kv_block)
        start = int(self.num_blocks_per_row[row_idx])
        end = start + len(ids)
        if end > self.max_num_blocks_per_req:
            raise ValueError(
                f"row {row_idx} of the block table would hold {end} blocks of "
                f"{self.block_size} tokens: expected at most "
                f"{self.max_num_blocks_per_req} (the maximum model length)"
            )
        self.block_table.np[row_idx, start:end] = ids
        self.num_blocks_per_row[row_idx] = end

    def add_row(self, block_ids: Sequence[int], row_idx: int) -> None:
        """Replaces a row."""
        self.num_blocks_per_row[row_idx] = 0
        self.append_row(block_ids, row_idx)

    def clear_row(self, row_idx: int) -> None:
        """Empties a row; its entries become the null block."""
        self.block_table.np[row_idx, : self.num_blocks_per_row[row_idx]] = 0
        self.num_blocks_per_row[row_idx] = 0

    def move_row(self, src: int, tgt: int) -> None:
        """Copies row `src` over row `tgt`."""
        num_blocks = max(self.num_blocks_per_row[src], self.num_blocks_per_row[tgt])
        table = self.block_table.np
        table[tgt, :num_blocks] = table[src, :num_blocks]
        self.num_blocks_per_row[tgt] = self.num_blocks_per_row[src]

    def swap_row(self, src: int, tgt: int) -> None:
        """Exchanges two rows."""
        rows, swapped = [src, tgt], [tgt, src]
        self.num_blocks_per_row[rows] = self.num_blocks_per_row[swapped]
        self.block_table.np[rows] = self.block_table.np[swapped]

    def compute_slot_mapping(
        self, req_indices: np.ndarray, positions: np.ndarray
    ) -> None:
        """Slots of T tokens at `positions` int [T] of requests in rows `req_indices`
        int [T]: kernel block * kernel block size + offset, in `slot_mapping`."""
        self.map_slots(*self.places(req_indices, positions))

    @property
    def shape_of_places(self) -> tuple[int, int]:
        """Tables of which this is equal have the same places."""
        return self.block_size, self.max_num_blocks_per_req

    def places(
        self, req_indices: np.ndarray, positions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Of tokens: entries of the flattened table, and offsets in their blocks."""
        blocks, offsets = np.divmod(positions, self.block_size)
        return req_indices * self.max_num_blocks_per_req + blocks, offsets

    def map_slots(self, entries: np.ndarray, offsets: np.ndarray) -> None:
        """Slots of tokens at these places, in `slot_mapping`."""
        # One gather over the flat table, written straight into the buffer.
        slots = self.slot_mapping.np[: len(offsets)]
        np.multiply(
            self.block_table.np.ravel()[entries],
            np.int64(self.block_size),
            out=slots,
            dtype=np.int64,
        )
        slots += offsets

    def commit_block_table(self, num_reqs: int) -> torch.Tensor:
        """The first rows on the device, int32 [num_reqs, W]."""
        return self.block_table.copy_to_gpu(num_reqs)

    def commit_slot_mapping(self, num_tokens: int) -> torch.Tensor:
        """The first slots on the device, int64 [num_tokens]."""
        return self.slot_mapping.copy_to_gpu(num_tokens)

    def clear(self) -> None:
        """Empties every row."""
        self.block_table.cpu.zero_()
        self.block_table.gpu.zero_()
        self.num_blocks_per_row.fill(0)

    @staticmethod
    def map_to_kernel_blocks(
        kv_manager_block_ids: np.ndarray, blocks_per_kv_block: int
    ) -> np.ndarray:
        """Kernel blocks of manager blocks, in order: int [n] -> int [n * r]."""
        if blocks_per_kv_block == 1:
            return kv_manager_block_ids
        firsts = kv_manager_block_ids.reshape(-1, 1) * blocks_per_kv_block
        return (firsts + np.arange(blocks_per_kv_block, dtype=firsts.dtype)).ravel()

    def get_device_tensor(self, num_reqs: int) -> torch.Tensor:
        """The first rows on the device, as last committed."""
        return self.block_table.gpu[:num_reqs]

    def get_cpu_tensor(self) -> torch.Tensor:
        """The whole table on the host."""
        return self.block_table.cpu

    def get_numpy_array(self) -> np.ndarray:
        """The whole table as an array over the same memory."""
        return self.block_table.np


class MultiGroupBlockTable:
    """One BlockTable per KV-cache group; block ids come as one list a group."""

    def __init__(
        self,
        max_num_reqs: int,
        max_num_batched_tokens: int,
        pin_memory: bool,
        device: torch.device,
        block_sizes: list[int],
        kernel_block_sizes: list[int],
        max_num_blocks: list[int],
        cp_kv_cache_interleave_size: int = 1,
        slot_mapping_modes: list[SlotMappingMode] | None = None,
    ) -> None:
        modes = slot_mapping_modes or [SlotMappingMode.TOKEN_TO_KV_SLOT] * len(
            block_sizes
        )
        self.block_tables = [
            BlockTable(
                block_size,
                max_num_reqs,
                num_blocks,
                max_num_batched_tokens,
                pin_memory,
                device,
                kernel_block_size,
                cp_kv_cache_interleave_size,
                mode,
            )
            for block_size, kernel_block_size, num_blocks, mode in zip(
                block_sizes, kernel_block_sizes, max_num_blocks, modes, strict=True
            )
        ]

    def append_row(self, block_ids: Sequence[Sequence[int]], row_idx: int) -> None:
        for table, ids in zip(self.block_tables, block_ids, strict=True):
            table.append_row(ids, row_idx)

    def add_row(self, block_ids: Sequence[Sequence[int]], row_idx: int) -> None:
        for table, ids in zip(self.block_tables, block_ids, strict=True):
            table.add_row(ids, row_idx)

    def clear_row(self, row_idx: int) -> None:
        for table in self.block_tables:
            table.clear_row(row_idx)

    def move_row(self, src: int, tgt: int) -> None:
        for table in self.block_tables:
            table.move_row(src, tgt)

    def swap_row(self, src: int, tgt: int) -> None:
        for table in self.block_tables:
            table.swap_row(src, tgt)

    def compute_slot_mapping(
        self, req_indices: np.ndarray, positions: np.ndarray
    ) -> None:
        """Slots of the tokens in every table; equal places are found once."""
        shared: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
        for table in self.block_tables:
            places = shared.get(table.shape_of_places)
            if places is None:
                places = table.places(req_indices, positions)
                shared[table.shape_of_places] = places
            table.map_slots(*places)

    def commit_block_table(self, num_reqs: int) -> None:
        for table in self.block_tables:
            table.commit_block_table(num_reqs)

    def commit_slot_mapping(self, num_tokens: int) -> None:
        for table in self.block_tables:
            table.commit_slot_mapping(num_tokens)

    def clear(self) -> None:
        for table in self.block_tables:
            table.clear()

    def __getitem__(self, idx: int) -> BlockTable:
        return self.block_tables[idx]

    def __len__(self) -> int:
        return len(self.block_tables)
