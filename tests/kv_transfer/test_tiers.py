"""What an offloading connector tells: events by the engine's hashes, hits by source."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from prometheus_client import CollectorRegistry

from tests.kv_transfer.engines import (
    cached_of,
    engine,
    generate,
    offloading,
    random_prompts,
    run,
)
from tests.kv_transfer.test_offloading_connector import (
    end_transfers,
    forget_prefixes,
    scheduler_of,
)
from vllm import LLM
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.testing.kv_connector.models import ModelFolders
from vllm.v1.metrics.prometheus import PrometheusStatLogger

EVENTS = {"kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"}}


def listen(llm: LLM) -> list[Any]:
    """Events of the engine from now on."""
    heard: list[Any] = []
    publisher = scheduler_of(llm).kv_event_publisher
    publisher.publish = lambda batch: heard.extend(batch.events)
    return heard


def held(events: list[Any], medium: str) -> dict[tuple[int, bytes], Any]:
    """What a router knows of a tier after these events."""
    known: dict[tuple[int, bytes], Any] = {}
    for event in events:
        if getattr(event, "medium", None) != medium:
            continue
        for name in event.block_hashes:
            if isinstance(event, BlockStored):
                known[event.group_idx, name] = event
            else:
                assert isinstance(event, BlockRemoved)
                del known[event.group_idx, name]  # it was told of it
    return known


@pytest.mark.parametrize("kind", ["full", "window"])
def test_a_router_hears_of_the_same_blocks_in_every_tier(
    folders: ModelFolders, tmp_path: Path, kind: str
) -> None:
    disk = offloading(disk_path=str(tmp_path))
    with engine(folders[kind], disk, **EVENTS) as llm:
        heard = listen(llm)
        generate(llm, random_prompts([70, 97, 33]))
        end_transfers(llm)
        on_device, in_memory = held(heard, "GPU"), held(heard, "CPU")
        assert in_memory and in_memory.keys() <= on_device.keys()
        assert held(heard, "DISK").keys() == in_memory.keys()
        for place, event in in_memory.items():
            (same,) = [
                e
                for e in heard
                if isinstance(e, BlockStored)
                and e.medium == "GPU"
                and e.group_idx == place[0]
                and place[1] in e.block_hashes
            ]
            at = same.block_hashes.index(place[1]) * same.block_size
            assert event.token_ids == same.token_ids[at : at + same.block_size]
            assert event.block_size == same.block_size
        scheduler = scheduler_of(llm).connector.scheduler
        assert len(in_memory) == len(scheduler.slots) == len(scheduler.disk)
        assert llm.llm_engine.engine_core.engine_core.scheduler.reset_connector_cache()
        generate(llm, random_prompts([3]))  # whose step takes the events along
        assert not held(heard, "CPU") and not held(heard, "DISK")


def test_blocks_that_go_are_told_of(folders: ModelFolders, tmp_path: Path) -> None:
    disk = offloading(
        num_cpu_blocks=8, disk_path=str(tmp_path), disk_bytes_to_use=12 * 40_000
    )
    with engine(folders["full"], disk, **EVENTS) as llm:
        heard = listen(llm)
        for seed in range(4):
            generate(llm, random_prompts([97], seed=seed))
            end_transfers(llm)
        scheduler = scheduler_of(llm).connector.scheduler
        assert len(held(heard, "CPU")) == len(scheduler.slots) <= 8
        assert len(held(heard, "DISK")) == len(scheduler.disk)
        assert any(isinstance(e, BlockRemoved) and e.medium == "CPU" for e in heard)
        assert any(isinstance(e, BlockRemoved) and e.medium == "DISK" for e in heard)


def test_blocks_of_an_earlier_engine_are_told_of_when_they_are_used(
    folders: ModelFolders, tmp_path: Path
) -> None:
    (prompt,) = random_prompts([97])
    disk = offloading(disk_path=str(tmp_path))
    run(folders["full"], [prompt], disk)
    with engine(folders["full"], disk, **EVENTS) as llm:
        heard = listen(llm)
        assert cached_of(generate(llm, [prompt])) == [96]
        end_transfers(llm)
        events = [e for e in heard if isinstance(e, BlockStored) and e.medium == "CPU"]
        assert [e.token_ids for e in events][:6] == [
            prompt[at : at + 16] for at in range(0, 96, 16)
        ]
        assert {name for e in events for name in e.block_hashes} <= {
            name for _, name in held(heard, "GPU")
        }


def test_no_event_is_kept_where_nobody_asked(folders: ModelFolders) -> None:
    with engine(folders["full"], offloading()) as llm:
        generate(llm, random_prompts([70]))
        end_transfers(llm)
        connector = scheduler_of(llm).connector
        assert list(connector.take_events()) == []
        assert not connector.scheduler.events._stored


def test_hits_are_counted_by_where_they_were(
    folders: ModelFolders, tmp_path: Path
) -> None:
    long, short = random_prompts([97, 70])
    disk = offloading(disk_path=str(tmp_path))
    run(folders["full"], [long], disk)
    with engine(folders["full"], disk) as llm:
        core = llm.llm_engine.engine_core.engine_core
        registry = CollectorRegistry()
        logger = PrometheusStatLogger(core.vllm_config, 0, registry)
        make_stats = core.scheduler.make_stats

        def recorded(*args: Any, **kwargs: Any) -> Any:
            stats = make_stats(*args, **kwargs)
            logger.record(stats, None)
            return stats

        core.scheduler.make_stats, core.scheduler.log_stats = recorded, True
        generate(llm, [short, long])
        forget_prefixes(llm)
        generate(llm, [short])
        end_transfers(llm)
        found = {
            source: registry.get_sample_value(
                "vllm:external_prefix_cache_hits_by_source_total",
                {"model_name": folders["full"], "engine": "0", "source": source},
            )
            for source in ("disk", "memory")
        }
        assert found == {"disk": 96, "memory": 64}
        total = registry.get_sample_value(
            "vllm:external_prefix_cache_hits_total",
            {"model_name": folders["full"], "engine": "0"},
        )
        assert total == 160


def test_the_policy_is_a_setting(folders: ModelFolders) -> None:
    used, scan = random_prompts([70, 97])
    kept = {}
    for policy in ("lru", "arc"):
        settings = offloading(num_cpu_blocks=6, eviction_policy=policy)
        with engine(folders["full"], settings) as llm:
            for _ in range(3):
                generate(llm, [used], 1)
                forget_prefixes(llm)
            for seed in range(3):  # each prompt once, and never again
                generate(llm, random_prompts([97], seed=seed + 10), 1)
                forget_prefixes(llm)
            kept[policy] = cached_of(generate(llm, [used], 1))[0]
    assert kept["lru"] == 0 < kept["arc"]
    with pytest.raises(ValueError, match="unknown eviction_policy 'fifo'"):
        run(folders["full"], [scan], offloading(eviction_policy="fifo"))


def test_a_subscriber_gets_them_in_three_frames(
    folders: ModelFolders, tmp_path: Path
) -> None:
    endpoint = f"ipc://{tmp_path}/events"
    settings = {"enable_kv_cache_events": True, "endpoint": endpoint, "topic": "kv@"}
    with (
        engine(folders["full"], offloading(), kv_events_config=settings) as llm,
        zmq.Context.instance().socket(zmq.SUB) as socket,
    ):
        socket.setsockopt_string(zmq.SUBSCRIBE, "kv@")
        socket.setsockopt(zmq.RCVTIMEO, 10_000)
        socket.connect(endpoint)
        (prompt,) = random_prompts([40])
        heard: list[dict[str, Any]] = []
        numbers = []
        for seed in range(100):  # until the two have found each other
            generate(llm, random_prompts([40], seed=seed + 2), 1)
            if socket.poll(100):
                break
        generate(llm, [prompt], 1)
        end_transfers(llm)
        while {e["medium"] for e in heard if _end(e) == prompt[16:32]} != {
            "GPU",
            "CPU",
        }:
            topic, number, payload = socket.recv_multipart()
            _, events, rank = msgspec.msgpack.decode(payload)
            assert (topic, rank) == (b"kv@", 0)
            numbers.append(int.from_bytes(number, "big"))
            heard += [event for event in events if event["type"] == "BlockStored"]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        on_device, in_memory = [
            [e for e in heard if e["medium"] == medium and prompt[16:32] == _end(e)]
            for medium in ("GPU", "CPU")
        ]
        assert on_device and in_memory
        assert on_device[0]["block_hashes"][-1] == in_memory[0]["block_hashes"][-1]


def _end(event: dict[str, Any]) -> list[int]:
    """The tokens of an event's last block."""
    return event["token_ids"][-event["block_size"] :]
