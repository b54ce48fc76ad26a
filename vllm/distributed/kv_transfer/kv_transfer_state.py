"""The worker-side connector of this process."""

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
)
from vllm.v1.kv_cache_interface import KVCacheConfig

_connector: KVConnectorBase_V1 | None = None
_owner: VllmConfig | None = None


def ensure_kv_transfer_initialized(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig | None = None
) -> None:
    """Creates the worker side of the configured connector, once for each engine.

    An engine started later in the same process gets its own. ValueError as
    `KVConnectorFactory.create_connector` says.
    """
    global _connector, _owner
    transfer = vllm_config.kv_transfer_config
    if transfer is None or not transfer.is_kv_transfer_instance:
        return
    if _connector is not None and _owner is vllm_config:
        return
    _connector = KVConnectorFactory.create_connector(
        vllm_config, KVConnectorRole.WORKER, kv_cache_config
    )
    _owner = vllm_config


def has_kv_transfer_group() -> bool:
    return _connector is not None


def is_v1_kv_transfer_group(connector: object | None = None) -> bool:
    """Says whether the connector (this process's, where none is given) has the
    interface of KVConnectorBase_V1."""
    return isinstance(
        _connector if connector is None else connector, KVConnectorBase_V1
    )


def get_kv_transfer_group() -> KVConnectorBase_V1:
    """The connector. RuntimeError before `ensure_kv_transfer_initialized`."""
    if _connector is None:
        raise RuntimeError(
            "no KV connector is set up in this process: start the engine with "
            "--kv-transfer-config"
        )
    return _connector


def ensure_kv_transfer_shutdown() -> None:
    """Stops the connector; does nothing where there is none."""
    global _connector, _owner
    connector, _connector, _owner = _connector, None, None
    if connector is not None:
        connector.shutdown()
