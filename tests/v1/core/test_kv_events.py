"""Events tell subscribers exactly which prefixes can be hit, in a fixed wire format."""

import random
import time
from typing import Any

import msgspec
import pytest
import zmq

from tests.v1.core.utils import (
    SimulatedWorker,
    full,
    make_engine,
    make_request,
    make_scheduler,
    window,
)
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import (
    MEDIUM_GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventPublisherFactory,
    KVEventBatch,
    NullEventPublisher,
    ZmqEventPublisher,
)
from vllm.lora.request import LoRARequest
from vllm.utils.network_utils import get_open_port
from vllm.v1.core.block_hash import get_block_hash, get_group_id
from vllm.v1.core.kv_cache_manager import KVCacheManager

EVENTS = KVEventsConfig(enable_kv_cache_events=True, publisher="null")


def make_manager(num_blocks: int = 11, *specs: Any) -> KVCacheManager:
    scheduler = make_scheduler(
        *(specs or (full(),)), num_blocks=num_blocks, kv_events=EVENTS
    )
    return scheduler.kv_cache_manager


def test_stored_blocks_come_as_a_run_with_tokens_and_parent() -> None:
    manager = make_manager()
    request = make_request("a", list(range(10)))
    manager.allocate_slots(request, 10)
    (event,) = manager.take_events()
    assert event == BlockStored(
        block_hashes=request.block_hashes[:2],
        parent_block_hash=None,
        token_ids=list(range(8)),
        block_size=4,
        lora_id=None,
        medium=MEDIUM_GPU,
        lora_name=None,
        group_idx=0,
        kv_cache_spec_kind="full_attention",
    )
    request.num_computed_tokens = 10
    request.append_output_token_ids([10, 11, 12])
    manager.allocate_slots(request, 3)
    (event,) = manager.take_events()
    assert event.block_hashes == request.block_hashes[2:3]
    assert event.parent_block_hash == request.block_hashes[1]
    assert event.token_ids == [8, 9, 10, 11]


def test_stored_blocks_carry_what_else_decides_their_content() -> None:
    manager = make_manager()
    request = make_request(
        "a",
        list(range(8)),
        cache_salt="salt",
        lora_request=LoRARequest("adapter", 3, "/path"),
    )
    manager.allocate_slots(request, 8)
    (event,) = manager.take_events()
    assert (event.lora_id, event.lora_name) == (3, "adapter")
    assert event.extra_keys == [("adapter", "salt"), ("adapter",)]


def test_events_of_groups_tell_their_kind() -> None:
    manager = make_manager(30, full(), window(6))
    manager.allocate_slots(make_request("a", list(range(8))), 8)
    events = manager.take_events()
    assert [(e.group_idx, e.kv_cache_spec_kind) for e in events] == [
        (0, "full_attention"),
        (1, "sliding_window"),
    ]
    assert [e.kv_cache_spec_sliding_window for e in events] == [None, 6]


def test_blocks_are_removed_one_by_one_before_new_ones_are_stored() -> None:
    manager = make_manager(4)
    first = make_request("a", [1] * 12)
    manager.allocate_slots(first, 12)
    manager.take_events()
    manager.free(first)
    manager.allocate_slots(make_request("b", [2] * 8), 8)
    events = manager.take_events()
    assert [type(e) for e in events] == [BlockRemoved, BlockRemoved, BlockStored]
    assert [e.block_hashes for e in events[:2]] == [
        [first.block_hashes[2]],
        [first.block_hashes[1]],
    ]
    assert events[0].group_idx == 0


def test_reset_clears_everything_in_one_event() -> None:
    manager = make_manager()
    request = make_request("a", [1] * 8)
    manager.allocate_slots(request, 8)
    manager.free(request)
    manager.take_events()
    assert manager.reset_prefix_cache()
    assert manager.take_events() == [AllBlocksCleared()]


def test_events_are_off_by_default() -> None:
    manager = make_scheduler().kv_cache_manager
    manager.allocate_slots(make_request("a", [1] * 8), 8)
    assert manager.take_events() == []


def test_a_subscriber_knows_exactly_what_is_cached() -> None:
    rng = random.Random(0)
    specs = [full(), window(6)]
    scheduler = make_scheduler(*specs, num_blocks=40, kv_events=EVENTS, log_stats=False)
    published: list[Any] = []
    scheduler.kv_event_publisher.publish = published.append  # type: ignore[method-assign]
    engine = make_engine(*specs)
    engine.scheduler = scheduler
    engine.worker = SimulatedWorker(specs, eos_share=15)
    known: set[tuple[int, bytes]] = set()
    for i in range(60):
        length = rng.randrange(1, 30)
        engine.add(make_request(str(i), [rng.randrange(1, 4)] * length))
        engine.step()
        for batch in published:
            for event in batch.events:
                keys = {(event.group_idx, name) for name in event.block_hashes}
                if isinstance(event, BlockStored):
                    known |= keys
                else:
                    assert keys <= known
                    known -= keys
        published.clear()
        cached = scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block
        assert known == {(get_group_id(k), get_block_hash(k)) for k in cached._cache}
    assert known


# --- the wire ------------------------------------------------------------------------


def stored(number: int) -> KVEventBatch:
    event = BlockStored(
        block_hashes=[b"hash"],
        parent_block_hash=None,
        token_ids=[number],
        block_size=1,
        lora_id=None,
        medium=MEDIUM_GPU,
        lora_name=None,
    )
    return KVEventBatch(ts=1.5, events=[event])


@pytest.fixture
def endpoint(tmp_path: Any) -> str:
    return f"ipc://{tmp_path}/events"


def subscribe(endpoint: str, topic: str = "") -> zmq.Socket:
    socket = zmq.Context.instance().socket(zmq.SUB)
    socket.setsockopt_string(zmq.SUBSCRIBE, topic)
    socket.setsockopt(zmq.RCVTIMEO, 5000)
    socket.connect(endpoint)
    time.sleep(0.2)
    return socket


def test_frames_are_topic_number_and_msgpack(endpoint: str) -> None:
    publisher = ZmqEventPublisher(3, endpoint, topic="kv@pod")
    socket = subscribe(f"{endpoint}_dp3", "kv@")
    try:
        for number in range(3):
            publisher.publish(stored(number))
        for number in range(3):
            topic, sequence, payload = socket.recv_multipart()
            assert topic == b"kv@pod"
            assert int.from_bytes(sequence, "big") == number
            ts, (event,), rank = msgspec.msgpack.decode(payload)
            assert (ts, rank) == (1.5, 3)
            assert event["type"] == "BlockStored"
            assert event["block_hashes"] == [b"hash"]
            assert event["token_ids"] == [number]
            assert "group_idx" not in event
            typed = msgspec.msgpack.decode(payload, type=KVEventBatch)
            assert typed.events == stored(number).events
    finally:
        socket.close(0)
        publisher.shutdown()


def test_an_endpoint_without_a_star_is_where_a_subscriber_listens(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With a `*` the publisher listens; without one it connects, and warns."""
    socket = zmq.Context.instance().socket(zmq.SUB)
    socket.setsockopt_string(zmq.SUBSCRIBE, "")
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    with caplog.at_level("WARNING", "vllm"):
        publisher = ZmqEventPublisher(0, f"tcp://127.0.0.1:{port}")
    assert f"tcp://127.0.0.1:{port} has no *" in caplog.text
    try:
        for number in range(100):  # until the two have found each other
            publisher.publish(stored(number))
            if socket.poll(100):
                break
        _, sequence, payload = socket.recv_multipart(zmq.NOBLOCK)
        number = int.from_bytes(sequence, "big")
        assert msgspec.msgpack.decode(payload)[1][0]["token_ids"] == [number]
    finally:
        socket.close(0)
        publisher.shutdown()


def test_an_endpoint_with_a_star_listens_without_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    port = get_open_port()
    with caplog.at_level("WARNING", "vllm"):
        publisher = ZmqEventPublisher(0, f"tcp://*:{port}")
    socket = subscribe(f"tcp://127.0.0.1:{port}")
    try:
        publisher.publish(stored(7))
        *_, payload = socket.recv_multipart()
        assert msgspec.msgpack.decode(payload)[1][0]["token_ids"] == [7]
        assert not caplog.records
    finally:
        socket.close(0)
        publisher.shutdown()


def test_missed_batches_are_replayed(endpoint: str) -> None:
    replay = f"{endpoint}-replay"
    publisher = ZmqEventPublisher(0, endpoint, replay, buffer_steps=4)
    socket = zmq.Context.instance().socket(zmq.REQ)
    socket.setsockopt(zmq.RCVTIMEO, 5000)
    subscriber = subscribe(endpoint)
    try:
        for number in range(6):
            publisher.publish(stored(number))
        for _ in range(6):
            subscriber.recv_multipart()
        dealer = zmq.Context.instance().socket(zmq.DEALER)
        dealer.setsockopt(zmq.RCVTIMEO, 5000)
        dealer.connect(replay)
        dealer.send_multipart([b"too", b"many", b"frames"])
        dealer.send_multipart([b"", (3).to_bytes(8, "big")])
        numbers = []
        while True:
            empty, number, payload = dealer.recv_multipart()
            assert empty == b""
            if number == ZmqEventPublisher.END_SEQ:
                assert payload == b""
                break
            numbers.append(int.from_bytes(number, "big"))
        assert numbers == [3, 4, 5]
        dealer.close(0)
    finally:
        socket.close(0)
        subscriber.close(0)
        publisher.shutdown()


def test_full_queues_drop_batches_and_count_them(endpoint: str) -> None:
    publisher = ZmqEventPublisher(0, endpoint, max_queue_size=1)
    try:
        for number in range(2000):
            publisher.publish(stored(number))
        assert publisher.num_dropped_batches > 0
    finally:
        publisher.shutdown()
    with pytest.raises(RuntimeError):
        publisher.publish(stored(0))
    publisher.shutdown()


def test_unusable_endpoints_are_an_error_at_start() -> None:
    with pytest.raises(ValueError, match="nonsense"):
        ZmqEventPublisher(0, "nonsense://*")


@pytest.mark.parametrize(
    ("endpoint", "rank", "expected"),
    [
        ("tcp://*:5557", 0, "tcp://*:5557"),
        ("tcp://*:5557", 2, "tcp://*:5559"),
        ("inproc://events", 1, "inproc://events_dp1"),
        (None, 1, None),
    ],
)
def test_each_rank_has_its_own_endpoint(
    endpoint: str | None, rank: int, expected: str | None
) -> None:
    assert ZmqEventPublisher.offset_endpoint_port(endpoint, rank) == expected


def test_publishers_are_chosen_by_name(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = EventPublisherFactory.create
    assert isinstance(create(None), NullEventPublisher)
    off = KVEventsConfig(publisher="zmq", endpoint=endpoint)
    assert isinstance(create(off), NullEventPublisher)
    assert isinstance(create(EVENTS), NullEventPublisher)
    on = create(KVEventsConfig(enable_kv_cache_events=True, endpoint=endpoint))
    assert isinstance(on, ZmqEventPublisher)
    on.shutdown()
    with pytest.raises(ValueError, match="zmq"):
        EventPublisherFactory.register_publisher("zmq", NullEventPublisher)
    monkeypatch.setattr(EventPublisherFactory, "_registry", {})
    with pytest.raises(ValueError, match="unknown KV event publisher"):
        create(KVEventsConfig(enable_kv_cache_events=True, endpoint=endpoint))
