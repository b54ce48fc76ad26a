"""The interpreter computes as a GPU does, and leaves no caches behind."""

from collections.abc import Iterator

import pytest

from tests.triton import interpreter

interpreter.install()


@pytest.fixture(scope="session", autouse=True)
def triton_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compiled kernels go to a folder of this session."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield
