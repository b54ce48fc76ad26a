"""Connectors of connectors, connectors of others, and the one for benchmarks."""

from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from tests.kv_transfer import block_bytes_connector
from tests.kv_transfer.engines import (
    assert_same,
    cached_of,
    engine,
    example,
    generate,
    offloading,
    random_prompts,
    run,
)
from tests.kv_transfer.test_offloading_connector import end_transfers, forget_prefixes
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.testing.kv_connector.cases import Case, few_cases
from vllm.testing.kv_connector.models import ModelFolders
from vllm.testing.kv_connector.real_engine import check_engine
from vllm.testing.kv_connector.scenario import check_bytes
from vllm.testing.kv_connector.subjects import subject_of
from vllm.v1.metrics.prometheus import PrometheusStatLogger

LENGTHS = [5, 33, 70, 97]
HITS = [0, 32, 64, 96]


def multi(*children: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": list(children)},
    }


def third_party(**more: Any) -> dict[str, Any]:
    return {
        "kv_connector": "BlockBytesConnector",
        "kv_connector_module_path": "tests.kv_transfer.block_bytes_connector",
        "kv_role": "kv_both",
        **more,
    }


# --- others' ------------------------------------------------------------------------


THIRD_PARTY = subject_of(f"{block_bytes_connector.__name__}:BlockBytesConnector")


@pytest.mark.parametrize(
    "case", [c for c in few_cases() if c.kind != "states"], ids=lambda case: case.name
)
def test_raw_block_bytes_round_trip_in_every_format(case: Case, tmp_path: Path) -> None:
    block_bytes_connector.STORE.clear()
    assert not THIRD_PARTY.serves_groups
    report = check_bytes(case, THIRD_PARTY, tmp_path)
    assert not report, f"\n{report}"


@pytest.mark.parametrize("name", ["auto", "nvfp4", "turboquant_3bit_nc"])
def test_raw_block_bytes_change_no_token(
    folders: ModelFolders, tmp_path: Path, name: str
) -> None:
    block_bytes_connector.STORE.clear()
    settings = {"kv_cache_dtype": name}
    report = check_engine(folders["full"], settings, THIRD_PARTY, tmp_path)
    assert not report, f"\n{report}"


def test_one_group_connectors_name_the_flag(folders: ModelFolders) -> None:
    with pytest.raises(ValueError, match="--disable-hybrid-kv-cache-manager"):
        run(folders["window"], [[2, 3]], third_party())
    prompts = random_prompts(LENGTHS)
    how = {"disable_hybrid_kv_cache_manager": True}
    block_bytes_connector.STORE.clear()
    alone = run(folders["window"], prompts, **how)
    for _ in range(2):
        loaded = run(folders["window"], prompts, third_party(), **how)
        assert_same(loaded, alone)
    assert cached_of(loaded) == HITS


# --- several --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["full", "window"])
@pytest.mark.parametrize("first", ["memory", "disk"])
def test_all_children_save_and_the_first_with_a_hit_loads(
    folders: ModelFolders, tmp_path: Path, kind: str, first: str
) -> None:
    prompts = random_prompts(LENGTHS)
    children = [offloading(), example(tmp_path)]
    both = multi(*(children if first == "memory" else children[::-1]))
    alone = run(folders[kind], prompts)
    with engine(folders[kind], both) as llm:
        assert_same(generate(llm, prompts), alone)
        forget_prefixes(llm)
        again = generate(llm, prompts)
        assert_same(again, alone)
        assert sum(cached_of(again)) > 0
        end_transfers(llm)
    # A new engine has nothing in memory: the disk's child has it.
    loaded = run(folders[kind], prompts, both)
    assert_same(loaded, alone)
    assert sum(cached_of(loaded)) > 0
    # What the second child did not load itself, it stored once it was there.
    assert_same(run(folders[kind], prompts, example(tmp_path)), alone)


def test_children_are_named_and_must_be_known(tmp_path: Path) -> None:
    support = KVConnectorFactory.supports_hma_config

    def config(*children: dict[str, Any]) -> KVTransferConfig:
        return KVTransferConfig(**multi(*children))

    assert support(config(example(tmp_path), offloading()))
    assert not support(config(example(tmp_path), third_party()))
    with pytest.raises(ValueError, match="needs children"):
        support(config())
    with pytest.raises(ValueError, match="MooncakeConnector is not built in"):
        support(config({"kv_connector": "MooncakeConnector"}))


def test_numbers_of_children_reach_prometheus(
    folders: ModelFolders, tmp_path: Path
) -> None:
    both = multi(example(tmp_path), offloading())
    with engine(folders["full"], both) as llm:
        core = llm.llm_engine.engine_core.engine_core
        registry = CollectorRegistry()
        stat_logger = PrometheusStatLogger(core.vllm_config, 0, registry)
        record = core.scheduler.make_stats

        def make_stats(*args: Any, **kwargs: Any) -> Any:
            stats = record(*args, **kwargs)
            if stats is not None:
                stat_logger.record(stats, None)
            return stats

        core.scheduler.make_stats = make_stats
        core.scheduler.log_stats = True
        generate(llm, random_prompts([70]))
        end_transfers(llm)
        for child in ("0:ExampleConnector", "1:OffloadingConnector"):
            labels = {"model_name": folders["full"], "engine": "0", "connector": child}
            saved = "vllm:kv_connector_saved_blocks_total"
            assert registry.get_sample_value(saved, labels) == 4


# --- benchmarks -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["full", "window", "latent"])
def test_decoding_alone_starts_at_the_last_token(
    folders: ModelFolders, kind: str
) -> None:
    bench = {"kv_connector": "DecodeBenchConnector", "kv_role": "kv_both"}
    with engine(folders[kind], bench) as llm:
        outputs = generate(llm, random_prompts(LENGTHS))
        assert cached_of(outputs) == [n - 1 for n in LENGTHS]
        assert all(len(output.outputs[0].token_ids) == 6 for output in outputs)
    bench["kv_connector_extra_config"] = {"fill_byte": 300}  # type: ignore[assignment]
    with pytest.raises(ValueError, match="fill_byte 300"):
        run(folders[kind], [[2, 3]], bench)
