"""Reads and prints amounts of memory, and asks the system how much there is."""

import math
import re
from pathlib import Path

from vllm.utils.mem_constants import (
    GB_bytes,
    GiB_bytes,
    KB_bytes,
    KiB_bytes,
    MB_bytes,
    MiB_bytes,
    TB_bytes,
    TiB_bytes,
)

_UNITS = {
    "": 1,
    "b": 1,
    "k": KB_bytes,
    "kb": KB_bytes,
    "ki": KiB_bytes,
    "kib": KiB_bytes,
    "m": MB_bytes,
    "mb": MB_bytes,
    "mi": MiB_bytes,
    "mib": MiB_bytes,
    "g": GB_bytes,
    "gb": GB_bytes,
    "gi": GiB_bytes,
    "gib": GiB_bytes,
    "t": TB_bytes,
    "tb": TB_bytes,
    "ti": TiB_bytes,
    "tib": TiB_bytes,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_MEMINFO = Path("/proc/meminfo")


def parse_size(given: str | float) -> int:
    """Bytes of a size such as "256MiB", "4GiB", "1.5g", "1048576" or 1048576.

    Raises ValueError for anything else, and for less than a byte.
    """
    size = 0.0
    if isinstance(given, str):
        match = _SIZE.fullmatch(given)
        if match and match[2].lower() in _UNITS:
            size = float(match[1]) * _UNITS[match[2].lower()]
    elif isinstance(given, (int, float)) and not isinstance(given, bool):
        size = given
    if not 1 <= size < math.inf:
        raise ValueError(
            f"{given!r} is not an amount of memory: expected a number above 0 with an "
            "optional unit (KiB, MiB, GiB, TiB; KB, MB, GB, TB), for example 4GiB, "
            "256MiB or 1048576"
        )
    return int(size)


def format_gib(num_bytes: float) -> str:
    """The amount in GiB with two decimals, without the unit."""
    return f"{num_bytes / GiB_bytes:.2f}"


def format_bytes(num_bytes: float) -> str:
    """The amount in the largest binary unit that keeps it at 1 or more."""
    for unit, size in (("GiB", GiB_bytes), ("MiB", MiB_bytes), ("KiB", KiB_bytes)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes:.0f} B"


def _meminfo_bytes(key: str) -> int:
    for line in _MEMINFO.read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * KiB_bytes
    raise ValueError(f"{_MEMINFO} has no line {key!r}")


def total_memory_bytes() -> int:
    """Physical memory in bytes, or the limit of the container where it is lower."""
    total = _meminfo_bytes("MemTotal")
    if _CGROUP_LIMIT.exists():
        limit = _CGROUP_LIMIT.read_text().strip()
        if limit.isdigit():
            return min(total, int(limit))
    return total


def available_memory_bytes() -> int:
    """Memory that new allocations can take without swapping, in bytes."""
    return min(_meminfo_bytes("MemAvailable"), total_memory_bytes())
