"""Blocks in host memory and on disk: hits, restarts, damage, and pressure."""

import time
from pathlib import Path
from typing import Any

import pytest

from tests.kv_transfer.engines import (
    assert_same,
    cached_of,
    engine,
    generate,
    offloading,
    random_prompts,
    run,
    tokens_of,
)
from vllm import LLM
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.slots import SlotCache
from vllm.engine.arg_utils import EngineArgs
from vllm.testing.kv_connector.models import ModelFolders

LENGTHS = [5, 16, 17, 48, 70, 97]


def scheduler_of(llm: LLM) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler


def end_transfers(llm: LLM) -> None:
    core = llm.llm_engine.engine_core.engine_core
    deadline = time.monotonic() + 20
    while core.has_work():
        assert time.monotonic() < deadline, "transfers do not end"
        core.step()
        time.sleep(0.0005)


def forget_prefixes(llm: LLM) -> None:
    """Empties the engine's own prefix cache, not the connector's."""
    end_transfers(llm)
    assert llm.reset_prefix_cache()


def num_free(llm: LLM) -> int:
    return scheduler_of(llm).kv_cache_manager.block_pool.get_num_free_blocks()


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("kind", ["full", "latent"])
def test_prompts_come_back_from_memory(
    folders: ModelFolders, kind: str, caching: bool
) -> None:
    prompts, how = random_prompts(LENGTHS), {"enable_prefix_caching": caching}
    alone = run(folders[kind], prompts, **how)
    with engine(folders[kind], offloading(), **how) as llm:
        free = num_free(llm)
        assert_same(generate(llm, prompts), alone)
        forget_prefixes(llm)
        again = generate(llm, prompts)
        assert_same(again, alone)
        assert cached_of(again) == [(n - 1) // 16 * 16 for n in LENGTHS]
        end_transfers(llm)
        assert num_free(llm) == free


def test_generated_tokens_come_back_too(folders: ModelFolders) -> None:
    (prompt,) = random_prompts([20])
    with engine(folders["full"], offloading()) as llm:
        tokens = tokens_of(generate(llm, [prompt], 40))[0]
        forget_prefixes(llm)
        (output,) = generate(llm, [prompt + tokens])
        assert output.num_cached_tokens == 48


def test_the_least_recently_used_blocks_go_first(folders: ModelFolders) -> None:
    old, new = random_prompts([70, 70])
    with engine(folders["full"], offloading(num_cpu_blocks=8)) as llm:
        # Saves go on after an answer; a block that is being saved cannot make room.
        for prompt in (old, new, random_prompts([40], seed=5)[0]):
            generate(llm, [prompt], 1)
            end_transfers(llm)
        forget_prefixes(llm)
        assert cached_of(generate(llm, [new], 1)) == [64]
        forget_prefixes(llm)
        assert cached_of(generate(llm, [old], 1))[0] < 64


def test_a_restart_finds_blocks_on_disk(folders: ModelFolders, tmp_path: Path) -> None:
    prompts = random_prompts([200, 210, 220])
    disk = offloading(disk_path=str(tmp_path))
    alone = run(folders["full"], prompts)
    assert_same(run(folders["full"], prompts, disk), alone)
    restarted = run(folders["full"], prompts, disk)
    assert_same(restarted, alone)
    assert cached_of(restarted) == [192, 208, 208]


@pytest.mark.parametrize("how", ["flip", "cut", "zero"])
def test_damage_on_disk_is_a_miss(
    folders: ModelFolders, tmp_path: Path, how: str
) -> None:
    prompts = random_prompts([97, 70])
    disk = offloading(disk_path=str(tmp_path))
    alone = run(folders["full"], prompts)
    run(folders["full"], prompts, disk)
    for index, path in enumerate(sorted(tmp_path.glob("*/*/*.safetensors"))):
        blob = bytearray(path.read_bytes())
        if index % 3:
            continue
        if how == "flip":
            blob[-9] ^= 4
        elif how == "cut":
            del blob[-100:]
        else:
            blob[:] = bytes(len(blob))
        path.write_bytes(blob)
    with engine(folders["full"], disk) as llm:
        connector = scheduler_of(llm).connector
        worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker
        store = worker.model_runner.connector.connector.worker.store
        drops: list[Path] = []
        drop = store._drop_damaged
        store._drop_damaged = lambda path, why: (drops.append(path), drop(path, why))
        outputs = generate(llm, prompts)
        assert_same(outputs, alone)
        assert drops and sum(cached_of(outputs)) < 64 + 96
        end_transfers(llm)
        assert not connector.has_pending_block_frees()
    assert cached_of(run(folders["full"], prompts, disk)) == [96, 64]


def test_the_disk_tier_keeps_within_its_limit(
    folders: ModelFolders, tmp_path: Path
) -> None:
    disk = offloading(disk_path=str(tmp_path), disk_bytes_to_use=10 * 40_000)
    for seed in range(4):
        run(folders["full"], random_prompts([97], seed=seed), disk)
    files = list(tmp_path.glob("*/*/*.safetensors"))
    assert 0 < sum(f.stat().st_size for f in files) <= 10 * 40_000


def test_unlike_pages_do_not_share_a_disk_tier(
    folders: ModelFolders, tmp_path: Path
) -> None:
    disk = offloading(disk_path=str(tmp_path))
    run(folders["full"], [[2, 3]], disk, kv_cache_dtype="fp8_e4m3")
    with pytest.raises(ValueError, match=r"fp8_e4m3:cells.*fp8_e5m2:cells"):
        run(folders["full"], [[2, 3]], disk, kv_cache_dtype="fp8_e5m2")


# --- settings -------------------------------------------------------------------------


def test_the_flag_sets_up_the_connector(folders: ModelFolders) -> None:
    folder = folders["full"]
    args = EngineArgs(model=folder, kv_offloading_size=0.5)
    transfer = args.create_engine_config().kv_transfer_config
    assert transfer.kv_connector == "OffloadingConnector"
    assert transfer.kv_connector_extra_config == {"cpu_bytes_to_use": 1 << 29}
    for settings, message in (
        ({"kv_offloading_backend": "lmcache"}, "lmcache is not built in"),
        ({"kv_transfer_config": offloading()}, "MultiConnector"),
        ({"kv_offloading_size": -1.0}, "above 0"),
    ):
        with pytest.raises(ValueError, match=message):
            EngineArgs(
                **({"model": folder, "kv_offloading_size": 1.0} | settings)
            ).create_engine_config()


@pytest.mark.parametrize(
    "extra, message",
    [
        ({"cpu_bytes_to_use": None}, "needs a size"),
        ({"cpu_bytes_to_use": 100}, "room for 0 blocks"),
        ({"cpu_bytes_to_use": "9999GiB"}, "lower --kv-offloading-size"),
    ],
)
def test_sizes_that_cannot_be(
    folders: ModelFolders, extra: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run(folders["full"], [[2, 3]], offloading(**extra))


def test_blocks_in_use_stay() -> None:
    slots = SlotCache(2)
    assert slots.take("a") == 0 and slots.take("b") == 1
    assert slots.take("c") is None  # both are on their way
    slots.fill("a")
    assert slots.is_ready("a") and not slots.is_ready("b") and "b" in slots
    assert slots.pin("a") == 0 and slots.take("c") is None
    with pytest.raises(KeyError):
        slots.pin("b")
    slots.unpin("a")
    assert slots.take("c", keep={"a"}) is None
    assert slots.take("c") == 0 and "a" not in slots
    assert slots.take_evicted() == ["a"] and slots.clear() is None
    slots.drop("c")
    slots.fill("b")
    assert slots.clear() == ["b"] and len(slots) == 0
