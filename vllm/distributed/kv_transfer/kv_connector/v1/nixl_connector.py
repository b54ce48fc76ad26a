"""Prompts computed in one engine and continued in another: pages go from memory to
memory, by nixl.

The decode engine reads. A request with `kv_transfer_params` {"do_remote_decode": true}
and one token to generate keeps its blocks when it ends, and answers with parameters; a
request with these, sent to another engine, reads the blocks instead of computing its
prompt. In between `vllm disagg-proxy` carries them.

`kv_connector_extra_config`: see NixlSettings.
"""

from typing import Any

import torch

from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    TransferPromMetrics,
    TransferStats,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.agent import nixl_module
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    NixlAgentMetadata,
    NixlConnectorMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.scheduler import (
    NixlConnectorScheduler,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.worker import (
    NixlConnectorWorker,
)
from vllm.forward_context import ForwardContext
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput

__all__ = [
    "NixlAgentMetadata",
    "NixlConnector",
    "NixlConnectorMetadata",
    "NixlConnectorScheduler",
    "NixlConnectorWorker",
    "NixlPullConnector",
]


class NixlConnector(KVConnectorBase_V1, SupportsHMA):
    """Hands each call to the side that it belongs to."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig,
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        engine_id = str(self._kv_transfer_config.engine_id)
        self.connector_scheduler: NixlConnectorScheduler | None = None
        self.connector_worker: NixlConnectorWorker | None = None
        if role is KVConnectorRole.SCHEDULER:
            self.connector_scheduler = NixlConnectorScheduler(
                vllm_config, engine_id, kv_cache_config
            )
        else:
            self.connector_worker = NixlConnectorWorker(
                vllm_config, engine_id, kv_cache_config
            )

    @classmethod
    def check_config(
        cls, transfer: KVTransferConfig, block_bytes: int | None = None
    ) -> None:
        """ValueError without the package nixl."""
        nixl_module()

    # --- scheduler side ---------------------------------------------------------------

    @property
    def _scheduler(self) -> NixlConnectorScheduler:
        if self.connector_scheduler is None:
            raise RuntimeError("this is the worker side of the connector")
        return self.connector_scheduler

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._scheduler.bind(kv_cache_manager)

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        self._scheduler.open(
            {
                rank: told
                for rank, told in metadata.items()
                if isinstance(told, NixlAgentMetadata)
            }
        )

    def on_new_request(self, request: Any) -> None:
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._scheduler.find(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        self._scheduler.admitted(request, blocks, num_external_tokens)

    def build_connector_meta(
        self, scheduler_output: SchedulerOutput
    ) -> NixlConnectorMetadata:
        return self._scheduler.take_orders()

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        news = connector_output
        self._scheduler.loads_are_over(news.finished_recving or (), failed=False)
        self._scheduler.loads_are_over(news.failed_recving or (), failed=True)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.finished(request, block_ids)

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[str, int]:
        return {"engine": num_external_tokens}

    def has_pending_block_frees(self) -> bool:
        return self._scheduler.has_work

    def has_pending_push_work(self) -> bool:
        return self._scheduler.has_work

    # --- worker side ------------------------------------------------------------------

    @property
    def _worker(self) -> NixlConnectorWorker:
        if self.connector_worker is None:
            raise RuntimeError("this is the scheduler side of the connector")
        return self.connector_worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker.register_kv_caches(kv_caches)

    def get_handshake_metadata(self) -> NixlAgentMetadata | None:
        return self._worker.get_handshake_metadata()

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        orders = self._connector_metadata
        if isinstance(orders, NixlConnectorMetadata):
            self._worker.start(orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        return  # requests wait for their loads outside of steps

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: Any,
        **kwargs: Any,
    ) -> None:
        return  # who wants pages reads them

    def wait_for_save(self) -> None:
        return

    def get_transfer_results(
        self, finished_req_ids: set[str]
    ) -> KVConnectorTransferResults:
        return self._worker.take_results()

    def get_finished(
        self, finished_req_ids: set[str]
    ) -> tuple[set[str] | None, set[str] | None]:
        results = self.get_transfer_results(finished_req_ids)
        over = results.finished_recving | results.failed_recving
        return results.finished_sending or None, over or None

    # --- both sides -------------------------------------------------------------------

    def get_kv_connector_stats(self) -> TransferStats | None:
        side = self.connector_worker or self._scheduler
        return side.stats.take()

    def shutdown(self) -> None:
        if self.connector_worker is not None:
            self.connector_worker.shutdown()
        if self.connector_scheduler is not None:
            self.connector_scheduler.shutdown()

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> TransferStats:
        return TransferStats(dict(data or {}))

    @classmethod
    def build_prom_metrics(cls, *args: Any, **kwargs: Any) -> TransferPromMetrics:
        return TransferPromMetrics(*args, **kwargs)


#: The same by the name that says which side acts.
NixlPullConnector = NixlConnector
