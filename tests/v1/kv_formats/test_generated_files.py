"""The header, the docs page and the printed tables say what the layouts say."""

import shutil
import subprocess
import sys

import pytest

from tests.v1.kv_formats.helpers import named_formats
from vllm.v1.kv_formats import __main__ as command
from vllm.v1.kv_formats import all_formats, docs, header

_COMPILE = ("g++", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-fsyntax-only")


def test_header_has_not_drifted() -> None:
    assert header.PATH.read_text() == header.generate(), (
        "run python -m vllm.v1.kv_formats.header"
    )


def test_docs_have_not_drifted() -> None:
    assert docs.PATH.read_text() == docs.generate(), (
        "run python -m vllm.v1.kv_formats.docs"
    )


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_header_compiles_and_its_assertions_hold() -> None:
    source = '#include "kv_formats.h"\nint main() { return 0; }\n'
    done = subprocess.run(
        [*_COMPILE, "-I", str(header.PATH.parent), "-x", "c++", "-"],
        input=source,
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_every_format_is_in_the_generated_files() -> None:
    text, page = header.generate(), docs.generate()
    for fmt in named_formats():
        assert f"`{fmt.name}`" in page and f"## {fmt.name}" in page
        if not fmt.alias_of:
            assert f"struct {fmt.name} {{" in text or f"using {fmt.name} =" in text


def test_one_format_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["turboquant_4bit_nc", "--head-size", "128", "--kv-heads", "8"]
    assert command.main(arguments) == 0
    out = capsys.readouterr().out
    for part in ("k_norm", "130", "134 bytes", "1,072 bytes per token per layer"):
        assert part in out
    assert command.main([*arguments, "--head-size-v", "64", "--block-size", "32"]) == 0
    assert "one page (32 tokens)" in capsys.readouterr().out


def test_every_format_can_be_printed(capsys: pytest.CaptureFixture[str]) -> None:
    for fmt in (*all_formats(), *named_formats()):
        assert command.main([fmt.name, "--dtype", "float16"]) == 0
        assert "per token per layer" in capsys.readouterr().out


def test_errors_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["fp9"], ["nvfp4", "--head-size", "72"]):
        assert command.main(arguments) == 1
        assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--head-size", "7"], "an even number of at least 2"),
        (["--head-size", "0"], "an even number of at least 2"),
        (["--head-size", "-64"], "an even number of at least 2"),
        (["--head-size", "64.0"], "an even number of at least 2"),
        (["--head-size-v", "7"], "an even number of at least 0"),
        (["--head-size-v", "-2"], "an even number of at least 0"),
        (["--kv-heads", "0"], "a whole number of at least 1"),
        (["--kv-heads", "-8"], "a whole number of at least 1"),
        (["--kv-heads", "nan"], "a whole number of at least 1"),
        (["--block-size", "0"], "a whole number of at least 1"),
        (["--block-size", "-16"], "a whole number of at least 1"),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["fp8", "turboquant_4bit_nc", "nvfp4", "fp8_ds_mla"])
def test_sizes_that_no_model_has_are_refused_by_name(
    name: str, arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main([name, *arguments])
    assert ended.value.code == 2
    option, value = arguments
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"argument {option}: '{value}': expected {expected}" in last


def test_names_need_no_torch() -> None:
    code = "import sys, vllm.v1.kv_formats.mode; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
