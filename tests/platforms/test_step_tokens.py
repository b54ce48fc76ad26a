"""How many tokens a step has by default, and what asks for more."""

from pathlib import Path

import pytest

from tests.tiny_model import save_tiny_llama
from vllm.config import SchedulerConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.platforms.cpu import CpuPlatform


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("llama")
    save_tiny_llama(path)
    return str(path)


def scheduler(folder: str, **asked: object) -> SchedulerConfig:
    args = EngineArgs(model=folder, kv_cache_memory_bytes="16MiB", **asked)
    return args.create_engine_config().scheduler_config


def test_the_platform_decides_and_the_user_decides_otherwise(folder: str) -> None:
    default = scheduler(folder)
    assert default.max_num_batched_tokens == current_platform.default_step_tokens
    assert default.max_num_seqs == SchedulerConfig.DEFAULT_MAX_NUM_SEQS
    assert scheduler(folder, max_num_batched_tokens=96).max_num_batched_tokens == 96


def test_every_request_has_room_for_a_token(folder: str) -> None:
    many = CpuPlatform.default_step_tokens + 1
    found = scheduler(folder, max_num_seqs=many)
    assert found.max_num_batched_tokens == found.max_num_seqs == many


def test_a_whole_prompt_fits_without_chunks(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(current_platform), "default_step_tokens", 128)
    found = scheduler(folder, enable_chunked_prefill=False)
    assert found.max_num_batched_tokens == 256  # the model's longest sequence
