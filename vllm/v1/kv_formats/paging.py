"""Moves records between token rows and pages. Knows slots and blocks, no format."""

import torch


def as_bytes(pages: torch.Tensor) -> torch.Tensor:
    """The uint8 view of a cache tensor [B, H, N, C / element size]."""
    return pages if pages.dtype == torch.uint8 else pages.view(torch.uint8)


def widened(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Views of uint8 tensors in the widest integer type that fits all their strides.

    Moving 8 bytes as one element is about 8 times faster than one by one.
    """
    for dtype in (torch.int64, torch.int32, torch.int16):
        if all(_fits(t, dtype.itemsize) for t in tensors):
            return tuple(t.view(dtype) for t in tensors)
    return tensors


def _fits(tensor: torch.Tensor, size: int) -> bool:
    steps = (tensor.storage_offset(), *tensor.stride()[:-1], tensor.shape[-1])
    return tensor.stride(-1) == 1 and not any(step % size for step in steps)


def scatter(part: torch.Tensor, slots: torch.Tensor, records: torch.Tensor) -> None:
    """Writes records, uint8 [T, heads, width], to slots of a part of a plane.

    `part` is uint8 [B, heads, tiles, groups, i, units, unit] of `StateLayout.parts`;
    slot = block * N + offset, not negative. Nothing else is touched.
    """
    units = records.contiguous().unflatten(-1, part.shape[-2:])
    part, units = widened(part, units)
    rows, index = _rows_at(part, slots)
    rows[index] = units


def take(part: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The records in slots of a part of a plane: uint8 [T, heads, units * unit]."""
    (wide,) = widened(part)
    rows, index = _rows_at(wide, slots)
    return rows[index].flatten(-2).view(torch.uint8)


def _rows_at(
    part: torch.Tensor, slots: torch.Tensor
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """A view whose first axes are those of a slot, and the slots' places in them."""
    tiles, groups, lanes = part.shape[2:5]
    rows = part.permute(0, 2, 3, 4, 1, 5, 6)
    if groups == 1 and lanes == 1:
        return rows.flatten(2, 3).squeeze(2), (slots // tiles, slots % tiles)
    tile = slots // (groups * lanes)
    group = slots // lanes % groups
    return rows, (tile // tiles, tile % tiles, group, slots % lanes)


def gather(
    part: torch.Tensor, block_ids: torch.Tensor, num_tokens: int
) -> torch.Tensor:
    """Reads the first `num_tokens` states of these blocks of a part of a plane.

    `part` is as for `scatter`; returns uint8 [T, heads, units * unit].
    """
    (wide,) = widened(part)
    taken = wide.index_select(0, block_ids).permute(0, 2, 3, 4, 1, 5, 6)
    rows = taken.reshape(-1, taken.shape[4], taken.shape[5] * taken.shape[6])
    rows = rows[:num_tokens]
    return rows if wide is part else rows.view(torch.uint8)
