"""The table of docs/gpu.md: what the compiled kernels take on each GPU.

    python -m tests.triton.table              every row, some minutes
    python -m tests.triton.table "store nvfp4" attention

compiles variants for every target and writes their rows: those whose names start so.
"""

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
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


def lines_of(usages: Iterable[Usage]) -> dict[str, str]:
    """By row, a line of the table: the largest of its variants per target."""
    cells: dict[str, dict[str, list[Usage]]] = {}
    for usage in usages:
        by_target = cells.setdefault(row_of(usage.variant), {})
        by_target.setdefault(usage.target, []).append(usage)
    lines = {}
    for row, by_target in cells.items():
        count = len(next(iter(by_target.values())))
        taken = " | ".join(_largest(by_target[target]) for target in TARGETS)
        lines[row] = f"| {row} | {count} | {taken} |"
    return lines


def _largest(usages: Sequence[Usage]) -> str:
    registers = max(usage.registers for usage in usages)
    local = max(usage.local_bytes for usage in usages)
    shared = max(usage.shared_bytes for usage in usages)
    return f"{registers} / {local} / {shared / KIB:.1f}"


def measured(names: Iterable[str] = ("",)) -> list[Usage]:
    """The variants whose names start so, on every target."""
    wanted = tuple(names)
    variants = [name for of_row in rows().values() for name in of_row]
    chosen = [name for name in variants if name.startswith(wanted)]
    return compiled((target, name) for name in chosen for target in TARGETS)


def with_lines(page: str, lines: Mapping[str, str]) -> str:
    """The page with these lines in its table, in the order of the kernels; lines of
    kernels that are no more are dropped."""
    before, rest = page.split(BEGIN)
    old, after = rest.split(END)
    kept = {line.split(" | ")[0].removeprefix("| "): line for line in old.splitlines()}
    known = kept | dict(lines)
    head = [
        f"| kernel | variants | {' | '.join(TARGETS)} |",
        f"| --- | ---: |{' ---: |' * len(TARGETS)}",
    ]
    body = [known[row] for row in rows() if row in known]
    return "\n".join([before + BEGIN, *head, *body, END + after])


def main() -> None:
    lines = lines_of(measured(sys.argv[1:] or ("",)))
    PAGE.write_text(with_lines(PAGE.read_text(), lines))


if __name__ == "__main__":
    main()
