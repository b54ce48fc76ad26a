"""What every connector must hold to. A failure says in words what it did wrong."""

from pathlib import Path
from typing import Any

import pytest

from vllm.testing.kv_connector.cases import Case, first_case
from vllm.testing.kv_connector.interface import check_interface
from vllm.testing.kv_connector.models import ModelFolders
from vllm.testing.kv_connector.real_engine import check_engine
from vllm.testing.kv_connector.report import Report
from vllm.testing.kv_connector.scenario import (
    Subject,
    check_bytes,
    check_pair,
    check_pressure,
)


def _judge(report: Report) -> None:
    if report:
        pytest.fail(f"the connector does not conform:\n{report}", pytrace=False)


def test_the_class_has_the_interface(subject: Subject, tmp_path: Path) -> None:
    _judge(check_interface(subject, tmp_path))


def test_bytes_come_back_as_they_were(
    subject: Subject, case: Case, tmp_path: Path
) -> None:
    _judge(check_bytes(case, subject, tmp_path))


def test_one_engine_goes_on_with_pages_of_another(
    subject: Subject, case: Case, tmp_path: Path
) -> None:
    if subject.expect != "peer":
        pytest.skip("for connectors with --kv-connector-expect peer")
    _judge(check_pair(case, subject, tmp_path))


def test_pressure_and_aborts_lose_no_block(
    subject: Subject, kind: str, tmp_path: Path
) -> None:
    _judge(check_pressure(first_case(kind), subject, tmp_path))


def test_tokens_of_an_engine_do_not_change(
    subject: Subject,
    engine_case: tuple[str, dict[str, Any]],
    folders: ModelFolders,
    tmp_path: Path,
) -> None:
    kind, settings = engine_case
    _judge(check_engine(folders[kind], settings, subject, tmp_path))
