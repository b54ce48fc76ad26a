"""Amounts of memory that are none are refused by name, before anything slow begins."""

import math
from typing import Any

import pytest

from tests.tiny_model import tiny_model  # noqa: F401
from vllm import LLM
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.cli.main import main
from vllm.model_executor.model_loader.base import BaseModelLoader
from vllm.utils.mem_utils import parse_size

NO_NUMBERS = [math.nan, math.inf, -math.inf, -1, 0]
CONNECTOR = "OffloadingConnector"


def offloading(**extra: Any) -> dict[str, Any]:
    return {
        "kv_connector": CONNECTOR,
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


@pytest.mark.parametrize(
    "name",
    [
        "block_size",
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "kv_offloading_size",
        "mamba_block_size",
        "max_num_batched_tokens",
        "max_num_seqs",
        "num_gpu_blocks_override",
    ],
)
def test_a_size_that_is_none_is_named_with_what_is_expected(
    tiny_model: str,  # noqa: F811
    name: str,
) -> None:
    option = f"--{name.replace('_', '-')}"
    for value in [*NO_NUMBERS, True, False]:
        with pytest.raises(ValueError) as caught:
            EngineArgs(model=tiny_model, **{name: value}).create_engine_config()
        words = str(caught.value)
        assert (name in words or option in words) and str(value) in words, words
        assert "expected" in words and "\n" not in words, words


@pytest.mark.parametrize(
    "text", ["nan", "inf", "-4GiB", "0", "0.5", "", "4 PiB", "1e9"]
)
@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("serve", "--kv-cache-memory-bytes"),
        ("kv-plan", "--kv-cache-memory-bytes"),
        ("kv-plan", "--memory"),
    ],
)
def test_the_command_line_says_which_option(
    command: str, option: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, f"{option}={text}"])
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"argument {option}: {text!r} is not an amount of memory: expected" in last


def test_what_is_no_size_is_told_every_unit() -> None:
    with pytest.raises(ValueError) as caught:
        parse_size("1 parsec")
    for unit in ("KiB", "MiB", "GiB", "TiB", "KB", "MB", "GB", "TB"):
        assert f"{unit}" in str(caught.value) and parse_size(f"1{unit}") > 1


@pytest.mark.parametrize("name", ["max_num_batched_tokens", "max_num_seqs"])
@pytest.mark.parametrize("value", [*NO_NUMBERS, True])
def test_what_nobody_gave_is_not_blamed(
    tiny_model: str,  # noqa: F811
    name: str,
    value: Any,
) -> None:
    other = {"max_num_seqs", "max_num_batched_tokens"} - {name}
    with pytest.raises(ValueError) as caught:
        EngineArgs(model=tiny_model, **{name: value}).create_engine_config()
    assert name in str(caught.value) and not any(o in str(caught.value) for o in other)


@pytest.mark.parametrize(
    ("given", "num_bytes"),
    [
        ("2TiB", 2 << 40),
        ("3 TB", 3 * 10**12),
        ("1", 1),
        ("1.5KiB", 1536),
        ("2g", 2 * 10**9),
        (" 3 MiB ", 3 << 20),
        (7, 7),
        (2.0e9, 2 * 10**9),
    ],
)
def test_what_is_a_size(given: Any, num_bytes: int) -> None:
    assert parse_size(given) == num_bytes


@pytest.mark.parametrize("space", ["nan", "inf", "-1"])
def test_a_variable_is_no_exception(
    tiny_model: str,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    space: str,
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", space)
    with pytest.raises(ValueError, match=f"VLLM_CPU_KVCACHE_SPACE={space}.*expected"):
        EngineArgs(model=tiny_model).create_engine_config()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kv_cache_memory_bytes": 1}, "kv_cache_memory_bytes"),
        ({"kv_cache_memory_bytes": 1 << 60}, "lower --kv-cache-memory-bytes"),
        (
            {"num_gpu_blocks_override": 2},
            "--num-gpu-blocks-override 2 is too few: .* needs 16 blocks.*fits is 32",
        ),
        (
            {"kv_cache_memory_bytes": 100, "max_model_len": -1},
            "does not hold one token .*kv_cache_memory_bytes",
        ),
        ({"kv_offloading_size": 1e-12}, "room for 0 blocks .*--kv-offloading-size"),
        ({"kv_offloading_size": 1e12}, "lower --kv-offloading-size"),
        *(
            (
                {"kv_transfer_config": offloading(cpu_bytes_to_use=value)},
                f"cpu_bytes_to_use: {value!r} is not an amount of memory: expected",
            )
            for value in (math.nan, -1, True, "much")
        ),
        (
            {"kv_transfer_config": offloading(num_cpu_blocks=1)},
            "num_cpu_blocks=1: expected a whole number of at least 2",
        ),
        (
            {
                "kv_transfer_config": offloading(
                    cpu_bytes_to_use="1MiB", disk_bytes_to_use="-1"
                )
            },
            "disk_bytes_to_use: '-1' is not an amount",
        ),
        (
            {
                "kv_transfer_config": {
                    "kv_connector": "MultiConnector",
                    "kv_role": "kv_both",
                    "kv_connector_extra_config": {
                        "connectors": [offloading(cpu_bytes_to_use=0)]
                    },
                }
            },
            "cpu_bytes_to_use: 0 is not an amount",
        ),
    ],
)
def test_what_does_not_fit_is_said_before_weights_are_read(
    tiny_model: str,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    words: str,
) -> None:
    def read(*_: Any) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr(BaseModelLoader, "_fill_planned", read)
    with pytest.raises(ValueError, match=words) as caught:
        LLM(tiny_model, **{"kv_cache_memory_bytes": "8MiB", **settings})
    assert "\n" not in str(caught.value)
