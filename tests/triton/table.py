"""The table of docs/gpu.md: what the compiled kernels take on each GPU.

    python -m tests.triton.table

compiles every variant for every target, some minutes, and writes the table.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.triton.compiler import KIB, TARGETS, Usage, compiled
from vllm.v1.attention.ops.triton_variants import all_variants

PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"
BEGIN, END = "<!-- table: python -m tests.triton.table -->", "<!-- end of table -->"
_SIZE = re.compile(r"[,:]? \d.*")
_ARRANGEMENT = re.compile(r":\w+")


def row_of(variant: str) -> str:
    """The row of a variant: its name up to the first size, without the arrangement."""
    return _SIZE.sub("", _ARRANGEMENT.sub("", variant))


def rows() -> dict[str, list[str]]:
    """Names of variants by row, in the order of the kernels."""
    found: dict[str, list[str]] = {}
    for variant in all_variants():
        found.setdefault(row_of(variant.name), []).append(variant.name)
    return found


def table(usages: Iterable[Usage]) -> str:
    """Markdown: a row per kernel and format, the largest of its variants per target."""
    lines = [
        f"| kernel | variants | {' | '.join(TARGETS)} |",
        f"| --- | ---: |{' ---: |' * len(TARGETS)}",
    ]
    cells: dict[str, dict[str, list[Usage]]] = {}
    for usage in usages:
        by_target = cells.setdefault(row_of(usage.variant), {})
        by_target.setdefault(usage.target, []).append(usage)
    for row, by_target in cells.items():
        count = len(next(iter(by_target.values())))
        taken = " | ".join(_largest(by_target[target]) for target in TARGETS)
        lines.append(f"| {row} | {count} | {taken} |")
    return "\n".join(lines)


def _largest(usages: Sequence[Usage]) -> str:
    registers = max(usage.registers for usage in usages)
    local = max(usage.local_bytes for usage in usages)
    shared = max(usage.shared_bytes for usage in usages)
    return f"{registers} / {local} / {shared / KIB:.1f}"


def measured() -> list[Usage]:
    """Every variant on every target."""
    names = [name for of_row in rows().values() for name in of_row]
    return compiled((target, name) for name in names for target in TARGETS)


def with_table(page: str, usages: Iterable[Usage]) -> str:
    """The page with the table between its marks."""
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n{table(usages)}\n{END}{after}"


def main() -> None:
    PAGE.write_text(with_table(PAGE.read_text(), measured()))


if __name__ == "__main__":
    main()
