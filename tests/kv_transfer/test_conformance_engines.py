"""Whole engines give the tokens of one without a connector, with every built-in one."""

from pathlib import Path
from typing import Any

import pytest

from vllm.testing.kv_connector.models import ModelFolders
from vllm.testing.kv_connector.real_engine import check_engine, engine_cases
from vllm.testing.kv_connector.subjects import BUILT_IN

SUBJECTS = list(BUILT_IN)
GRID = [
    pytest.param(
        name,
        case,
        id=f"{name}-{case[0]}-{'-'.join(map(str, case[1].values()))}",
        marks=[]
        if name == SUBJECTS[index % len(SUBJECTS)] or case[0] == "states"
        else pytest.mark.slow,
    )
    for index, case in enumerate(engine_cases())
    for name in SUBJECTS
]


@pytest.mark.parametrize("name, case", GRID)
def test_tokens_of_an_engine_do_not_change(
    folders: ModelFolders, tmp_path: Path, name: str, case: tuple[str, dict[str, Any]]
) -> None:
    kind, settings = case
    if not BUILT_IN[name].is_there:
        pytest.skip(f"{name} needs one of {', '.join(BUILT_IN[name].needs)}")
    report = check_engine(folders[kind], settings, BUILT_IN[name], tmp_path)
    assert not report, f"\n{report}"
