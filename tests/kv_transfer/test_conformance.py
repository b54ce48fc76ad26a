"""Every built-in connector conforms, with a fake engine."""

from pathlib import Path
from typing import Any

import pytest

from vllm.testing.kv_connector.cases import (
    KINDS,
    Case,
    cases,
    few_cases,
    first_case,
    pairwise_cases,
)
from vllm.testing.kv_connector.interface import check_interface
from vllm.testing.kv_connector.report import Report
from vllm.testing.kv_connector.scenario import Subject, check_bytes
from vllm.testing.kv_connector.subjects import BUILT_IN

SUBJECTS = list(BUILT_IN)


def the(name: str) -> Subject:
    """A connector of the list; skips where a package is missing."""
    subject = BUILT_IN[name]
    if not subject.is_there:
        pytest.skip(f"{name} needs one of {', '.join(subject.needs)}")
    return subject


def conforms(report: Report) -> None:
    assert not report, f"\n{report}"


def grid(few: list[str], of: list[str] = SUBJECTS) -> list[Any]:
    """Connectors x cases: for those in `few` every format once, for the others every
    kind of layer once; everything when slow tests run."""
    default = {(name, case) for name in few for case in few_cases()}
    default |= {(name, first_case(kind)) for name in SUBJECTS for kind in KINDS}
    return [
        pytest.param(
            name,
            case,
            id=f"{name}-{case.name}",
            marks=[] if (name, case) in default else pytest.mark.slow,
        )
        for name in of
        for case in cases()
    ]


@pytest.mark.parametrize("name, case", grid(few=["Example"]))
def test_bytes_come_back_as_they_were(name: str, case: Case, tmp_path: Path) -> None:
    conforms(check_bytes(case, the(name), tmp_path))


@pytest.mark.parametrize("name", SUBJECTS)
def test_classes_have_the_interface(name: str, tmp_path: Path) -> None:
    conforms(check_interface(the(name), tmp_path))


def test_the_choices_of_cases_cover_what_they_say() -> None:
    everything, few, pairs = list(cases()), few_cases(), pairwise_cases()

    def pairs_of(chosen: list[Case]) -> set[tuple[str, str]]:
        return {
            pair
            for case in chosen
            for parts in [(case.kind, case.fmt.format_id, case.layout.name)]
            for pair in [parts[:2], parts[1:], (parts[0], parts[2])]
        }

    assert {case.fmt for case in few} == {case.fmt for case in everything}
    assert len(few) < len(pairs) < len(everything)
    assert pairs_of(pairs) == pairs_of(everything)
    assert {case.kind for case in everything} == set(KINDS)
