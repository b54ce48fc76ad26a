"""Options of the server that would do harm if they were taken for their defaults."""

import pytest

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
