"""The contract of a KV-cache format, and all that follows from its table.

Knows how a format turns K and V vectors into bytes of pages and back. Refuses to know
block managers, layers and devices. Every byte number comes out of `layout`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import lru_cache
from typing import ClassVar

import torch

from vllm.utils.math_utils import cdiv
from vllm.v1.kv_formats import paging
from vllm.v1.kv_formats.layout import Extent, Field, StateLayout
from vllm.v1.kv_formats.mode import KVQuantMode
from vllm.v1.kv_formats.tiles import tiled

DEFAULT_ARRANGEMENT = "cells"
PLANES = "planes"
TILE16 = "tile16"


@dataclass(frozen=True)
class Packing:
    """What a spec publishes: H head slots per state and C bytes per (slot, state)."""

    head_slots: int
    state_bytes: int


@dataclass(frozen=True)
class KVScales:
    """Per-tensor scales of one layer: stored value * scale = original value."""

    k: float = 1.0
    v: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Largest relative RMS error of a round trip on normally distributed vectors."""

    key: float
    value: float


UNIT_SCALES = KVScales()
EXACT = Tolerance(key=0.0, value=0.0)


@dataclass(frozen=True)
class KVFormat(ABC):
    """One accepted cache-dtype name: table, encoding, tolerance.

    `model_dtype` matters where "auto" is not resolved, and nowhere else.

    K is [T, heads, head_size] and V [T, heads, head_size_v], any float dtype. A latent
    (MLA) state has head_size_v == 0: V is None on the way in and [T, heads, 0] on the
    way out. Decoded values are a pure function of the stored bytes.

    `arrangement` is a named reordering of the same fields with the same H and C.
    `opaque` formats are published by name: their mode does not tell their bytes.
    """

    name: str
    mode: KVQuantMode
    _: KW_ONLY
    arrangement: str = DEFAULT_ARRANGEMENT
    # The name under which the same bytes are known; empty for this name.
    alias_of: str = ""
    tolerance: Tolerance = EXACT
    summary: str = field(default="", compare=False)

    arrangements: ClassVar[tuple[str, ...]] = (DEFAULT_ARRANGEMENT, PLANES, TILE16)
    latent: ClassVar[bool] = False  # only a latent record, never K and V
    latent_capable: ClassVar[bool] = True  # may hold a latent besides K and V
    opaque: ClassVar[bool] = False
    per_tensor_scales: ClassVar[bool] = False  # applies the KVScales of the layer
    align: ClassVar[int] = 1
    # Layers at each end of a model that stay dense unless the user says otherwise.
    default_dense_boundary_layers: ClassVar[int] = 0
    fits: ClassVar[str] = "any head size"
    nonfinite: ClassVar[str] = "NaN is stored as 0, infinities saturate"

    # -- what a format file provides ---------------------------------------------------

    @abstractmethod
    def rows(self, model_dtype: torch.dtype) -> tuple[Field, ...]:
        """The unbound table: fields in memory order of one state."""

    @abstractmethod
    def encode(
        self,
        key: torch.Tensor,
        value: torch.Tensor | None,
        scales: KVScales = UNIT_SCALES,
    ) -> dict[str, torch.Tensor]:
        """Field tensors [T, heads, count] in the field's torch type, by field name."""

    @abstractmethod
    def decode(
        self,
        fields: Mapping[str, torch.Tensor],
        head_size: int,
        head_size_v: int,
        out_dtype: torch.dtype,
        scales: KVScales = UNIT_SCALES,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K [T, heads, head_size] and V [T, heads, head_size_v], in original space."""

    def storage_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """Element type of the cache tensor and of the spec."""
        return torch.uint8

    def check_head_size(self, head_size: int, head_size_v: int) -> None:
        """Raises ValueError naming the format, the size and what fits."""
        if head_size <= 0 or head_size_v < 0:
            raise self._misfit(head_size, head_size_v)
        if self.latent != (head_size_v == 0) and not (
            self.latent_capable and head_size_v == 0
        ):
            raise self._misfit(head_size, head_size_v)

    # -- what follows from the table ---------------------------------------------------

    @property
    def page_alignment(self) -> int:
        """Bytes that the model's pages of this format are rounded up to."""
        return 1

    @property
    def format_id(self) -> str:
        """Identifies the bytes: equal ids mean byte-equal pages for equal input."""
        return f"{self.alias_of or self.name}:{self.arrangement}"

    def resolve(self, model_dtype: torch.dtype) -> "KVFormat":
        """The format with a fixed storage type: "auto" becomes the model's dtype."""
        return self

    def arranged(self, arrangement: str) -> "KVFormat":
        """The same format in another arrangement. ValueError lists those there are."""
        if arrangement not in self.arrangements:
            raise ValueError(
                f"KV cache format {self.name} has no arrangement {arrangement!r}: "
                f"expected one of {', '.join(self.arrangements)}"
            )
        return replace(self, arrangement=arrangement)

    def layout(
        self,
        head_size: int,
        head_size_v: int,
        model_dtype: torch.dtype = torch.bfloat16,
    ) -> StateLayout:
        """The bound table. Raises ValueError for head sizes that do not fit."""
        return _layout(self, head_size, head_size_v, model_dtype)

    def packing(
        self,
        num_kv_heads: int,
        head_size: int,
        head_size_v: int,
        model_dtype: torch.dtype = torch.bfloat16,
    ) -> Packing:
        """H and C of a layer with these heads."""
        layout = self.layout(head_size, head_size_v, model_dtype)
        return Packing(num_kv_heads * layout.num_sides, layout.nbytes)

    def bytes_per_token(
        self,
        num_kv_heads: int,
        head_size: int,
        head_size_v: int,
        model_dtype: torch.dtype = torch.bfloat16,
    ) -> int:
        """Bytes that one token takes in one layer, without page padding."""
        packing = self.packing(num_kv_heads, head_size, head_size_v, model_dtype)
        return packing.head_slots * packing.state_bytes

    def rows_arranged(self, model_dtype: torch.dtype) -> tuple[Field, ...]:
        """The unbound table in this arrangement.

        "planes" parts K from V; "tile16" gives every field a plane of its own.
        """
        rows = self.rows(model_dtype)
        if self.arrangement == TILE16:
            return tiled(rows)
        if self.arrangement != PLANES:
            return rows
        return tuple(replace(row, plane=int(row.of == "v")) for row in rows)

    def extent(self) -> Extent:
        """Which innermost axes of a page must be dense for this arrangement."""
        if self.arrangement == TILE16:
            return Extent.TILE
        return Extent.HEAD if self.arrangement == PLANES else Extent.STATE

    def roundtrip(
        self,
        key: torch.Tensor,
        value: torch.Tensor | None,
        scales: KVScales = UNIT_SCALES,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """decode(encode(.)) in key.dtype: what `load` gives after `store`."""
        fields = self.encode(key, value, scales)
        sizes = key.shape[-1], _size_v(value)
        return self.decode(fields, *sizes, key.dtype, scales)

    def store(
        self,
        pages: torch.Tensor,
        slot_mapping: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor | None,
        scales: KVScales = UNIT_SCALES,
    ) -> None:
        """Writes one state per slot into pages [B, H, N, C] (bytes, any outer strides).

        slot = block * N + offset; slots of -1 are skipped. Rows of `key` past the end
        of `slot_mapping` are padding and ignored. No other byte is touched.
        """
        pages = paging.as_bytes(pages)
        layout = self.layout(key.shape[-1], _size_v(value), key.dtype)
        self._check_heads(pages, layout, key.shape[1])
        slots, key, value = _drop_skipped(slot_mapping, key, value)
        if slots.numel() == 0:
            return
        fields = self.encode(key, value, scales)
        for side, plane in layout.planes():
            records = layout.pack(fields, side, plane)
            for start, part in layout.parts(pages, side, plane):
                end = start + part.shape[-2] * part.shape[-1]
                paging.scatter(part, slots, records[..., start:end])

    def load(
        self,
        pages: torch.Tensor,
        block_ids: torch.Tensor,
        num_tokens: int,
        head_size: int,
        head_size_v: int,
        out_dtype: torch.dtype,
        scales: KVScales = UNIT_SCALES,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The first `num_tokens` states of these blocks of pages [B, H, N, C].

        Returns K [T, heads, head_size] and V [T, heads, head_size_v] in `out_dtype`.
        """
        pages = paging.as_bytes(pages)
        layout = self.layout(head_size, head_size_v, out_dtype)
        needed = cdiv(num_tokens, pages.shape[2])
        if needed > block_ids.numel():
            raise ValueError(
                f"{num_tokens} tokens take {needed} blocks of {pages.shape[2]} states, "
                f"got {block_ids.numel()} block ids"
            )
        fields: dict[str, torch.Tensor] = {}
        for side, plane in layout.planes():
            slices = [
                paging.gather(part, block_ids[:needed], num_tokens)
                for _, part in layout.parts(pages, side, plane)
            ]
            records = slices[0] if len(slices) == 1 else torch.cat(slices, dim=-1)
            fields |= layout.unpack(records, side, plane)
        return self.decode(fields, head_size, head_size_v, out_dtype, scales)

    def _check_heads(
        self, pages: torch.Tensor, layout: StateLayout, num_kv_heads: int
    ) -> None:
        if pages.shape[1] != num_kv_heads * layout.num_sides:
            raise ValueError(
                f"KV cache format {self.name}: {num_kv_heads} KV heads need "
                f"{num_kv_heads * layout.num_sides} head slots, the pages "
                f"{tuple(pages.shape)} have {pages.shape[1]}"
            )

    def _misfit(self, head_size: int, head_size_v: int) -> ValueError:
        return ValueError(
            f"KV cache format {self.name} cannot hold head_size={head_size}, "
            f"head_size_v={head_size_v}: it fits {self.fits}; use another "
            "--kv-cache-dtype (auto fits every model)"
        )


def _size_v(value: torch.Tensor | None) -> int:
    return 0 if value is None else value.shape[-1]


def _drop_skipped(
    slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    num_slots = slots.shape[0]
    key = key[:num_slots]
    value = None if value is None else value[:num_slots]
    kept = slots >= 0
    if not bool(kept.all()):
        slots, key = slots[kept], key[kept]
        value = None if value is None else value[kept]
    return slots.long(), key, value


@lru_cache(maxsize=1024)
def _layout(
    fmt: KVFormat, head_size: int, head_size_v: int, model_dtype: torch.dtype
) -> StateLayout:
    fmt.check_head_size(head_size, head_size_v)
    rows = fmt.rows_arranged(model_dtype)
    bound = tuple(row.bind(head_size, head_size_v) for row in rows)
    return StateLayout(bound, align=fmt.align, extent=fmt.extent())
