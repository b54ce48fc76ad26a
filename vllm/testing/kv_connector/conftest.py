"""Turns the options of the kit into test cases."""

import json

import pytest

from vllm.testing.kv_connector.cases import KINDS, cases, few_cases, pairwise_cases
from vllm.testing.kv_connector.models import ModelFolders
from vllm.testing.kv_connector.real_engine import engine_cases
from vllm.testing.kv_connector.scenario import Subject
from vllm.testing.kv_connector.subjects import subject_of

_CASES = {"few": few_cases, "pairs": pairwise_cases, "all": lambda: list(cases())}


def _is_served(kind: str, subject: Subject) -> bool:
    """Recurrent states have a KV cache group of their own in any case."""
    return subject.serves_groups or kind != "states"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Cases for one connector; none, and a reason, without the option."""
    name = metafunc.config.getoption("--kv-connector", default=None)
    if name is None or "subject" not in metafunc.fixturenames:
        return
    config = json.loads(metafunc.config.getoption("--kv-connector-config"))
    expect = metafunc.config.getoption("--kv-connector-expect")
    subject = subject_of(name, config, expect)
    metafunc.parametrize("subject", [subject], ids=[""])
    if "case" in metafunc.fixturenames:
        chosen = _CASES[metafunc.config.getoption("--kv-connector-cases")]()
        served = [case for case in chosen if _is_served(case.kind, subject)]
        metafunc.parametrize("case", served, ids=lambda case: case.name)
    if "kind" in metafunc.fixturenames:
        kinds = [kind for kind in KINDS if _is_served(kind, subject)]
        metafunc.parametrize("kind", kinds)
    if "engine_case" in metafunc.fixturenames:
        metafunc.parametrize(
            "engine_case",
            [case for case in engine_cases() if _is_served(case[0], subject)],
            ids=lambda case: f"{case[0]}-{'-'.join(map(str, case[1].values()))}",
        )


@pytest.fixture
def subject() -> Subject:
    pytest.skip("name a connector: --kv-connector module:Class")


@pytest.fixture
def case() -> None:
    """Given with a connector only."""


@pytest.fixture
def kind() -> None:
    """Given with a connector only."""


@pytest.fixture
def engine_case() -> None:
    """Given with a connector only."""


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> ModelFolders:
    return ModelFolders(tmp_path_factory.mktemp("models"))
