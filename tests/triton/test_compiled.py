"""Every kernel variant compiles for every GPU, within its registers and memory."""

import pytest

from tests.triton.compiler import KIB, TARGETS, Usage, compiled
from tests.triton.table import BEGIN, PAGE, measured, row_of, rows, table, with_table

# Bytes of a thread that may lie in local memory: saved around calls of exact division.
LOCAL_BUDGET = 32
# `make test` compiles one variant of every STRIDE-th row, each for one target.
STRIDE = 2


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
    assert page == with_table(page, usages), "run python -m tests.triton.table"


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
    assert (
        table(usages).splitlines()[-1].startswith("| store x | 2 | 128 / 0 / 192.0 |")
    )
    assert row_of("copy blocks, 8 bytes") == "copy blocks"
    assert row_of("attention decode fp8_e4m3 bfloat16 128 window") == (
        "attention decode fp8_e4m3 bfloat16"
    )
