"""Whether and where block events are published."""

from typing import Literal

from vllm.config.utils import config


@config
class KVEventsConfig:
    """`endpoint` binds when it holds a `*` or is ipc://; otherwise it connects, and the
    publisher warns."""

    enable_kv_cache_events: bool = False
    publisher: Literal["null", "zmq"] | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    def __post_init__(self) -> None:
        if self.publisher is None:
            self.publisher = "zmq" if self.enable_kv_cache_events else "null"
