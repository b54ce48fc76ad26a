"""What a fake layer keeps of a token: real states of its format, chosen by the prefix.

Knows how to write them and to read them back, byte for byte. A state stands for all
tokens up to its position, so that a foreign, stale or missing one is another.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from vllm.v1.kv_formats import KVFormat, paging

# Different states there are; a prime, so that layers choose differently.
NUM_STATES = 1021
_LAYER_STEP = 131
_MODULUS = (1 << 61) - 1
_FACTOR = 1_000_003


def extend(prefix: int, token: int) -> int:
    """The name of a prefix, from that of the prefix before its last token."""
    return (prefix * _FACTOR + token + 1) % _MODULUS


def names_of(tokens: Sequence[int]) -> list[int]:
    """Names of all prefixes; entry i covers the tokens up to and with position i."""
    names, name = [], 1
    for token in tokens:
        name = extend(name, token)
        names.append(name)
    return names


def picks(names: Sequence[int], layer_index: int) -> torch.Tensor:
    """Which states a layer keeps for these prefixes, int64 [T]."""
    found = (np.array(names, np.int64) + _LAYER_STEP * layer_index) % NUM_STATES
    return torch.from_numpy(found)


@lru_cache(maxsize=64)
def _records(
    fmt: KVFormat, heads: int, head_size: int, head_size_v: int
) -> dict[tuple[int, int], torch.Tensor]:
    """Bytes of every state, uint8 [NUM_STATES, heads, width], by (side, plane)."""
    generator = torch.Generator().manual_seed(head_size)
    key = torch.randn(NUM_STATES, heads, head_size, generator=generator)
    value = None
    if head_size_v:
        value = torch.randn(NUM_STATES, heads, head_size_v, generator=generator)
    layout = fmt.layout(head_size, head_size_v, torch.bfloat16)
    fields = fmt.encode(key.bfloat16(), None if value is None else value.bfloat16())
    packed = {part: layout.pack(fields, *part) for part in layout.planes()}
    return {part: records for part, records in packed.items() if records.numel()}


class AttentionStates:
    """One layer's pages, uint8 [B, H, N, C], as tables of states."""

    def __init__(self, fmt: KVFormat, spec: Any, pages: torch.Tensor) -> None:
        sizes = spec.head_size, spec.head_size_v
        layout = fmt.layout(*sizes, torch.bfloat16)
        self.block_size = spec.block_size
        self.records = _records(fmt, spec.num_kv_heads, *sizes)
        self.parts = {
            plane: [part for _, part in layout.parts(pages, *plane)]
            for plane in self.records
        }

    def write(self, slots: torch.Tensor, chosen: torch.Tensor) -> None:
        """Stores state `chosen[i]` in slot `slots[i]` (block * block_size + offset)."""
        for plane, parts in self.parts.items():
            widths = [part.shape[-2] * part.shape[-1] for part in parts]
            slices = self.records[plane][chosen].split(widths, -1)
            for part, records in zip(parts, slices, strict=True):
                paging.scatter(part, slots, records)

    def slots(self, block_ids: Sequence[int], start: int, end: int) -> torch.Tensor:
        """The slots of positions `start` to `end` of a request, int64."""
        positions = np.arange(start, end)
        blocks = np.array(block_ids)[positions // self.block_size]
        return torch.from_numpy(blocks * self.block_size + positions % self.block_size)

    def holds(self, slots: torch.Tensor, chosen: torch.Tensor) -> bool:
        """Says whether slots hold the states that they should."""
        for plane, parts in self.parts.items():
            found = torch.cat([paging.take(part, slots) for part in parts], -1)
            if not torch.equal(found, self.records[plane][chosen]):
                return False
        return True

    def read(self, block_ids: Sequence[int], end: int) -> list[torch.Tensor]:
        """The first `end` states of these blocks: uint8 [end, heads, width] for each
        plane of each side."""
        ids = torch.tensor(block_ids[: -(-end // self.block_size)])
        return [
            torch.cat([paging.gather(part, ids, end) for part in parts], -1)
            for parts in self.parts.values()
        ]

    def expected(self, chosen: torch.Tensor) -> list[torch.Tensor]:
        """The same for the states that should be there."""
        return [records[chosen] for records in self.records.values()]


class RecurrentStates:
    """One layer's recurrent states: a list of tensors [B, ...]."""

    def __init__(self, spec: Any, tensors: list[torch.Tensor]) -> None:
        self.block_size = spec.block_size
        self.every_block = spec.mamba_cache_mode == "all"
        self.in_place = spec.mamba_cache_mode == "none"
        self.tensors = tensors
        generator = torch.Generator().manual_seed(7)
        self.records = [
            torch.randn(NUM_STATES, *t.shape[1:], generator=generator).to(t.dtype)
            for t in tensors
        ]

    def place(self, position: int) -> int:
        """Index of the block that holds the state after a position."""
        return 0 if self.in_place else position // self.block_size

    def write(self, block_id: int, chosen: int) -> None:
        for tensor, records in zip(self.tensors, self.records, strict=True):
            tensor[block_id] = records[chosen]

    def held(self, block_id: int) -> int | None:
        """Which state a block holds; None for bytes that are none."""
        for chosen in range(NUM_STATES):
            if self.matches(block_id, chosen):
                return chosen
        return None

    def matches(self, block_id: int, chosen: int) -> bool:
        return all(
            torch.equal(tensor[block_id], records[chosen])
            for tensor, records in zip(self.tensors, self.records, strict=True)
        )

    def positions(self, start: int, end: int) -> list[int]:
        """After which positions of a step's tokens the state is stored."""
        size = self.block_size
        ends = [p for p in range(start, end) if (p + 1) % size == 0]
        return [*(ends if self.every_block else []), end - 1]
