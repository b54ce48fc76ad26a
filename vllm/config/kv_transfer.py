"""Which connector moves KV pages out of this engine, and in which role."""

import uuid
from dataclasses import field
from typing import Any, Literal, get_args

from vllm.config.utils import config
from vllm.utils.text_utils import short_repr

KVProducer = Literal["kv_producer", "kv_both"]
KVConsumer = Literal["kv_consumer", "kv_both"]
KVRole = Literal[KVProducer, KVConsumer]
# Settings that say something about a connector, and nothing without one.
_OF_CONNECTOR = ("kv_role", "kv_connector_module_path", "kv_connector_extra_config")


@config
class KVTransferConfig:
    """Connector name or module path, role, and what the connector itself reads."""

    kv_connector: str | None = None
    engine_id: str | None = None
    kv_buffer_device: str = "cpu"
    kv_buffer_size: float = 1e9
    kv_role: KVRole | None = None
    kv_rank: int | None = None
    kv_parallel_size: int = 1
    kv_ip: str = "127.0.0.1"
    kv_port: int = 14579
    kv_connector_extra_config: dict[str, Any] = field(default_factory=dict)
    kv_connector_module_path: str | None = None
    enable_permute_local_kv: bool = False
    kv_load_failure_policy: Literal["recompute", "fail"] = "fail"

    def __post_init__(self) -> None:
        if self.engine_id is None:
            self.engine_id = str(uuid.uuid4())
        if self.kv_connector is not None and self.kv_role is None:
            raise ValueError(
                f"kv_connector {self.kv_connector!r} needs kv_role: expected one of "
                f"{', '.join(get_args(KVRole))}"
            )
        for name in _OF_CONNECTOR if self.kv_connector is None else ():
            if value := getattr(self, name):
                raise ValueError(
                    f"{name} {short_repr(value)} needs kv_connector: name the "
                    "connector that moves pages, such as "
                    '"kv_connector": "NixlConnector", or leave out '
                    "--kv-transfer-config"
                )

    @property
    def is_kv_transfer_instance(self) -> bool:
        return self.kv_connector is not None and self.kv_role is not None

    @property
    def is_kv_producer(self) -> bool:
        return self.kv_connector is not None and self.kv_role in get_args(KVProducer)

    @property
    def is_kv_consumer(self) -> bool:
        return self.kv_connector is not None and self.kv_role in get_args(KVConsumer)

    def has_connector(self, name: str) -> bool:
        return self.kv_connector == name

    def get_from_extra_config(self, key: str, default: Any) -> Any:
        return self.kv_connector_extra_config.get(key, default)
