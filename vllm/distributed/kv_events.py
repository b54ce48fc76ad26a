"""What happens to cached blocks, as structs, and who publishes it to routers.

A message has three frames: the topic, a sequence number of 8 bytes (big-endian), and a
batch in msgpack: [timestamp, events, data-parallel rank]. An event is a map whose
"type" is the name of its class. Publishing never blocks or fails a step.
"""

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from typing import Any, ClassVar

import msgspec
import zmq

from vllm.config.kv_events import KVEventsConfig
from vllm.logger import init_logger

logger = init_logger(__name__)

ExternalBlockHash = bytes | int
"""A block hash as it is published."""

MEDIUM_GPU = "GPU"
"""The device's own KV cache, whatever the device is."""


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Events of one step. `ts` is wall-clock seconds."""

    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Something that happened to cached blocks."""


class BlockStored(KVCacheEvent):
    """Blocks that can be hit from now on: a run of a prefix, in order."""

    block_hashes: list[ExternalBlockHash]
    parent_block_hash: ExternalBlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None


class BlockRemoved(KVCacheEvent):
    """Blocks of which no copy is left."""

    block_hashes: list[ExternalBlockHash]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None


class AllBlocksCleared(KVCacheEvent):
    """Nothing is cached any more."""


class KVEventBatch(EventBatch):
    """Cache events of one step."""

    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


class EventPublisher(ABC):
    """Takes batches; never raises into the scheduler."""

    def __init__(self, data_parallel_rank: int = 0) -> None:
        self._data_parallel_rank = data_parallel_rank

    @abstractmethod
    def publish(self, events: EventBatch) -> None:
        """Hands a batch over. Returns at once."""

    @abstractmethod
    def shutdown(self) -> None:
        """Sends what is queued, within a second, and closes."""


class NullEventPublisher(EventPublisher):
    """Publishes nothing."""

    def publish(self, events: EventBatch) -> None:
        return

    def shutdown(self) -> None:
        return


def _binds(endpoint: str) -> bool:
    return (
        "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc:", "inproc:"))
    )


class ZmqEventPublisher(EventPublisher):
    """Publishes over a PUB socket from a thread of its own.

    Binds endpoints with a `*` (or ipc, inproc) and connects to others. With a replay
    endpoint, a client that sends the 8-byte number of the first batch it missed gets
    the batches since then, as far as `buffer_steps` reaches, and then number -1.
    Batches beyond `max_queue_size` are dropped and counted.
    """

    SHUTDOWN_TIMEOUT_S: ClassVar[float] = 1.0
    END_SEQ: ClassVar[bytes] = (-1).to_bytes(8, "big", signed=True)

    def __init__(
        self,
        data_parallel_rank: int = 0,
        endpoint: str = "tcp://*:5557",
        replay_endpoint: str | None = None,
        buffer_steps: int = 10_000,
        hwm: int = 100_000,
        max_queue_size: int = 100_000,
        topic: str = "",
    ) -> None:
        super().__init__(data_parallel_rank)
        self._queue: queue.Queue[EventBatch | None] = queue.Queue(max_queue_size)
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._topic = topic.encode()
        self._hwm = hwm
        self._sequence = 0
        self.num_dropped_batches = 0
        self._pack = msgspec.msgpack.Encoder().encode
        self._context = zmq.Context.instance()
        self._pub: zmq.Socket | None = None
        self._replay: zmq.Socket | None = None
        try:
            self._pub = self._open(zmq.PUB, endpoint, data_parallel_rank)
            if replay_endpoint is not None:
                self._replay = self._open(
                    zmq.ROUTER, replay_endpoint, data_parallel_rank
                )
        except zmq.ZMQError as error:
            self._close()
            raise ValueError(
                f"KV events cannot use endpoint {endpoint!r} (replay "
                f"{replay_endpoint!r}): {error}; choose a free port or path"
            ) from error
        self._thread = threading.Thread(
            target=self._run, name="kv-event-publisher", daemon=True
        )
        self._thread.start()

    def publish(self, events: EventBatch) -> None:
        if not self._thread.is_alive():
            raise RuntimeError("the KV event publisher is shut down")
        if events.data_parallel_rank is None:
            events.data_parallel_rank = self._data_parallel_rank
        try:
            self._queue.put_nowait(events)
        except queue.Full:
            self.num_dropped_batches += 1
            logger.warning_once(
                "KV events come faster than they can be sent: batches are dropped "
                "(max_queue_size is %d)",
                self._queue.maxsize,
            )

    def shutdown(self) -> None:
        if not self._thread.is_alive():
            return
        try:
            self._queue.put(None, timeout=self.SHUTDOWN_TIMEOUT_S)
        except queue.Full:
            logger.warning("KV events are lost: the queue is full at shutdown")
        self._thread.join(self.SHUTDOWN_TIMEOUT_S)

    @staticmethod
    def offset_endpoint_port(
        endpoint: str | None, data_parallel_rank: int
    ) -> str | None:
        """The endpoint of one data-parallel rank: the port plus the rank for tcp, a
        suffix for others. ValueError for a tcp endpoint without a port."""
        if not endpoint or data_parallel_rank == 0:
            return endpoint
        if not endpoint.startswith("tcp:"):
            return f"{endpoint}_dp{data_parallel_rank}"
        base, _, port = endpoint.rpartition(":")
        if not port.isdigit():
            raise ValueError(
                f"KV event endpoint {endpoint!r} has no port: expected tcp://host:port"
            )
        return f"{base}:{int(port) + data_parallel_rank}"

    def _open(self, kind: int, endpoint: str, rank: int) -> zmq.Socket:
        address = self.offset_endpoint_port(endpoint, rank)
        socket = self._context.socket(kind)
        socket.set_hwm(self._hwm)
        if kind == zmq.ROUTER or _binds(endpoint):
            socket.bind(address)
        else:
            logger.warning(
                "KV events: endpoint %s has no *, so it is connected to: a subscriber "
                "must listen there, and those that connect see nothing. Use "
                "tcp://*:port to listen here",
                address,
            )
            socket.connect(address)
        return socket

    def _close(self) -> None:
        for socket in (self._pub, self._replay):
            if socket is not None:
                socket.close(linger=0)

    def _run(self) -> None:
        """Sends until told to stop. A failed send loses its batch, not the thread."""
        while True:
            self._serve_replay()
            try:
                batch = self._queue.get(timeout=0.1)
            except queue.Empty:
                continue
            if batch is None:
                break
            try:
                self._send(batch)
            except Exception:
                logger.exception("a batch of KV events could not be sent")
                time.sleep(0.1)
        # What was sent last still sits in the socket.
        if self._pub is not None:
            self._pub.close(linger=int(self.SHUTDOWN_TIMEOUT_S * 500))
        if self._replay is not None:
            self._replay.close(linger=0)

    def _send(self, batch: EventBatch) -> None:
        payload = self._pack(batch)
        number = self._sequence
        self._sequence += 1
        self._buffer.append((number, payload))
        if self._pub is not None:
            self._pub.send_multipart((self._topic, number.to_bytes(8, "big"), payload))

    def _serve_replay(self) -> None:
        """Answers waiting replay requests; a malformed one is dropped."""
        if self._replay is None:
            return
        while self._replay.poll(0):
            frames = self._replay.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                logger.warning(
                    "malformed KV event replay request of %d frames", len(frames)
                )
                continue
            client, empty, start = frames
            first = int.from_bytes(start, "big")
            for number, payload in self._buffer:
                if number >= first:
                    self._replay.send_multipart(
                        (client, empty, number.to_bytes(8, "big"), payload)
                    )
            self._replay.send_multipart((client, empty, self.END_SEQ, b""))


class EventPublisherFactory:
    """Publishers by their name in `KVEventsConfig.publisher`."""

    _registry: ClassVar[dict[str, type[EventPublisher]]] = {
        "null": NullEventPublisher,
        "zmq": ZmqEventPublisher,
    }

    @classmethod
    def register_publisher(cls, name: str, publisher: type[EventPublisher]) -> None:
        """Adds a publisher. ValueError when the name is taken."""
        if name in cls._registry:
            raise ValueError(f"KV event publisher {name!r} exists: choose another name")
        cls._registry[name] = publisher

    @classmethod
    def create(
        cls, config: KVEventsConfig | None, data_parallel_rank: int = 0
    ) -> EventPublisher:
        """The publisher that the config asks for; the null one when events are off."""
        if config is None or not config.enable_kv_cache_events:
            return NullEventPublisher()
        name = config.publisher or "null"
        if name not in cls._registry:
            raise ValueError(
                f"unknown KV event publisher {name!r}: expected one of "
                f"{', '.join(cls._registry)}"
            )
        if name == "null":
            return NullEventPublisher()
        return cls._registry[name](
            data_parallel_rank=data_parallel_rank,
            endpoint=config.endpoint,
            replay_endpoint=config.replay_endpoint,
            buffer_steps=config.buffer_steps,
            hwm=config.hwm,
            max_queue_size=config.max_queue_size,
            topic=config.topic,
        )
