"""An engine takes no weights for a cache that is too small, and gives memory back."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_model import save_tiny_llama
from vllm import LLM, SamplingParams
from vllm.model_executor.model_loader.base import BaseModelLoader


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    save_tiny_llama(path)
    return path


def test_a_cache_too_small_is_refused_before_weights_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: Any) -> Any:
        raise AssertionError("weights were read")

    monkeypatch.setattr(BaseModelLoader, "_progress", read)
    with pytest.raises(ValueError, match=r"max_model_len 256 .*4,096 bytes"):
        LLM(str(folder), dtype="float32", kv_cache_memory_bytes=4096)


@pytest.mark.parametrize("model_len", [-1, 64])
def test_a_length_that_fits_is_not_refused(folder: Path, model_len: int) -> None:
    # 2 layers x K and V x 2 heads x 16 elements x 4 bytes: 512 bytes per token.
    llm = LLM(
        str(folder),
        dtype="float32",
        kv_cache_memory_bytes=512 * 96,
        max_model_len=model_len,
    )
    assert 64 <= llm.model_config.max_model_len <= 96
    llm.shutdown()


def forget(llm: LLM) -> None:
    """The caller drops the last reference."""


@pytest.mark.parametrize("end", [LLM.shutdown, forget])
def test_weights_and_pages_are_freed_when_an_engine_ends(
    folder: Path, end: Callable[[LLM], None]
) -> None:
    llm = LLM(str(folder), dtype="float32", kv_cache_memory_bytes="16MiB")
    llm.generate("The quick", SamplingParams(max_tokens=4), use_tqdm=False)
    config = llm.llm_engine.vllm_config  # held, as callers do
    (found,) = llm.collective_rpc(
        lambda worker: [
            weakref.ref(held)
            for held in (
                worker.model_runner.model,
                *worker.model_runner.kv_caches.values(),
            )
        ]
    )
    gc.disable()  # cycles must not keep them
    try:
        end(llm)
        del llm
        assert [ref() for ref in found] == [None] * len(found)
    finally:
        gc.enable()
    assert config.model_config.max_model_len == 256
