"""What cannot be served is refused before an engine core is started, in one line."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiny_model import tiny_model  # noqa: F401
from vllm.entrypoints.cli.main import main
from vllm.v1.engine.core_launch import CoreProcess


@pytest.fixture
def refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Runs `vllm serve` with what is refused before a core is started; the line."""

    def started(*_: object) -> None:
        raise AssertionError("a core is started")

    monkeypatch.setattr(CoreProcess, "start", started)

    def run(*words: str) -> str:
        port = [] if "--port" in words else ["--port", "0"]
        assert main(["serve", *words, *port]) == 1
        last = capsys.readouterr().err.splitlines()[-1]
        assert last.startswith("vllm serve: error: ")
        return last

    return run


@pytest.fixture
def without_tokenizer(tiny_model: str, tmp_path: Path) -> Path:  # noqa: F811
    for file in Path(tiny_model).iterdir():
        if "token" not in file.name:
            shutil.copy(file, tmp_path)
    return tmp_path


def test_a_tokenizer_that_is_not_there_starts_no_core(
    tiny_model: str,  # noqa: F811
    refused: Callable[..., str],
) -> None:
    words = refused(tiny_model, "--tokenizer", "/nope")
    assert "tokenizer '/nope'" in words and "--tokenizer" in words


@pytest.mark.parametrize("damage", ["", '{"version": "1.0", "model": {'])
def test_a_model_without_a_whole_tokenizer_starts_no_core(
    without_tokenizer: Path, refused: Callable[..., str], damage: str
) -> None:
    if damage:
        (without_tokenizer / "tokenizer.json").write_text(damage)
    words = refused(str(without_tokenizer))
    assert str(without_tokenizer) in words and "--tokenizer" in words


def test_a_model_without_a_tokenizer_serves_token_ids(
    without_tokenizer: Path, refused: Callable[..., str]
) -> None:
    with pytest.raises(AssertionError, match="a core is started"):
        main(["serve", str(without_tokenizer), "--skip-tokenizer-init", "--port", "0"])


def test_a_template_that_does_not_parse_starts_no_core(
    tiny_model: str,  # noqa: F811
    refused: Callable[..., str],
) -> None:
    words = refused(tiny_model, "--chat-template", "{{ foo(")
    assert "'{{ foo('" in words and "line 1" in words and "--chat-template" in words


@pytest.mark.parametrize("names", [[""], ["a", ""], [" "]])
def test_an_empty_name_of_a_model_is_refused(
    tiny_model: str,  # noqa: F811
    refused: Callable[..., str],
    names: list[str],
) -> None:
    words = refused(tiny_model, "--served-model-name", *names)
    assert repr(names) in words and "--served-model-name" in words


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--ssl-keyfile", "/nope"], "--ssl-keyfile '/nope' has no certificate"),
        (["--ssl-certfile", "/nope"], "--ssl-certfile '/nope' .*No such file"),
        (["--ssl-certfile", __file__], "--ssl-certfile .*expected PEM files"),
    ],
)
def test_files_that_no_tls_is_served_with_start_no_core(
    tiny_model: str,  # noqa: F811
    refused: Callable[..., str],
    given: list[str],
    words: str,
) -> None:
    assert re.search(words, refused(tiny_model, *given))


@pytest.mark.parametrize("command", ["serve", "disagg-proxy"])
@pytest.mark.parametrize("option", ["--host=", "--uvicorn-log-level=LOUD"])
def test_options_of_listening_are_checked_by_the_parser(
    command: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, option])
    assert ended.value.code == 2
    assert f"argument {option.partition('=')[0]}:" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["5", '"*"', "[1]", "{}"])
@pytest.mark.parametrize("kind", ["origins", "methods", "headers"])
def test_what_cors_allows_is_a_list_of_texts(
    kind: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["serve", f"--allowed-{kind}", value])
    assert "expected a JSON list of texts" in capsys.readouterr().err
