"""The table of `vllm kv-plan --all` says which layers store another format, and why."""

from collections.abc import Callable

import pytest

from tests.tiny_model import tiny_model  # noqa: F401
from vllm.entrypoints.cli.main import main

Table = Callable[..., dict[str, str]]


@pytest.fixture
def table(tiny_model: str, capsys: pytest.CaptureFixture[str]) -> Table:  # noqa: F811
    def run(*options: str) -> dict[str, str]:
        """Lines by their first word; behind them, the rest of the text."""
        words = ["kv-plan", tiny_model, "--all", "--dtype", "bfloat16", *options]
        assert main(words) == 0
        rows, _, rest = capsys.readouterr().out.partition("\n\n")
        lines = {line.split()[0]: line for line in rows.splitlines()}
        return lines | {"": rest}

    return run


def test_layers_that_a_format_leaves_out_are_named_with_theirs(table: Table) -> None:
    lines = table()
    assert lines["format"].endswith("layers in another format")
    # Both ends of a model of two layers are all of it.
    assert lines["turboquant_4bit_nc"].endswith("x  0-1 in bfloat16")
    for name in ("auto", "bfloat16", "fp8", "int8_per_token_head", "nvfp4"):
        # However its backend arranges a format, that is no other one.
        assert lines[name].endswith("x"), lines[name]
    assert "--kv-cache-dtype-skip-layers" in lines[""]


def test_layers_that_the_user_leaves_out_are_named(table: Table) -> None:
    lines = table("--kv-cache-dtype-skip-layers", "1")
    assert lines["fp8"].endswith("x  1 in bfloat16")
    assert lines["bfloat16"].endswith("x")


def test_where_no_layer_differs_nothing_is_explained(table: Table) -> None:
    lines = table("--kv-cache-dtype-skip-layers", "none")
    assert lines["format"].endswith("concurrency") and lines[""] == ""
    assert lines["turboquant_4bit_nc"].endswith("x")
