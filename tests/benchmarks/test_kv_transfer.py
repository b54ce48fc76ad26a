"""`vllm bench kv-transfer` reports every figure, and that the tokens were equal."""

import json

import pytest

from vllm.entrypoints.cli.main import main
from vllm.testing.kv_connector.models import ModelFolders


def test_figures_come_with_equal_tokens(
    tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ModelFolders(tmp_path_factory.mktemp("models"))["full"]
    command = ["bench", "kv-transfer", "--json", "--input-len", "100", "--runs", "2"]
    settings = ["--model", model, "--skip-tokenizer-init", "--dtype", "float32"]
    status = main([*command, *settings, "--kv-cache-memory-bytes", "8MiB"])
    figures = json.loads(capsys.readouterr().out)
    assert not status and figures["equal_tokens"] is True
    assert figures["block_bytes"] % figures["block_size"] == 0
    assert figures["copied_bytes"] % figures["block_bytes"] == 0
    assert set(figures["bytes_per_second"]) == {
        *("memcpy", "save", "load", "disk write", "disk read")
    }
    assert set(figures["first_token_seconds"]) == {"computed", "memory", "disk"}
    assert all(speed > 0 for speed in figures["bytes_per_second"].values())
