"""Every kernel variant compiles for every GPU, within its registers and memory."""

import pytest

from tests.triton.compiler import KIB, TARGETS, Usage, compiled
from tests.triton.table import (
    BEGIN,
    PAGE,
    lines_of,
    measured,
    row_of,
    rows,
    with_lines,
)

# Bytes of a thread that may lie in local memory: saved around calls of exact division,
# and the few registers that wide tiles of attention lack.
LOCAL_BUDGET = 48
# `make test` compiles one variant of every STRIDE-th row, each for one target.
STRIDE = 6


def check(usages: list[Usage]) -> None:
    for usage in usages:
        assert usage.local_bytes <= LOCAL_BUDGET, usage
        assert usage.shared_bytes <= TARGETS[usage.target].shared_limit, usage


def test_some_variants_fit_their_targets() -> None:
    targets, pairs = list(TARGETS), []
    for i, names in enumerate(list(rows().values())[::STRIDE]):
        pairs.append((targets[i % len(targets)], names[i % len(names)]))
    usages = compiled(pairs)
    assert [(usage.target, usage.variant) for usage in usages] == pairs
    check(usages)


@pytest.mark.slow
def test_all_variants_fit_every_target_and_the_docs_say_so() -> None:
    usages = measured()
    check(usages)
    page = PAGE.read_text()
    lines = lines_of(usages)
    assert page == with_lines(page, lines), "run python -m tests.triton.table"


def test_the_docs_have_a_row_for_every_kernel() -> None:
    page = PAGE.read_text().split(BEGIN)[1]
    for row, names in rows().items():
        assert f"| {row} | {len(names)} |" in page, "run python -m tests.triton.table"


def test_names_of_variants_are_unique() -> None:
    names = [name for of_row in rows().values() for name in of_row]
    assert len(set(names)) == len(names)


def test_a_row_shows_its_largest_variants() -> None:
    usages = [
        Usage(
            variant=f"store x:cells {size}",
            target=target,
            registers=size,
            local_bytes=0,
            shared_bytes=(256 - size) * KIB,
        )
        for size in (64, 128)
        for target in TARGETS
    ]
    assert lines_of(usages)["store x"].startswith("| store x | 2 | 128 / 0 / 192.0 |")
    assert row_of("copy blocks, 8 bytes") == "copy blocks"
    assert row_of("attention decode fp8_e4m3 bfloat16 128 window") == (
        "attention decode fp8_e4m3 bfloat16"
    )


def test_rows_are_replaced_one_by_one() -> None:
    page = PAGE.read_text()
    row = next(iter(rows()))
    changed = with_lines(page, {row: f"| {row} | 0 |", "no kernel": "| no kernel |"})
    assert f"| {row} | 0 |" in changed and "| no kernel |" not in changed
    assert len(changed.splitlines()) == len(page.splitlines())


@pytest.mark.parametrize("excess", ["local", "shared"])
def test_an_excess_is_noticed(excess: str) -> None:
    limit = TARGETS["sm_80"].shared_limit
    usage = Usage(
        variant="store x:cells 64",
        target="sm_80",
        registers=255,
        local_bytes=LOCAL_BUDGET + (excess == "local"),
        shared_bytes=limit + (excess == "shared"),
    )
    with pytest.raises(AssertionError, match=f"{excess}_bytes"):
        check([usage])
