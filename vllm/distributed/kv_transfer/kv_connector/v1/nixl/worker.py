"""The worker side: pages that others may read, and loads of theirs.

Knows rows and orders. Which requests there are is the scheduler side's matter.
"""

import numpy as np
import torch

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.fingerprint import layout_fingerprint
from vllm.distributed.kv_transfer.kv_connector.page_table import page_table
from vllm.distributed.kv_transfer.kv_connector.topology import TransferTopology
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorTransferResults,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import TransferStats
from vllm.distributed.kv_transfer.kv_connector.v1.model_identity import model_identity
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.agent import (
    NixlAgent,
    nixl_module,
    regions_of,
    rows_of,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.loader import PageLoader
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    NixlAgentMetadata,
    NixlConnectorMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.peer import OwnPages
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.settings import NixlSettings
from vllm.v1.kv_cache_interface import KVCacheConfig


class NixlConnectorWorker:
    """One rank's pages, open to readers, and what it reads itself."""

    def __init__(
        self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig
    ) -> None:
        """ValueError when nixl is not installed."""
        nixl_module()
        self.vllm_config, self.engine_id = vllm_config, engine_id
        self.plan = kv_cache_config
        self.settings = NixlSettings.from_config(vllm_config)
        self.stats = TransferStats()
        self._sent: set[str] = set()
        self._agent: NixlAgent | None = None
        self._loader: PageLoader | None = None
        self._own: OwnPages | None = None

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Opens the pages to readers."""
        table = page_table(self.plan, kv_caches)
        rows = rows_of(table, dict(kv_caches), self.plan.num_blocks)
        groups = np.array([row.group_id for row in table])
        num_bytes = np.array([row.num_bytes for row in table])
        row_ids = tuple(
            np.flatnonzero(groups == group_id)
            for group_id in range(len(self.plan.kv_cache_groups))
        )
        fingerprint = layout_fingerprint(self.plan)
        self._own = own = OwnPages(
            model=model_identity(self.vllm_config),
            fingerprint=fingerprint,
            topology=self._topology(max(f.head_slots for f in fingerprint.layers)),
            rows=rows,
            row_ids=row_ids,
            regions=regions_of(dict(kv_caches), rows.device),
            block_bytes=tuple(int(num_bytes[ids].sum()) for ids in row_ids),
        )
        if self.settings.serves:
            self._agent = NixlAgent(self.engine_id, rows, own.regions, serves=True)
        if self.settings.reads:
            self._loader = PageLoader(
                own,
                read_timeout_s=self.settings.read_timeout_s,
                answer_timeout_s=self.settings.answer_timeout_s,
            )

    def _topology(self, num_head_slots: int) -> TransferTopology:
        parallel = self.vllm_config.parallel_config
        return TransferTopology(
            tp_rank=parallel.rank % parallel.tensor_parallel_size,
            tp_size=parallel.tensor_parallel_size,
            block_size=self.plan.kv_cache_groups[0].kv_cache_spec.block_size,
            engine_id=self.engine_id,
            total_num_kv_heads=num_head_slots * parallel.tensor_parallel_size,
        )

    def get_handshake_metadata(self) -> NixlAgentMetadata | None:
        """How readers reach the pages; None for an engine that only reads."""
        if self._agent is None or self._own is None:
            return None
        return NixlAgentMetadata(
            agent=self._agent.metadata(),
            rows=self._own.rows,
            fingerprint=self._own.fingerprint.to_dict(),
        )

    # --- a step -----------------------------------------------------------------------

    def start(self, orders: NixlConnectorMetadata) -> None:
        """Takes the orders of a step; nothing of it waits."""
        self._sent |= orders.sent
        if self._loader is not None:
            for order in orders.loads:
                self._loader.submit(order)

    def take_results(self) -> KVConnectorTransferResults:
        """What is over since the last call."""
        sent, self._sent = self._sent, set()
        if self._loader is None:
            return KVConnectorTransferResults(sent)
        loads = self._loader.take_results()
        self.stats.count(
            loaded_blocks=loads.num_blocks,
            loaded_bytes=loads.num_bytes,
            failed_blocks=loads.num_failed_blocks,
        )
        return KVConnectorTransferResults(
            sent, loads.finished, set(loads.failed), loads.failed
        )

    def shutdown(self) -> None:
        loader, self._loader = self._loader, None
        if loader is not None:
            loader.close()
        agent, self._agent = self._agent, None
        if agent is not None:
            agent.close()
