"""Prompts that another engine stored: fewer tokens to compute, the same outputs."""

from pathlib import Path
from typing import Any

import pytest

from tests.kv_transfer.engines import (
    assert_same,
    cached_of,
    engine,
    example,
    generate,
    random_prompts,
    run,
)
from vllm.testing.kv_connector.models import ModelFolders

LENGTHS = [5, 16, 17, 48, 70, 97]


def expected_hits(prompts: list[list[int]]) -> list[int]:
    return [(len(prompt) - 1) // 16 * 16 for prompt in prompts]


@pytest.mark.parametrize("layout", ["LBNHC", "LHBNC", "BLHNC", "BHLNC"])
def test_in_every_axis_order(
    folders: ModelFolders,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
) -> None:
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", layout)
    prompts = random_prompts(LENGTHS)
    how = {"attention_backend": "REFERENCE"}
    alone = run(folders["full"], prompts, **how)
    run(folders["full"], prompts, example(tmp_path), **how)
    loaded = run(folders["full"], prompts, example(tmp_path), **how)
    assert_same(loaded, alone)
    assert cached_of(loaded) == expected_hits(prompts)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 20, "max_num_seqs": 4},
        {"num_gpu_blocks_override": 9, "max_model_len": 112},
        {"enable_prefix_caching": False},
        {"block_size": 32},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["full", "window"])
def test_chunks_pressure_and_caching_change_nothing(
    folders: ModelFolders, tmp_path: Path, kind: str, settings: dict[str, Any]
) -> None:
    if kind == "window" and "num_gpu_blocks_override" in settings:
        settings = settings | {"num_gpu_blocks_override": 32}
    prompts = random_prompts(LENGTHS)
    alone = run(folders[kind], prompts, **settings)
    for _ in range(2):
        loaded = run(folders[kind], prompts, example(tmp_path), **settings)
        assert_same(loaded, alone)
    if kind == "full":
        size = settings.get("block_size", 16)
        assert cached_of(loaded) == [(len(p) - 1) // size * size for p in prompts]


def test_loads_begin_after_the_local_hit(folders: ModelFolders, tmp_path: Path) -> None:
    (prompt,) = random_prompts([90])
    alone = run(folders["full"], [prompt])
    run(folders["full"], [prompt], example(tmp_path))
    with engine(folders["full"], example(tmp_path)) as llm:
        (first,) = generate(llm, [[*prompt[:40], 3, 4, 5]])
        assert first.num_cached_tokens == 32
        again = generate(llm, [prompt])
        assert_same(again, alone)
        assert again[0].num_cached_tokens == 80


def damaged(path: Path, kind: str) -> None:
    blob = bytearray(path.read_bytes())
    if kind == "flipped":
        blob[-5] ^= 1
    elif kind == "truncated":
        del blob[len(blob) // 2 :]
    else:
        blob[:] = bytes(len(blob))
    path.write_bytes(blob)


@pytest.mark.parametrize("kind", ["flipped", "truncated", "zeroed"])
def test_damaged_blocks_are_computed_again(
    folders: ModelFolders, tmp_path: Path, kind: str
) -> None:
    prompts = random_prompts([70, 97])
    alone = run(folders["full"], prompts)
    run(folders["full"], prompts, example(tmp_path))
    files = sorted(tmp_path.glob("*/*/*.safetensors"))
    assert len(files) == 4 + 6
    for path in files[::2]:
        damaged(path, kind)
    loaded = run(folders["full"], prompts, example(tmp_path))
    assert_same(loaded, alone)
    assert sum(cached_of(loaded)) < 64 + 96
    healed = run(folders["full"], prompts, example(tmp_path))
    assert cached_of(healed) == [64, 96]
    assert_same(healed, alone)


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_block_that_vanishes_before_its_load(
    folders: ModelFolders,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
) -> None:
    prompts = random_prompts([70, 97])
    alone = run(folders["full"], prompts)
    run(folders["full"], prompts, example(tmp_path))
    settings = example(tmp_path, kv_load_failure_policy=policy)
    with engine(folders["full"], settings) as llm:
        core = llm.llm_engine.engine_core.engine_core
        worker = core.model_executor.driver_worker.model_runner.connector.connector
        read, lost = worker.store.read, []

        def vanished(key: str) -> Any:
            if not lost:
                lost.append(key)
                return None
            return read(key)

        monkeypatch.setattr(worker.store, "read", vanished)
        outputs = generate(llm, prompts)
        assert lost
        if policy == "recompute":
            assert_same(outputs, alone)
        else:
            reasons = [output.outputs[0].finish_reason for output in outputs]
            assert sorted(reasons) == ["error", "length"]


def test_engines_of_unlike_pages_or_models_do_not_mix(
    folders: ModelFolders, tmp_path: Path
) -> None:
    prompts = random_prompts([40])
    run(folders["full"], prompts, example(tmp_path), kv_cache_dtype="fp8_e4m3")
    with pytest.raises(ValueError, match=r"fp8_e4m3:cells.*fp8_e5m2:cells"):
        run(folders["full"], prompts, example(tmp_path), kv_cache_dtype="fp8_e5m2")
    other = run(folders["latent"], prompts, example(tmp_path))
    assert cached_of(other) == [0]


def test_roles_and_wishes(folders: ModelFolders, tmp_path: Path) -> None:
    prompts = random_prompts([40])
    consumer = example(tmp_path) | {"kv_role": "kv_consumer"}
    producer = example(tmp_path) | {"kv_role": "kv_producer"}
    run(folders["full"], prompts, consumer)
    assert not list(tmp_path.glob("*/*/*.safetensors"))
    for _ in range(2):
        assert cached_of(run(folders["full"], prompts, producer)) == [0]
    with engine(folders["full"], consumer) as llm:
        wish = {"kv_transfer_params": {"skip_load": True}}
        (output,) = generate(llm, prompts, extra_args=wish)
        assert output.num_cached_tokens == 0
        assert output.kv_transfer_params == {
            "num_loaded_tokens": 0,
            "num_saved_blocks": 0,
        }
    with engine(folders["full"], consumer) as llm:
        wish = {"kv_transfer_params": {"skip_save": True}}
        (output,) = generate(llm, prompts, extra_args=wish)
        assert output.kv_transfer_params["num_loaded_tokens"] == 32


def test_a_folder_is_required(folders: ModelFolders) -> None:
    with pytest.raises(ValueError, match="shared_storage_path"):
        run(
            folders["full"],
            [[2, 3]],
            {"kv_connector": "ExampleConnector", "kv_role": "kv_both"},
        )
