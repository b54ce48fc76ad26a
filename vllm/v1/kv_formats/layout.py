"""What one cached state looks like in bytes: a table of named fields.

Knows offsets, planes, extents and strided views over a page tensor. Refuses to know
what the numbers in a field mean: encoding belongs to the format files.

A page holds H head slots x N states of C bytes each. Its logical axes are [H, N, C];
the strides of the page tensor say how they lie in memory.
"""

from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from enum import Enum
from functools import cached_property
from typing import NamedTuple

import torch

from vllm.utils.math_utils import cdiv, round_up


class DType(NamedTuple):
    """An element type: its bits, its torch type (None: packed bits) and its C type."""

    bits: int
    torch_dtype: torch.dtype | None
    c_type: str


DTYPES: dict[str, DType] = {
    "u3": DType(3, None, "uint8_t"),
    "u4": DType(4, None, "uint8_t"),
    "e2m1": DType(4, None, "uint8_t"),
    "u8": DType(8, torch.uint8, "uint8_t"),
    "i8": DType(8, torch.int8, "int8_t"),
    "e4m3": DType(8, torch.float8_e4m3fn, "uint8_t"),
    "e5m2": DType(8, torch.float8_e5m2, "uint8_t"),
    "ue8m0": DType(8, torch.uint8, "uint8_t"),
    "f16": DType(16, torch.float16, "uint16_t"),
    "bf16": DType(16, torch.bfloat16, "uint16_t"),
    "f32": DType(32, torch.float32, "float"),
}


TILE_STATES = 16  # lanes of a 64-byte register of 32-bit units


class Extent(Enum):
    """What the planes of a layout follow one another through.

    `axes` lists the innermost page axes that must be dense for it: an axis order such
    as "LBHNC" suits the layout when it ends with them.
    """

    STATE = "C"  # one plane: a state is one contiguous record
    HEAD = "NC"  # planes follow each other through the states of one head slot
    SIDE = "HNC"  # planes follow each other through all head slots of one side
    TILE = "tile"  # planes follow each other through TILE_STATES states of a head slot

    @property
    def axes(self) -> str:
        """The innermost page axes that must be dense, outermost first."""
        return Extent.HEAD.value if self is Extent.TILE else self.value

    def allows(self, axis_order: str) -> bool:
        """Says whether pages in this order of axes ("LBHNC", ...) keep it together."""
        return axis_order.endswith(self.axes)


@dataclass(frozen=True)
class Field:
    """One row of a layout table.

    `count` is the number of elements; None means one per `group` elements of the head
    whose letter is `of` ("k" or "v"). Sub-byte elements are packed, low bits first, and
    rounded up to whole bytes. Fields of one `plane` of one `side` lie together state by
    state. `interleave` is the number of states whose units of `unit` bytes alternate in
    the plane; what is left of a record after whole units is one smaller unit.
    """

    name: str
    dtype: str
    count: int | None = None
    _: KW_ONLY
    of: str = "k"
    group: int = 1
    plane: int = 0
    side: int = 0
    interleave: int = 1
    unit: int = 1
    note: str = ""

    def bind(self, head_size: int, head_size_v: int) -> "Field":
        """The same row with its count filled in for these head sizes, in elements."""
        if self.count is not None:
            return self
        return replace(self, count=self._whole_groups(head_size, head_size_v))

    def _whole_groups(self, head_size: int, head_size_v: int) -> int:
        size = head_size if self.of == "k" else head_size_v
        if size % self.group:
            raise ValueError(
                f"field {self.name!r} needs head sizes that are multiples of "
                f"{self.group}, got {size}: choose a format that holds this head size"
            )
        return size // self.group

    @property
    def nbytes(self) -> int:
        """Bytes of this field in one state. Needs a bound count."""
        if self.count is None:
            raise ValueError(f"field {self.name!r} has no count: bind a head size")
        return cdiv(self.count * DTYPES[self.dtype].bits, 8)

    @property
    def element_dtype(self) -> torch.dtype:
        """Torch type of a view of this field; packed bits are seen as uint8 bytes."""
        return DTYPES[self.dtype].torch_dtype or torch.uint8


@dataclass(frozen=True)
class StateLayout:
    """A table of bound fields, in memory order: side by side, plane by plane.

    A layout with two sides (NVFP4) spends two head slots per KV head, the first half of
    the slots on side 0. `nbytes` is C, the bytes of one (head slot, state) cell; the
    total of a side is rounded up to `align` in its last plane.
    """

    fields: tuple[Field, ...]
    _: KW_ONLY
    align: int = 1
    extent: Extent = Extent.STATE

    def __post_init__(self) -> None:
        names = [f.name for f in self.fields]
        if len(set(names)) != len(names):
            raise ValueError(f"duplicate field in {names}: give every field one name")
        order = [(f.side, f.plane) for f in self.fields]
        if order != sorted(order):
            raise ValueError(f"list fields in memory order, by plane: got {names}")
        if len(set(order)) > self.num_sides and self.extent is Extent.STATE:
            raise ValueError(f"several planes need an extent: {names}")
        for side, plane in set(order):
            rows = self.rows(side, plane)
            mixed = any(f.interleave > 1 for f in rows) or self.extent is Extent.TILE
            if len(rows) > 1 and mixed:
                raise ValueError(f"an interleaved field owns its plane: {names}")
        sizes = {sum(self.plane_widths(side)) for side in range(self.num_sides)}
        if len(sizes) > 1:
            raise ValueError(f"sides of unequal size {sorted(sizes)}: {names}")

    @cached_property
    def num_sides(self) -> int:
        """Head slots per KV head."""
        return max(f.side for f in self.fields) + 1

    @cached_property
    def nbytes(self) -> int:
        """C: bytes of one (head slot, state) cell."""
        return sum(self.plane_widths(0))

    def rows(self, side: int, plane: int) -> tuple[Field, ...]:
        """The fields of one plane, in memory order."""
        return tuple(f for f in self.fields if (f.side, f.plane) == (side, plane))

    def plane_widths(self, side: int) -> tuple[int, ...]:
        """Bytes per state of each plane of a side; the last one holds the padding."""
        last = max(f.plane for f in self.fields if f.side == side)
        widths = [sum(f.nbytes for f in self.rows(side, p)) for p in range(last + 1)]
        widths[-1] += round_up(sum(widths), self.align) - sum(widths)
        return tuple(widths)

    def planes(self) -> Iterator[tuple[int, int]]:
        """Every (side, plane) pair, in memory order."""
        for side in range(self.num_sides):
            for plane in range(len(self.plane_widths(side))):
                yield side, plane

    def field(self, name: str) -> Field:
        """The row of that name. Raises ValueError listing the names there are."""
        for f in self.fields:
            if f.name == name:
                return f
        known = ", ".join(f.name for f in self.fields)
        raise ValueError(f"no field {name!r} in this layout: expected one of {known}")

    def record_offset(self, name: str) -> int:
        """Bytes between the start of a plane's record and the field."""
        target = self.field(name)
        rows = self.rows(target.side, target.plane)
        return sum(f.nbytes for f in rows[: rows.index(target)])

    def region(self, name: str) -> int:
        """Bytes per state of the planes that lie before the field's plane."""
        target = self.field(name)
        return sum(self.plane_widths(target.side)[: target.plane])

    def offset(
        self,
        name: str,
        byte: int = 0,
        *,
        head: int = 0,
        state: int = 0,
        num_heads: int = 1,
        num_states: int = 1,
    ) -> int:
        """Byte offset in a dense page [sides * num_heads, num_states, C].

        `byte` counts within the field, `head` within the field's side.
        """
        f = self.field(name)
        width = self.plane_widths(f.side)[f.plane]
        inner = self.record_offset(name) + byte
        group, lane = divmod(state, f.interleave)
        whole = inner // f.unit * f.unit
        step = min(f.unit, width - whole)
        place = whole * f.interleave + lane * step + inner - whole
        slot = num_states * self.nbytes
        if self.extent is Extent.TILE:
            tile, group = divmod(group, TILE_STATES // f.interleave)
            base = (f.side * num_heads + head) * slot + self.region(name) * TILE_STATES
            place += (tile * TILE_STATES * self.nbytes) + group * f.interleave * width
            return base + place
        place += group * f.interleave * width
        if self.extent is Extent.STATE:
            return (f.side * num_heads + head) * slot + place
        if self.extent is Extent.HEAD:
            base = (f.side * num_heads + head) * slot
            return base + self.region(name) * num_states + place
        base = f.side * num_heads * slot + self.region(name) * num_heads * num_states
        return base + head * num_states * width + place

    def constants(self) -> dict[str, int]:
        """The only numbers a kernel may use, named after the fields.

        STATE_BYTES, then per field NAME_BYTES, NAME_COUNT (elements), NAME_OFFSET (in
        its record), NAME_STRIDE (bytes from one state's record to the next in the
        plane), NAME_REGION (bytes per state of earlier planes), NAME_INTERLEAVE and
        NAME_UNIT.
        """
        out = {"STATE_BYTES": self.nbytes}
        for f in self.fields:
            key = f.name.upper()
            out[f"{key}_OFFSET"] = self.record_offset(f.name)
            out[f"{key}_BYTES"] = f.nbytes
            out[f"{key}_COUNT"] = f.count or 0
            out[f"{key}_STRIDE"] = self.plane_widths(f.side)[f.plane]
            out[f"{key}_REGION"] = self.region(f.name)
            out[f"{key}_INTERLEAVE"] = f.interleave
            out[f"{key}_UNIT"] = f.unit
        return out

    def why_torn(self, pages: torch.Tensor) -> str:
        """Why the strides of pages [B, H, N, C] cannot carry this layout, or ""."""
        num_slots, num_states, width = pages.shape[1:]
        heads = num_slots // self.num_sides
        _, head_stride, state_stride, byte_stride = pages.stride()
        if byte_stride != 1:
            return "the bytes of a state are not contiguous"
        if self.extent is Extent.STATE:
            return ""
        if num_states > 1 and state_stride != width:
            return "the states of a head slot are not contiguous"
        side_is_dense = heads == 1 or head_stride == num_states * width
        if self.extent is Extent.SIDE and not side_is_dense:
            return "the head slots of one side are not contiguous"
        return ""

    def check_pages(self, pages: torch.Tensor) -> None:
        """Raises ValueError unless uint8 pages [B, H, N, C] can carry this layout."""
        if pages.dtype != torch.uint8 or pages.dim() != 4:
            raise ValueError(
                f"pages must be a uint8 tensor [B, H, N, C], got {pages.dtype} "
                f"{tuple(pages.shape)}: pass the byte view"
            )
        if pages.shape[3] != self.nbytes or pages.shape[1] % self.num_sides:
            raise ValueError(
                f"pages {tuple(pages.shape)} do not hold this layout: a cell has "
                f"{self.nbytes} bytes and a KV head has {self.num_sides} slots"
            )
        torn = self.why_torn(pages)
        if torn:
            raise ValueError(
                f"this layout needs the axes {self.extent.axes} innermost and dense: "
                f"{torn} in pages of shape {tuple(pages.shape)} and strides "
                f"{pages.stride()}; use an axis order that ends with "
                f"{self.extent.axes}, such as LBHNC"
            )

    def plane_view(self, pages: torch.Tensor, side: int, plane: int) -> torch.Tensor:
        """The records of one plane over uint8 pages [B, H, N, C] of any outer strides.

        Returns uint8 [B, heads, N // i, i, width] sharing memory, where i is the
        plane's interleave (1 almost always) and heads = H // num_sides. Raises
        ValueError for pages of another shape, for strides that tear the layout apart,
        for N not a multiple of i, and for planes of tiles, which have `parts` only.
        """
        self.check_pages(pages)
        if self.extent is Extent.TILE:
            raise ValueError(
                f"records of plane {plane} alternate by units: read them through parts"
            )
        blocks, slots, states, _ = pages.shape
        heads = slots // self.num_sides
        half = pages[:, side * heads : (side + 1) * heads]
        if self.extent is Extent.STATE:
            return half.unsqueeze(3)
        step = self.rows(side, plane)[0].interleave
        self._check_states(states, side, plane, step)
        width = self.plane_widths(side)[plane]
        region = self.region(self.rows(side, plane)[0].name) * states
        head_stride = half.stride(1)
        if self.extent is Extent.SIDE:
            region, head_stride = region * heads, states * width
        lane, last = (1, step) if step > 1 else (width, 1)
        return half.as_strided(
            (blocks, heads, states // step, step, width),
            (half.stride(0), head_stride, step * width, lane, last),
            half.storage_offset() + region,
        )

    def parts(
        self, pages: torch.Tensor, side: int, plane: int
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """The records of one plane in views that any state can be indexed in.

        Yields the first byte of a slice of the records and uint8 [B, heads, tiles,
        groups, i, units, unit] sharing memory: state t lies in tile t // (groups * i),
        group t // i % groups, lane t % i, and the last two axes are its bytes.
        """
        if self.extent is not Extent.TILE:
            view = self.plane_view(pages, side, plane)
            yield 0, view.unsqueeze(3).unsqueeze(5)
            return
        self.check_pages(pages)
        blocks, slots, states, _ = pages.shape
        self._check_states(states, side, plane, TILE_STATES)
        heads = slots // self.num_sides
        half = pages[:, side * heads : (side + 1) * heads]
        f = self.rows(side, plane)[0]
        width = self.plane_widths(side)[plane]
        region = half.storage_offset() + self.region(f.name) * TILE_STATES
        whole = width // f.unit * f.unit
        for start, unit in ((0, f.unit), (whole, width - whole)):
            units = (whole if start == 0 else width - whole) // max(unit, 1)
            if units == 0:
                continue
            yield (
                start,
                half.as_strided(
                    (
                        *(blocks, heads, states // TILE_STATES),
                        *(TILE_STATES // f.interleave, f.interleave, units, unit),
                    ),
                    (
                        *(half.stride(0), half.stride(1), TILE_STATES * self.nbytes),
                        *(f.interleave * width, unit, f.interleave * unit, 1),
                    ),
                    region + start * f.interleave,
                ),
            )

    def _check_states(self, states: int, side: int, plane: int, step: int) -> None:
        if states % step:
            name = self.rows(side, plane)[0].name
            raise ValueError(
                f"field {name!r} alternates the bytes of {step} states: pages of "
                f"{states} states cannot hold it, use a multiple of {step}"
            )

    def view(self, pages: torch.Tensor, name: str) -> torch.Tensor:
        """The typed view of one field over uint8 pages [B, H, N, C].

        Returns [B, heads, N, count] in the field's torch type (bytes for packed bits),
        or [B, heads, N // i, i, count] for a field that interleaves i states. Raises
        ValueError where the field lands on an odd byte: read those through `unpack`.
        """
        f = self.field(name)
        start = self.record_offset(name)
        if self.extent is Extent.TILE:
            raise ValueError(
                f"field {name!r} alternates by units of {f.unit} bytes: read it "
                "through parts"
            )
        plane = self.plane_view(pages, f.side, f.plane)
        view = plane[..., start : start + f.nbytes]
        if f.interleave == 1:
            view = view.squeeze(3)
        size = f.element_dtype.itemsize
        steps = (view.storage_offset(), *view.stride()[:-1])
        if any(step % size for step in steps):
            raise ValueError(
                f"field {name!r} lands at byte {start}, not aligned to its {size} "
                f"bytes (strides {view.stride()}): read it bytewise"
            )
        return view.view(f.element_dtype)

    def pack(
        self, fields: Mapping[str, torch.Tensor], side: int, plane: int
    ) -> torch.Tensor:
        """Joins field tensors [T, heads, count] into records: uint8 [T, heads, width].

        Padding bytes are zero.
        """
        rows = self.rows(side, plane)
        parts = [fields[f.name].contiguous().view(torch.uint8) for f in rows]
        padding = self.plane_widths(side)[plane] - sum(f.nbytes for f in rows)
        if padding:
            parts.append(parts[0].new_zeros((*parts[0].shape[:2], padding)))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def unpack(
        self, records: torch.Tensor, side: int, plane: int
    ) -> dict[str, torch.Tensor]:
        """Splits records, uint8 [T, heads, width], into typed fields [T, heads, count].

        Works bytewise, so it needs no alignment.
        """
        out = {}
        for f in self.rows(side, plane):
            start = self.record_offset(f.name)
            part = records[..., start : start + f.nbytes]
            if f.element_dtype != torch.uint8:
                part = part.contiguous().view(f.element_dtype)
            out[f.name] = part
        return out
