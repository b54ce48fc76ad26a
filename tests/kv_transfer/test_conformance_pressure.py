"""Every built-in connector under pressure, with a fake engine: blocks come back."""

from pathlib import Path

import pytest

from tests.kv_transfer.test_conformance import SUBJECTS, conforms, the
from vllm.testing.kv_connector.cases import KINDS, first_case
from vllm.testing.kv_connector.scenario import check_pressure


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SUBJECTS)
def test_pressure_and_aborts_lose_no_block(
    name: str, kind: str, tmp_path: Path
) -> None:
    conforms(check_pressure(first_case(kind), the(name), tmp_path))
