"""Connectors between two engines: one computes prompts, the other goes on with them."""

from pathlib import Path

import pytest

from tests.kv_transfer.test_conformance import conforms, grid, the
from vllm.testing.kv_connector.cases import Case
from vllm.testing.kv_connector.scenario import check_pair
from vllm.testing.kv_connector.subjects import BUILT_IN

PEERS = [name for name, subject in BUILT_IN.items() if subject.expect == "peer"]


@pytest.mark.parametrize("name, case", grid(few=PEERS, of=PEERS))
def test_one_engine_goes_on_with_pages_of_another(
    name: str, case: Case, tmp_path: Path
) -> None:
    conforms(check_pair(case, the(name), tmp_path))
