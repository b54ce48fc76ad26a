"""One server for all tests of the HTTP API."""

from collections.abc import Iterator

import httpx
import pytest
from openai import OpenAI

from tests.remote_server import RemoteServer

MODEL = "smollm2-135m"
KEY = "sk-test"


@pytest.fixture(scope="session")
def server() -> Iterator[RemoteServer]:
    args = [
        *("--max-model-len", "1024", "--kv-cache-memory-bytes", "256MiB"),
        *("--api-key", KEY, "--enable-prompt-tokens-details"),
        *("--enable-request-id-headers", "--trust-request-chat-template"),
    ]
    with RemoteServer(MODEL, args) as running:
        yield running


@pytest.fixture(scope="session")
def client(server: RemoteServer) -> OpenAI:
    return server.client(api_key=KEY)


@pytest.fixture(scope="session")
def http(server: RemoteServer) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=60) as session:
        yield session
