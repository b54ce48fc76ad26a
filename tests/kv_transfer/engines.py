"""Whole engines with a connector: those of the conformance kit, and our settings."""

from pathlib import Path
from typing import Any

from vllm.outputs import RequestOutput
from vllm.testing.kv_connector.real_engine import (
    LOGPROB_TOLERANCE,
    NUM_TOKENS,
    cached_of,
    difference,
    engine,
    generate,
    random_prompts,
    run,
    tokens_of,
)

__all__ = [
    "LOGPROB_TOLERANCE",
    "NUM_TOKENS",
    "assert_same",
    "cached_of",
    "engine",
    "example",
    "generate",
    "offloading",
    "random_prompts",
    "run",
    "tokens_of",
]


def example(folder: Path, **more: Any) -> dict[str, Any]:
    """`kv_transfer_config` of an ExampleConnector over a folder."""
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
        **more,
    }


def offloading(**extra: Any) -> dict[str, Any]:
    """`kv_transfer_config` of an OffloadingConnector."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 22, **extra},
    }


def assert_same(found: list[RequestOutput], expected: list[RequestOutput]) -> None:
    """Equal tokens, and logprobs that differ by rounding only."""
    different = difference(found, expected)
    assert not different, different
