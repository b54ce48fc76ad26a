"""Prompt blocks on disk, shared by engines of any process: the connector to copy.

Everything happens within the step: pages are read before the forward pass and written
after it. The scheduler side finds blocks and checks them; the worker side moves bytes,
whatever they mean.

`kv_connector_extra_config`: `shared_storage_path`, the folder (it must be given).
`kv_transfer_params` of a request: `skip_load`, `skip_save`. A request that sends any
gets `num_loaded_tokens` and `num_saved_blocks` back.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import (
    BlockMover,
    layout_fingerprint,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    TransferPromMetrics,
    TransferStats,
)
from vllm.distributed.kv_transfer.kv_connector.v1.model_identity import model_store
from vllm.distributed.kv_transfer.kv_connector.v1.page_store import PageStore
from vllm.distributed.kv_transfer.kv_connector.v1.prefix_blocks import (
    BlockRef,
    PrefixBlocks,
)
from vllm.forward_context import ForwardContext
from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger(__name__)


@dataclass
class ExampleConnectorMetadata(KVConnectorMetadata):
    """Blocks to fill before this step's forward pass, and to store after it."""

    loads: list[BlockRef] = field(default_factory=list)
    saves: list[BlockRef] = field(default_factory=list)


@dataclass
class _Notes:
    """What one request has to do with the store."""

    num_local: int = 0
    num_loaded: int = 0
    num_saved: int = 0


def _store(vllm_config: VllmConfig, transfer: KVTransferConfig) -> PageStore:
    """ValueError without a folder."""
    found = model_store(vllm_config, transfer, "shared_storage_path")
    if found is None:
        raise ValueError(
            "ExampleConnector needs a folder: set "
            'kv_connector_extra_config={"shared_storage_path": "/some/folder"}'
        )
    return found


class ExampleConnector(KVConnectorBase_V1, SupportsHMA):
    """One file for each block, named by the tokens up to its end."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig,
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = self._kv_transfer_config
        self._plan = kv_cache_config
        self._loads = transfer.is_kv_consumer
        self._saves = transfer.is_kv_producer
        self.store = _store(vllm_config, transfer)
        self.stats = TransferStats()
        # Scheduler side.
        self.blocks = PrefixBlocks(kv_cache_config)
        self._notes: dict[str, _Notes] = {}
        self._orders = ExampleConnectorMetadata()
        # Worker side.
        self._mover: BlockMover | None = None
        self._failed_block_ids: set[int] = set()

    # --- scheduler side ---------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self.blocks.bind(kv_cache_manager)

    def on_new_request(self, request: Any) -> None:
        self.blocks.add(request)
        self._notes[request.request_id] = _Notes()

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        self._notes[request.request_id].num_local = num_computed_tokens
        if not self._loads or _asks(request, "skip_load"):
            return 0, False
        # Blocks are checked here, where a damaged one is merely a shorter hit.
        found = self.blocks.longest_hit(request, num_computed_tokens, self.store.verify)
        return found, False

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        if not num_external_tokens:
            return
        notes = self._notes[request.request_id]
        notes.num_loaded += num_external_tokens
        self._orders.loads += self.blocks.to_load(
            request, blocks, notes.num_local, num_external_tokens
        )

    def build_connector_meta(
        self, scheduler_output: SchedulerOutput
    ) -> ExampleConnectorMetadata:
        orders, self._orders = self._orders, ExampleConnectorMetadata()
        if self._saves:
            ordered: set[str] = set()
            for request, found in self.blocks.to_save(scheduler_output, True):
                if _asks(request, "skip_save"):
                    continue
                new = [
                    block
                    for block in found
                    if block.key not in ordered and not self.store.verify(block.key)
                ]
                ordered.update(block.key for block in new)
                self._notes[request.request_id].num_saved += len(new)
                orders.saves += new
        return orders

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self.blocks.forget(request.request_id)
        notes = self._notes.pop(request.request_id)
        if not request.kv_transfer_params:
            return False, None
        # Blocks are stored within the step that computes them: none is needed longer.
        return False, {
            "num_loaded_tokens": notes.num_loaded,
            "num_saved_blocks": notes.num_saved,
        }

    def reset_cache(self) -> bool:
        self.store.clear()
        return True

    # --- worker side ------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.store.open(layout_fingerprint(self._plan))
        self._mover = BlockMover(self._plan, kv_caches)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        mover, orders = self._mover, self._connector_metadata
        if mover is None or not isinstance(orders, ExampleConnectorMetadata):
            return
        for block in orders.loads:
            pages = self.store.read(block.key)
            if pages is None or pages.numel() != mover.block_bytes[block.group_id]:
                self._failed_block_ids.add(block.block_id)
                self.stats.count(failed_blocks=1)
                continue
            mover.write(block.group_id, block.block_id, pages)
            self.stats.count(loaded_blocks=1, loaded_bytes=pages.numel())

    def wait_for_layer_load(self, layer_name: str) -> None:
        return  # loads are over before the forward pass

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: Any,
        **kwargs: Any,
    ) -> None:
        return  # whole blocks are saved after it

    def wait_for_save(self) -> None:
        mover, orders = self._mover, self._connector_metadata
        if mover is None or not isinstance(orders, ExampleConnectorMetadata):
            return
        for block in orders.saves:
            num_bytes = mover.block_bytes[block.group_id]
            pages = torch.empty(num_bytes, dtype=torch.uint8)
            mover.read(block.group_id, block.block_id, pages)
            try:
                self.store.write(block.key, pages)
            except OSError as error:
                logger.warning_once("KV blocks cannot be stored: %s", error)
                self.stats.count(failed_blocks=1)
                continue
            self.stats.count(saved_blocks=1, saved_bytes=num_bytes)

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_block_ids = self._failed_block_ids, set()
        return failed

    # --- both sides -------------------------------------------------------------------

    @classmethod
    def check_plan(
        cls, vllm_config: VllmConfig, transfer: KVTransferConfig, plan: KVCacheConfig
    ) -> None:
        _store(vllm_config, transfer).open(layout_fingerprint(plan))

    def get_kv_connector_stats(self) -> TransferStats | None:
        self.stats.count(damaged_blocks=self.store.take_num_damaged())
        return self.stats.take()

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> TransferStats:
        return TransferStats(dict(data or {}))

    @classmethod
    def build_prom_metrics(cls, *args: Any, **kwargs: Any) -> TransferPromMetrics:
        return TransferPromMetrics(*args, **kwargs)


def _asks(request: Any, wish: str) -> bool:
    return bool((request.kv_transfer_params or {}).get(wish))
