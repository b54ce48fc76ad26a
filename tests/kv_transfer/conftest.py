"""Tiny models of every kind of KV cache group."""

import pytest

from vllm.testing.kv_connector.models import ModelFolders


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> ModelFolders:
    return ModelFolders(tmp_path_factory.mktemp("models"))
