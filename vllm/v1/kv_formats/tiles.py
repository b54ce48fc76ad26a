"""The arrangement "tile16": how states take turns, so that a register reads them all.

Sixteen states of a head slot form a tile, field by field. Of K, a state gives 32 bits
at a time (24 of 3-bit codes): a register of 16 such units holds a lane of each state,
and products with a query sum lane by lane. Of V, few states give an element at a time,
as many as fill 32 bits: a unit holds one element (four codes of 4 bits, eight of 3) of
neighbouring states, and products with their probabilities sum element by element. What
a state has one of, or one per group, lies in 16 lanes. Knows tables, no bytes of pages.
"""

from dataclasses import replace

from vllm.v1.kv_formats.layout import DTYPES, TILE_STATES, Field

_UNIT_BITS = 32
_BYTE = 8


def tiled(rows: tuple[Field, ...]) -> tuple[Field, ...]:
    """The same fields, each in a plane of its own, with what alternates in it."""
    planes: dict[int, int] = {}
    out = []
    for row in rows:
        plane = planes.get(row.side, 0)
        planes[row.side] = plane + 1
        lanes, unit = _turns(row)
        out.append(replace(row, plane=plane, interleave=lanes, unit=unit))
    return tuple(out)


def _turns(row: Field) -> tuple[int, int]:
    """States that take turns in a field, and the bytes of a turn."""
    bits = DTYPES[row.dtype].bits
    if row.count is not None or row.group > 1:
        return TILE_STATES, bits // _BYTE
    if row.of == "k":
        return TILE_STATES, _bytes_of_codes(bits, _UNIT_BITS // bits)
    if bits < _BYTE:
        return 2, _bytes_of_codes(bits, _UNIT_BITS // 2 // bits)
    return _UNIT_BITS // bits, bits // _BYTE


def _bytes_of_codes(bits: int, count: int) -> int:
    """The bytes of about so many codes: eight where fewer do not fill whole bytes."""
    return count * bits // _BYTE if count * bits % _BYTE == 0 else bits
