"""The options of the conformance kit: a pytest plugin, known to pytest by its entry
point. Imports nothing of the engine, because every pytest run imports it."""

from typing import Any

EXPECTATIONS = ("bytes", "blocks", "peer", "nothing")


def pytest_addoption(parser: Any) -> None:
    group = parser.getgroup("vllm.testing.kv_connector")
    group.addoption(
        "--kv-connector",
        default=None,
        metavar="MODULE:CLASS",
        help="the KV connector to check: a class, or a registered name",
    )
    group.addoption(
        "--kv-connector-config",
        default="{}",
        metavar="JSON",
        help="kv_transfer_config of the connector; {tmp} stands for a folder of each "
        "check, which the engines of that check share",
    )
    group.addoption(
        "--kv-connector-cases",
        default="pairs",
        choices=("few", "pairs", "all"),
        help="pages to check with: every format once, every pair of format, kind of "
        "layer and axis order (default), or all combinations",
    )
    group.addoption(
        "--kv-connector-expect",
        default="bytes",
        choices=EXPECTATIONS,
        help="what comes back: the bytes that were saved (default), blocks whose "
        "content is the connector's own, bytes of a peer that computed the prompt and "
        "told kv_transfer_params, or nothing",
    )
