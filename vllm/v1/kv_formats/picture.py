"""Draws a layout as text: a table of fields and a picture of a page.

Every number printed here is asked of the layout.
"""

from vllm.v1.kv_formats.base import KVFormat
from vllm.v1.kv_formats.layout import Extent, Field, StateLayout

_RECORD_COLUMNS = 56
_UNITS = {Extent.STATE: "", Extent.HEAD: "N", Extent.SIDE: "HN", Extent.TILE: "16"}


def example_sizes(fmt: KVFormat, head_size: int = 128) -> tuple[int, int]:
    """(head_size, head_size_v) of a picture: the record's own, or equal K and V."""
    return getattr(fmt, "head_size", 0) or head_size, 0 if fmt.latent else head_size


def address(layout: StateLayout, name: str) -> str:
    """Where the first bytes of a field lie: "66", or "64 HN + 0" behind other planes.

    N counts the states of a page, H its KV heads.
    """
    f = layout.field(name)
    start = layout.record_offset(name)
    if layout.extent is Extent.STATE:
        return str(start)
    before = f.side * layout.nbytes + layout.region(name)
    if not before:
        return str(start)
    return f"{before} {_UNITS[layout.extent]} + {start}"


def field_table(layout: StateLayout) -> list[str]:
    """One line per field: where, bytes, name, type and count, meaning."""
    rows = [("at", "bytes", "field", "type", "count", "meaning")]
    for f in layout.fields:
        if f.count:
            cells = (f.nbytes, f.name, f.dtype, f.count, f.note)
            rows.append((address(layout, f.name), *(str(cell) for cell in cells)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    right = {0, 1, 4}
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def page_picture(layout: StateLayout) -> list[str]:
    """A box per plane: the fields of one record with their byte offsets below."""
    lines = []
    for side, plane in layout.planes():
        rows = [f for f in layout.rows(side, plane) if f.nbytes]
        lines += [_caption(layout, rows[0], side), *_record(layout, rows, side, plane)]
    return lines


def _caption(layout: StateLayout, first: Field, side: int) -> str:
    if layout.extent is Extent.STATE:
        return "every (head, state) is one record:"
    place = address(layout, first.name).split(" + ")[0]
    if layout.extent is Extent.HEAD:
        return f"at byte {place} of a head slot, for each of its N states:"
    how = ""
    if first.interleave > 1:
        how = f", the bytes of {first.interleave} states alternating"
    return f"at byte {place} of the page, for each of H heads and N states{how}:"


def _record(layout: StateLayout, rows: list[Field], side: int, plane: int) -> list[str]:
    width = layout.plane_widths(side)[plane]
    used = sum(f.nbytes for f in rows)
    cells = [(f" {f.name} {f.dtype} ", f.nbytes) for f in rows]
    if used < width:
        cells.append((" 0 ", width - used))
    box, scale, start = "|", "", 0
    for label, nbytes in cells:
        columns = max(len(label), round(_RECORD_COLUMNS * nbytes / width))
        scale = scale.ljust(len(box) - 1) + f"{start} "
        box += label.ljust(columns) + "|"
        start += nbytes
    scale = scale.ljust(len(box) - 1) + str(start)
    edge = "".join("+" if c == "|" else "-" for c in box)
    return [edge, box, edge, scale]
