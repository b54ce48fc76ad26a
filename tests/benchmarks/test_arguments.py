"""Benchmarks refuse numbers, names and addresses in one line, before anything slow."""

import argparse
from typing import Any

import pytest

from tests.tiny_model import tiny_model  # noqa: F401
from vllm.benchmarks.workload import Workload
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.cli.bench import _BENCHMARKS
from vllm.entrypoints.cli.main import main
from vllm.model_executor.model_loader.base import BaseModelLoader
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.import_utils import resolve
from vllm.utils.network_utils import get_open_port

# Numbers of the engine are checked with its configuration.
_OF_ENGINE = FlexibleArgumentParser()
EngineArgs.add_cli_args(_OF_ENGINE)


def numbers(benchmark: str) -> list[str]:
    """Options of a benchmark's own whose default is a number, or several."""
    parser = FlexibleArgumentParser()
    resolve(f"{_BENCHMARKS[benchmark][1]}:add_arguments")(parser)
    known = _OF_ENGINE._option_string_actions
    return [
        option
        for option, action in parser._option_string_actions.items()
        if option not in known and is_number(action)
    ]


def is_number(action: argparse.Action) -> bool:
    default = action.default[0] if isinstance(action.default, list) else action.default
    return isinstance(default, (int, float)) and not isinstance(default, bool)


def refusal(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The line with which argparse refuses these words."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize("benchmark", _BENCHMARKS)
def test_every_number_is_checked_when_it_is_parsed(
    benchmark: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = numbers(benchmark)
    assert options
    for option in options:
        for value in ("-5", "nan", "1.5", "-1GiB"):
            line = refusal(["bench", benchmark, option, value], capsys)
            start = f"vllm bench {benchmark}: error: argument {option}: {value!r}: "
            assert line.startswith(f"{start}expected a whole number of at least")
            assert line.endswith(f"(see vllm bench {benchmark} --help)")


@pytest.mark.parametrize(
    ("benchmark", "option"),
    [
        ("serve", "--num-prompts"),
        ("serve", "--concurrency"),
        ("latency", "--output-len"),
        ("latency", "--runs"),
        ("attention", "--contexts"),
        ("kv-core", "--repetitions"),
        ("step", "--batches"),
    ],
)
def test_counts_of_none_are_refused(
    benchmark: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refusal(["bench", benchmark, option, "0"], capsys)
    assert f"argument {option}: '0': expected a whole number of at least 1" in line


@pytest.mark.parametrize("benchmark", ["throughput", "kv-accuracy"])
def test_formats_that_nobody_knows_are_refused_when_parsed(
    benchmark: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refusal(["bench", benchmark, "--formats", "zz"], capsys)
    assert "argument --formats: invalid choice: 'zz' (choose from 'auto'" in line


@pytest.mark.parametrize("benchmark", ["latency", "throughput", "step"])
def test_requests_that_no_sequence_holds_are_refused_before_weights_are_read(
    tiny_model: str,  # noqa: F811
    benchmark: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def read(*_: Any) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr(BaseModelLoader, "_fill_planned", read)
    long = "--context" if benchmark == "step" else "--input-len"
    words = ["--model", tiny_model, "--max-model-len", "32", long, "90"]
    assert main(["bench", benchmark, *words]) == 1
    assert "are longer than --max-model-len 32" in capsys.readouterr().err


def test_a_shared_prefix_is_part_of_the_prompt() -> None:
    with pytest.raises(ValueError, match="--prefix-len 9 is above --input-len 8"):
        Workload(num_prompts=1, input_len=8, output_len=1, prefix_len=9)


@pytest.mark.parametrize("command", ["bench serve", "complete -q a", "chat -q a"])
def test_clients_name_the_url_where_nobody_answers(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"http://127.0.0.1:{get_open_port()}"
    assert main([*command.split(), "--url", url]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert url in line and "`vllm serve`" in line and "--url" in line
    assert main([*command.split(), "--url", "nonsense"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "--url 'nonsense': " in line and "expected HOST:PORT" in line


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["serve", "--max-model-len", "1k5"],
            "argument --max-model-len: '1k5': expected a whole number without a unit, "
            "for example 4096",
        ),
        (
            ["serve", "--gpu-memory-utilization", "half"],
            "argument --gpu-memory-utilization: 'half': expected a number",
        ),
        (
            ["kv-plan", "--memory", "-1GiB"],
            "argument --memory: '-1GiB' is not an amount of memory: expected a number "
            "above 0",
        ),
        (["kv-plan", "--memory", "-inf"], "argument --memory: '-inf' is not an amount"),
        (["serve", "--blok-size", "7"], "unrecognized arguments: --blok-size"),
        (["disagg-proxy"], "the following arguments are required: --prefill, --decode"),
    ],
)
def test_a_refusal_is_one_line_of_the_command_that_was_given(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refusal(words, capsys)
    assert line.startswith(f"vllm {words[0]}: error: {expected}")
    assert line.endswith(f"(see vllm {words[0]} --help)")
