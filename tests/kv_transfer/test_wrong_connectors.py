"""Connectors that do one thing wrong are told in words what it is."""

import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tests.kv_transfer import wrong_connectors
from vllm.testing.kv_connector.cases import KINDS, Case, cases, few_cases, first_case
from vllm.testing.kv_connector.interface import check_interface
from vllm.testing.kv_connector.report import Report
from vllm.testing.kv_connector.scenario import Subject, check_bytes, check_pressure
from vllm.testing.kv_connector.subjects import subject_of


def conforms(report: Report) -> None:
    assert not report, f"\n{report}"


def wrong(name: str) -> Subject:
    module = wrong_connectors.__name__
    return subject_of(
        f"{module}:{name}", {"kv_connector_extra_config": {"folder": "{tmp}"}}, "bytes"
    )


def case_of(kind: str, format_id: str, layout: str = "LBNHC") -> Case:
    return next(
        case
        for case in cases()
        if (case.kind, case.fmt.format_id, case.layout.name)
        == (kind, format_id, layout)
    )


BFLOAT16 = "bfloat16:cells"


@pytest.mark.parametrize("kind", KINDS)
def test_a_connector_over_a_dict_conforms(kind: str, tmp_path: Path) -> None:
    for case in [case for case in few_cases() if case.kind == kind]:
        conforms(check_bytes(case, wrong("Right"), tmp_path / case.name))
    conforms(check_pressure(first_case(kind), wrong("Right"), tmp_path))


@pytest.mark.parametrize(
    "name, case, words",
    [
        (
            "DenseWidth",
            case_of("full", "int8_per_token_head:cells"),
            "bytes 128-135 of the 136 bytes of a state are none that this engine "
            "stored, while the first ones are right.*page_size_bytes",
        ),
        (
            "DenseWidth",
            case_of("latent", "fp8_ds_mla:cells", "BLHNC"),
            "bytes 576-655 of the 656 bytes of a state",
        ),
        (
            "SliceOfStates",
            case_of("full", "nvfp4:cells", "LBHNC"),
            "The bytes of one state do not lie together in this format.*whole blocks",
        ),
        (
            "DenseStride",
            case_of("full", BFLOAT16, "BLHNC"),
            "wrong bytes: layer model.0.attn reads wrong states",
        ),
        (
            "OffByOneGroup",
            case_of("window", BFLOAT16),
            r"they are the states of layer model\.\d\.attn.*KV cache group",
        ),
        (
            "OffByOneGroup",
            case_of("states", BFLOAT16),
            "goes on from a wrong recurrent state",
        ),
        (
            "OffByOneBlock",
            case_of("full", "fp8_e4m3:cells"),
            r"it is the state of token \d+ of request|is the state of token",
        ),
        (
            "PromisesTooMuch",
            case_of("full", BFLOAT16),
            "loaded by the connector, which promised tokens 0-.*Which block|ever",
        ),
        ("AsyncForNothing", case_of("full", BFLOAT16), "second value must be False"),
        ("Forgetful", case_of("full", BFLOAT16), "side effects: .*asked again at once"),
        (
            "KeepsBlocks",
            case_of("full", BFLOAT16),
            "no end: .*kept request asks for further steps|never named as sent",
        ),
        ("NeverLoads", case_of("full", BFLOAT16), "WAITING_FOR_REMOTE_KVS.*progress"),
        ("ChangesTheStep", case_of("full", BFLOAT16), "changed the SchedulerOutput"),
        ("SharesObjects", case_of("full", BFLOAT16), "cannot be sent to another"),
        ("ReportsStrangers", case_of("full", BFLOAT16), "nothing waits for it"),
        ("SavesNothing", case_of("full", BFLOAT16), "no hit: .*none was loaded"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isalnum() else "",
)
def test_a_wrong_connector_is_told_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, case: Case, words: str
) -> None:
    monkeypatch.setattr("vllm.testing.kv_connector.scenario._MOST_SECONDS", 2.0)
    report = check_bytes(case, wrong(name), tmp_path)
    assert re.search(words, str(report), re.DOTALL), f"\n{report}"


def test_a_slice_of_states_is_right_where_states_lie_together(tmp_path: Path) -> None:
    conforms(check_bytes(case_of("full", BFLOAT16), wrong("SliceOfStates"), tmp_path))


def test_saves_that_do_not_hold_their_blocks_show_under_pressure(
    tmp_path: Path,
) -> None:
    report = check_pressure(first_case("full"), wrong("LateSave"), tmp_path)
    assert "wrong bytes" in str(report)


@pytest.mark.parametrize(
    "name, words",
    [
        ("OtherConstructor", "is called with (vllm_config, role, kv_cache_config)"),
        ("OtherSignature", "wait_for_layer_load cannot be called with 1 arguments"),
    ],
)
def test_a_wrong_class_is_told_what_is_wrong(
    tmp_path: Path, name: str, words: str
) -> None:
    report = check_interface(wrong(name), tmp_path)
    assert words in str(report)


# --- the command ----------------------------------------------------------------------


def test_the_command_checks_any_connector_and_speaks(tmp_path: Path) -> None:
    plugin = "vllm.testing.kv_connector.plugin"
    known = any(entry.value == plugin for entry in entry_points(group="pytest11"))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-rf", "-p", "no:cacheprovider"),
            *(() if known else ("-p", plugin)),
            *("--pyargs", "vllm.testing.kv_connector"),
            *("--kv-connector", f"{wrong_connectors.__name__}:DenseWidth"),
            *(
                "--kv-connector-config",
                '{"kv_connector_extra_config": {"folder": "x"}}',
            ),
            "-k",
            "full-int8_per_token_head-cells or full-fp8_e5m2-cells or interface",
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "the connector does not conform" in done.stdout
    assert "of a state are none that this engine stored" in done.stdout
    assert re.search(r"\d+ failed, [1-9]\d* passed", done.stdout), done.stdout
