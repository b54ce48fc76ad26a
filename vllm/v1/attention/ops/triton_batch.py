"""A batch as the Triton attention kernels take it: lengths, masks, tiles and splits.

Knows shapes and how much a device does at once. Refuses to know formats and kernels.
The host reads no tensor, so that what follows from a batch can be captured in a graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import e, log2
from typing import Any

import torch

from vllm.utils.math_utils import cdiv, next_power_of_2

LOG2_E = log2(e)
# A split is worth its merge from this many keys on.
_MIN_SPLIT_KEYS = 128
_MAX_SPLITS = 32
_MIN_ROWS = 16


@dataclass(frozen=True, kw_only=True)
class Requests:
    """R requests: query_start_loc int32 [R + 1], seq_lens int32 [R], block_table int32
    [R, W], all as in CommonAttentionMetadata. The maxima bound the lengths."""

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    max_query_len: int
    max_seq_len: int

    def __len__(self) -> int:
        return self.seq_lens.shape[0]

    @property
    def one_query(self) -> bool:
        """True where every request has one query at most."""
        return self.max_query_len == 1

    def tiles(self, tokens: int, queries: int) -> int:
        """Tiles of `queries` that cover every request of a batch of `tokens`."""
        return len(self) if self.one_query else tokens // queries + len(self)

    def arguments(self) -> dict[str, Any]:
        """What kernels call table, starts and lengths."""
        return {
            "table_ptr": self.block_table,
            "starts_ptr": self.query_start_loc,
            "lens_ptr": self.seq_lens,
            "num_reqs": len(self),
            "table_stride": self.block_table.stride(0),
        }


@dataclass(frozen=True, kw_only=True)
class Masks:
    """Which keys a query sees, and what bounds its scores.

    `causal` may be a bool per request, [R]; `sinks` [Hq] is one logit that a head
    always sees; `soft_cap` 0 is none.
    """

    causal: bool | torch.Tensor = True
    sliding_window: int | None = None
    soft_cap: float = 0.0
    sinks: torch.Tensor | None = None

    def arguments(self) -> dict[str, Any]:
        per_request = isinstance(self.causal, torch.Tensor)
        return {
            "causal_ptr": self.causal.view(torch.uint8) if per_request else None,
            "sinks_ptr": self.sinks,
            "soft_cap": self.soft_cap * LOG2_E,
        }

    def constants(self) -> dict[str, Any]:
        per_request = isinstance(self.causal, torch.Tensor)
        return {
            "WINDOW": self.sliding_window or 0,
            "CAPPED": self.soft_cap != 0.0,
            "SINKS": self.sinks is not None,
            "CAUSAL": "some" if per_request else ("all" if self.causal else "none"),
        }


PLAIN_MASKS = Masks()


@dataclass(frozen=True, kw_only=True)
class Tile:
    """Rows (queries times heads) and keys that a program handles at once."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int = 2


def tile_for(
    shared: int, widest: int, one_query: bool, dot: torch.dtype, looks_up: bool
) -> Tile:
    """The tile for `shared` heads per KV head and padded head sizes up to `widest`.

    Rows are at least 16, which a dot product needs. The bounds keep sums in registers
    and operands in the shared memory that every target has; float32 takes twice the
    room, and a codebook (`looks_up`) more registers.
    """
    wide = dot is torch.float32
    keys = max(16, min(64, (4096 if wide or looks_up else 8192) // widest))
    rows = min(64, 4096 // widest) if looks_up else 64
    if one_query or wide or widest > 256:
        rows = _MIN_ROWS
    rows = max(_MIN_ROWS, rows, next_power_of_2(shared))
    warps = 8 if wide or rows * widest >= 8192 else 4
    return Tile(rows=rows, keys=keys, num_warps=warps)


def splits_for(programs: int, max_seq_len: int, device: torch.device) -> int:
    """Into how many splits contexts are cut, so that `programs` fill a device."""
    wanted = cdiv(2 * _processors(device), max(programs, 1))
    most = min(_MAX_SPLITS, cdiv(max_seq_len, _MIN_SPLIT_KEYS))
    return next_power_of_2(max(1, min(wanted, most)))


@lru_cache(maxsize=16)
def _processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; none on the host, where kernels are interpreted."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@dataclass(frozen=True, kw_only=True)
class Partials:
    """Room for what each split of a context saw: float32 sums [T, Hq, S, Dv], and
    [T, Hq, S, 2], the highest score and the sum of weights."""

    sums: torch.Tensor | None
    stats: torch.Tensor | None

    def arguments(self) -> dict[str, Any]:
        return {"sums_ptr": self.sums, "stats_ptr": self.stats}


def partials_for(out: torch.Tensor, splits: int) -> Partials:
    """Room for the splits of `out` [T, Hq, Dv]; none for one split."""
    if splits == 1:
        return Partials(sums=None, stats=None)
    tokens, heads, size = out.shape
    options: dict[str, Any] = {"dtype": torch.float32, "device": out.device}
    # Zeros: tokens past the last request are merged too, into nothing.
    return Partials(
        sums=torch.empty(tokens, heads, splits, size, **options),
        stats=torch.zeros(tokens, heads, splits, 2, **options),
    )
