"""Copies and zeroes whole blocks of a set of caches, each in one Triton launch.

What `cuda_kernels.BlockMover` does, on machines without that library. Knows addresses
and strides; no format.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import gcd

import torch
import triton
import triton.language as tl

from vllm.utils.math_utils import cdiv
from vllm.v1.attention.ops.cuda_kernels import block_runs
from vllm.v1.attention.ops.triton_call import Call
from vllm.v1.attention.ops.triton_variants import KernelVariant

# Numbers that a program moves: 8 registers for each of its 128 threads.
_TILE = 1024
_WIDEST = 8  # bytes that are moved as one number


@triton.jit
def move_blocks_kernel(
    runs_ptr,
    blocks_ptr,
    COPY: tl.constexpr,
    UNIT: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid (blocks, runs, tiles). A row of `runs_ptr` is (address, bytes from block to
    block, pieces of a block, bytes from piece to piece, bytes of a piece).

    With COPY, `blocks_ptr` holds pairs (source, target), otherwise blocks to zero.
    Bytes move UNIT at a time.
    """
    if UNIT == 8:
        kind: tl.constexpr = tl.int64
    elif UNIT == 4:
        kind: tl.constexpr = tl.int32
    elif UNIT == 2:
        kind: tl.constexpr = tl.int16
    else:
        kind: tl.constexpr = tl.uint8
    row = runs_ptr + tl.program_id(1) * 5
    address, block_stride = tl.load(row), tl.load(row + 1)
    pieces, piece_stride = tl.load(row + 2).to(tl.int32), tl.load(row + 3)
    units = (tl.load(row + 4) // UNIT).to(tl.int32)
    i = tl.program_id(2) * TILE + tl.arange(0, TILE)
    inside = i < pieces * units
    piece = i // units
    place = address + piece * piece_stride + (i - piece * units) * UNIT
    if COPY:
        pair = blocks_ptr + 2 * tl.program_id(0)
        source = place + tl.load(pair) * block_stride
        target = place + tl.load(pair + 1) * block_stride
        values = tl.load(source.to(tl.pointer_type(kind)), mask=inside, other=0)
        tl.store(target.to(tl.pointer_type(kind)), values, mask=inside)
    else:
        target = place + tl.load(blocks_ptr + tl.program_id(0)) * block_stride
        nothing = tl.zeros((TILE,), kind)
        tl.store(target.to(tl.pointer_type(kind)), nothing, mask=inside)


class BlockMover:
    """Copies and zeroes whole blocks of a fixed set of caches [num_blocks, ...].

    Touches the bytes of the caches' views only, not the padding between pages.
    """

    def __init__(self, caches: Sequence[torch.Tensor]) -> None:
        rows = [row for cache in caches for row in block_runs(cache)]
        self._caches = list(caches)  # the addresses below stay valid
        self._runs = torch.tensor(rows, dtype=torch.int64).to(caches[0].device)
        self._unit = gcd(_WIDEST, *(number for row in rows for number in _moved(row)))
        most_bytes = max(pieces * size for _, _, pieces, _, size in rows)
        self._tiles = cdiv(most_bytes // self._unit, _TILE)

    def zero(self, blocks: torch.Tensor) -> None:
        """Zeroes these blocks, int64 [n] on the caches' device."""
        self.call(blocks, copy=False).launch()

    def copy(self, pairs: torch.Tensor) -> None:
        """Copies blocks, int64 [n, 2] of (source, target) on the caches' device. No
        block is both a source and a target of one call."""
        if pairs.dim() != 2 or pairs.shape[1] != 2:
            raise ValueError(f"pairs {tuple(pairs.shape)}: expected [n, 2]")
        self.call(pairs, copy=True).launch()

    def call(self, blocks: torch.Tensor, copy: bool) -> Call:
        """The launch that moves these blocks or pairs."""
        return Call(
            kernel=move_blocks_kernel,
            grid=(blocks.shape[0], self._runs.shape[0], self._tiles),
            arguments={"runs_ptr": self._runs, "blocks_ptr": blocks.contiguous()},
            constants={"COPY": copy, "UNIT": self._unit, "TILE": _TILE},
        )


def _moved(row: tuple[int, int, int, int, int]) -> tuple[int, ...]:
    """What a unit of bytes must divide; a single piece may have any stride."""
    address, block_stride, pieces, stride, size = row
    return address, block_stride, size, stride if pieces > 1 else 0


def variants() -> Iterator[KernelVariant]:
    """Copies and zeroing, at every width of a unit."""
    for width in (8, 4, 2, 1):
        mover = BlockMover([torch.zeros(2, 8 + width, dtype=torch.uint8)])
        for copy in (True, False):
            name = "copy" if copy else "zero"
            blocks = torch.zeros(1, 2, dtype=torch.int64)
            yield mover.call(blocks, copy).variant(f"{name} blocks, {width} bytes")
