"""Options of the server that would do harm if they were taken for their defaults."""

import pytest

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.cli.main import main
from vllm.entrypoints.openai.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser


@pytest.mark.parametrize(
    "arguments",
    [["--api-key", ""], ["--api-key", "key", " "], ["--model", ""], [""]],
    ids=str,
)
def test_an_unset_variable_is_not_a_key_or_a_model(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    parser = make_arg_parser(FlexibleArgumentParser())
    with pytest.raises(SystemExit):
        parser.parse_args(arguments)
    assert "leave the option out for its default" in capsys.readouterr().err


def test_keys_are_taken_as_they_are() -> None:
    parser = make_arg_parser(FlexibleArgumentParser())
    assert parser.parse_args(["--api-key", "a", "b "]).api_key == ["a", "b "]


def test_help_names_the_model_that_is_served_and_defaults_that_exist(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert not ended.value.code
    assert f"model to serve; {AsyncEngineArgs.model} if none is named" in said
    assert "(default: auto)" in said
    assert "default: None" not in said
