"""From a configuration to a connector object: names, module paths, refusals.

Knows names of connectors, and imports none before it is asked for.
"""

import inspect
from collections.abc import Callable
from typing import Any

from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    supports_hma,
)
from vllm.distributed.kv_transfer.kv_connector.v1.settings import check_settings
from vllm.logger import init_logger
from vllm.utils.import_utils import resolve
from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger(__name__)

_V1 = "vllm.distributed.kv_transfer.kv_connector.v1"

# Names that configurations elsewhere use, for which there is no code here.
NOT_BUILT_IN = (
    "ExampleHiddenStatesConnector",
    "FlexKVConnectorV1",
    "HF3FSKVConnector",
    "HiSparseConnector",
    "LMCacheConnectorV1",
    "LMCacheMPConnector",
    "MoRIIOConnector",
    "MooncakeConnector",
    "MooncakeStoreConnector",
    "NixlPushConnector",
    "SimpleCPUOffloadConnector",
)


class KVConnectorFactory:
    """The registry of connectors."""

    _registry: dict[str, Callable[[], type[KVConnectorBase_V1]]] = {}  # noqa: RUF012

    @classmethod
    def register_connector(cls, name: str, module_path: str, class_name: str) -> None:
        """Offers a connector by name; its module is imported on first use.

        ValueError when the name is taken.
        """
        if name in cls._registry:
            raise ValueError(
                f"KV connector {name!r} is already registered: choose another name"
            )
        cls._registry[name] = lambda: resolve(f"{module_path}:{class_name}")

    @classmethod
    def get_connector_class_by_name(cls, name: str) -> type[KVConnectorBase_V1]:
        """A registered class. ValueError for other names."""
        if name in cls._registry:
            return cls._registry[name]()
        registered = ", ".join(sorted(cls._registry))
        if name in NOT_BUILT_IN:
            raise ValueError(
                f"Unsupported connector type: {name} is not built in: expected one of "
                f"{registered}, or set kv_connector_module_path to a module that has it"
            )
        raise ValueError(
            f"Unsupported connector type: {name}: expected one of {registered}, or set "
            "kv_connector_module_path to a module that has it"
        )

    @classmethod
    def get_connector_class(
        cls, kv_transfer_config: KVTransferConfig
    ) -> type[KVConnectorBase_V1]:
        """The configured class: from `kv_connector_module_path` where that is given,
        else from the registry.

        ValueError for no name, an empty module path or an unknown name; ImportError and
        AttributeError for a module or a class that is not there.
        """
        name = kv_transfer_config.kv_connector
        if name is None:
            raise ValueError("kv_transfer_config has no kv_connector: name one")
        module_path = kv_transfer_config.kv_connector_module_path
        if module_path is None:
            return cls.get_connector_class_by_name(name)
        if not module_path:
            raise ValueError(
                "kv_connector_module_path is empty: name a module, or leave it out"
            )
        found: Any = resolve(f"{module_path}:{name}")
        if "kv_cache_config" not in inspect.signature(found.__init__).parameters:
            raise ValueError(
                f"{module_path}.{name} has no parameter kv_cache_config: its "
                "constructor takes (vllm_config, role, kv_cache_config)"
            )
        return found

    @classmethod
    def supports_hma_config(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """Says whether the configured connector serves several KV cache groups; one
        that is made of others asks them."""
        found = cls.get_connector_class(kv_transfer_config)
        if not supports_hma(found):
            return False
        children = getattr(found, "child_configs", None)
        if children is None:
            return True
        return all(cls.supports_hma_config(c) for c in children(kv_transfer_config))

    @classmethod
    def check_config(
        cls, kv_transfer_config: KVTransferConfig, block_bytes: int | None = None
    ) -> None:
        """ValueError for a connector that is not there, for settings that it does not
        know and for what its class refuses by its `check_config`."""
        try:
            found = cls.get_connector_class(kv_transfer_config)
        except (ImportError, AttributeError) as error:
            module_path = kv_transfer_config.kv_connector_module_path
            raise ValueError(
                f"kv_connector {kv_transfer_config.kv_connector!r} of "
                f"kv_connector_module_path {module_path!r} cannot be loaded: {error}; "
                "expected a module that Python finds and a class in it"
            ) from error
        check_settings(found, kv_transfer_config)
        # A class from elsewhere may have been written before this was asked.
        check = getattr(found, "check_config", None)
        if check is not None:
            check(kv_transfer_config, block_bytes)

    @classmethod
    def check_plan(
        cls,
        config: VllmConfig,
        kv_transfer_config: KVTransferConfig,
        plan: KVCacheConfig,
    ) -> None:
        """ValueError for what the connector's class refuses by its `check_plan`, such
        as a place of pages that cannot be used, and for several groups where it serves
        one only."""
        cls._check_groups(config, kv_transfer_config, plan)
        check = getattr(cls.get_connector_class(kv_transfer_config), "check_plan", None)
        if check is not None:
            check(config, kv_transfer_config, plan)

    @classmethod
    def create_connector(
        cls,
        config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> KVConnectorBase_V1:
        """The connector of one role.

        ValueError when the configuration names none, and when it serves one KV cache
        group only but the hybrid manager makes several, or was asked for.
        """
        transfer = config.kv_transfer_config
        if transfer is None:
            raise ValueError("kv_transfer_config is not set: there is no KV connector")
        found = cls.get_connector_class(transfer)
        cls._check_groups(config, transfer, kv_cache_config)
        logger.debug("KV connector %s, role %s", found.__name__, role.name)
        return found(config, role, kv_cache_config)

    @classmethod
    def _check_groups(
        cls,
        config: VllmConfig,
        transfer: KVTransferConfig,
        kv_cache_config: KVCacheConfig | None,
    ) -> None:
        if cls.supports_hma_config(transfer):
            return
        disabled = config.scheduler_config.disable_hybrid_kv_cache_manager
        groups = [] if kv_cache_config is None else kv_cache_config.kv_cache_groups
        if disabled is False or (disabled is None and len(groups) > 1):
            raise ValueError(
                f"KV connector {transfer.kv_connector} does not support the hybrid KV "
                "cache manager (it does not derive from SupportsHMA): pass "
                "--disable-hybrid-kv-cache-manager"
            )


for _name, _module in {
    "ExampleConnector": "example_connector",
    "OffloadingConnector": "offloading_connector",
    "MultiConnector": "multi_connector",
    "DecodeBenchConnector": "decode_bench_connector",
    "NixlConnector": "nixl_connector",
    "NixlPullConnector": "nixl_connector",
}.items():
    KVConnectorFactory.register_connector(_name, f"{_V1}.{_module}", _name)
