"""Full blocks in host memory, and behind it on disk, for prompts to come.

Loads and stores run beside the engine's steps. `kv_connector_extra_config`:
`cpu_bytes_to_use` (or `num_cpu_blocks`), bytes of host memory; `eviction_policy` of the
memory, lru (default) or arc; `disk_path`, a folder whose blocks survive the engine;
`disk_bytes_to_use`, its limit (none by default).
"""

from typing import Any

import torch

from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.utils import layout_fingerprint
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    TransferPromMetrics,
    TransferStats,
)
from vllm.distributed.kv_transfer.kv_connector.v1.model_identity import model_store
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.disk_index import (
    DiskIndex,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.jobs import (
    OffloadingMetadata,
    OffloadingNews,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.policies import (
    policy_by_name,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingScheduler,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.slots import SlotCache
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import (
    OffloadingWorker,
)
from vllm.distributed.kv_transfer.kv_connector.v1.prefix_blocks import PrefixBlocks
from vllm.forward_context import ForwardContext
from vllm.utils.mem_utils import available_memory_bytes, format_gib, parse_size
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput


def pool_bytes_per_block(plan: KVCacheConfig) -> int:
    """Bytes that one block id has over all tensors of a plan: enough for a block of
    any group, and the same on the scheduler's side and the workers'."""
    apart = sum(t.size for t in plan.kv_cache_tensors if not t.block_stride)
    shared = max((t.size for t in plan.kv_cache_tensors if t.block_stride), default=0)
    return (apart + shared) // plan.num_blocks


def _num_slots(transfer: KVTransferConfig, slot_bytes: int) -> int:
    num_blocks, size = _asked(transfer)
    found = num_blocks or size // slot_bytes
    if found < 2:
        raise ValueError(
            f"OffloadingConnector has room for {found} blocks of {slot_bytes} bytes in "
            f"{size} bytes: give it more (cpu_bytes_to_use, num_cpu_blocks or "
            "--kv-offloading-size)"
        )
    return found


def _asked(transfer: KVTransferConfig) -> tuple[int, int]:
    """(blocks, bytes) of host memory as asked for, of which one may be 0. ValueError
    for numbers that are none."""
    num_blocks = transfer.get_from_extra_config("num_cpu_blocks", None)
    size = transfer.get_from_extra_config("cpu_bytes_to_use", None)
    if num_blocks is None and size is None:
        raise ValueError(
            "OffloadingConnector needs a size: pass --kv-offloading-size GiB, or set "
            'kv_connector_extra_config={"cpu_bytes_to_use": bytes}'
        )
    if num_blocks is None:
        return 0, _size(transfer, "cpu_bytes_to_use")
    if type(num_blocks) is not int or num_blocks < 2:
        raise ValueError(
            f"OffloadingConnector: num_cpu_blocks={num_blocks!r}: expected a whole "
            "number of at least 2, or cpu_bytes_to_use instead"
        )
    return num_blocks, 0


def _size(transfer: KVTransferConfig, name: str) -> int:
    """Bytes of a setting of this name. ValueError for what is no amount of memory."""
    try:
        return parse_size(transfer.get_from_extra_config(name, None))
    except ValueError as error:
        raise ValueError(f"OffloadingConnector: {name}: {error}") from None


class OffloadingConnector(KVConnectorBase_V1, SupportsHMA):
    """Two tiers; the scheduler side decides what they hold."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig,
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = self._kv_transfer_config
        self._plan = kv_cache_config
        slot_bytes = pool_bytes_per_block(kv_cache_config)
        num_slots = _num_slots(transfer, slot_bytes)
        store = model_store(vllm_config, transfer, "disk_path")
        self.scheduler: OffloadingScheduler | None = None
        self.worker: OffloadingWorker | None = None
        if role is KVConnectorRole.WORKER:
            self.worker = OffloadingWorker(num_slots, slot_bytes, store)
            return
        policy = transfer.get_from_extra_config("eviction_policy", "lru")
        events = vllm_config.kv_events_config
        limit = transfer.get_from_extra_config("disk_bytes_to_use", None)
        if limit is not None:
            limit = _size(transfer, "disk_bytes_to_use")
        self.scheduler = OffloadingScheduler(
            PrefixBlocks(kv_cache_config),
            SlotCache(num_slots, policy_by_name(policy, num_slots)),
            store and DiskIndex(store, limit),
            num_workers=vllm_config.parallel_config.world_size,
            block_bytes=slot_bytes,
            loads=transfer.is_kv_consumer,
            saves=transfer.is_kv_producer,
            has_events=events is not None and events.enable_kv_cache_events,
        )

    # --- scheduler side ---------------------------------------------------------------

    @property
    def _scheduler(self) -> OffloadingScheduler:
        if self.scheduler is None:
            raise RuntimeError("this is the worker side of the connector")
        return self.scheduler

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._scheduler.blocks.bind(kv_cache_manager)
        self._scheduler.block_pool = kv_cache_manager.block_pool

    def on_new_request(self, request: Any) -> None:
        self._scheduler.blocks.add(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        found = self._scheduler.find(request, num_computed_tokens)
        return found, bool(found)

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        if num_external_tokens:
            self._scheduler.load(request, blocks, num_external_tokens)

    def build_connector_meta(
        self, scheduler_output: SchedulerOutput
    ) -> OffloadingMetadata:
        return self._scheduler.take_orders(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        news = connector_output.kv_connector_worker_meta
        if isinstance(news, OffloadingNews):
            self._scheduler.take_news(news)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._scheduler.forget(request)
        return False, None  # stores hold their blocks themselves

    def has_pending_block_frees(self) -> bool:
        return self._scheduler.has_jobs

    def has_pending_push_work(self) -> bool:
        return self._scheduler.has_jobs

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[str, int]:
        return self._scheduler.hit_sources(request, num_external_tokens)

    def take_events(self) -> list[KVCacheEvent]:
        return self._scheduler.take_events()

    def reset_cache(self) -> bool:
        return self._scheduler.reset()

    # --- worker side ------------------------------------------------------------------

    @property
    def _worker(self) -> OffloadingWorker:
        if self.worker is None:
            raise RuntimeError("this is the scheduler side of the connector")
        return self.worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        worker = self._worker
        # Beside the KV cache, which has its memory by now.
        _check_memory(worker.num_slots * worker.slot_bytes)
        if worker.store is not None:
            worker.store.open(layout_fingerprint(self._plan))
        worker.register(self._plan, kv_caches)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        orders = self._connector_metadata
        if isinstance(orders, OffloadingMetadata):
            self._worker.before_forward(orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        return  # requests wait for their loads outside of steps

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: Any,
        **kwargs: Any,
    ) -> None:
        return  # whole blocks are stored after the forward pass

    def wait_for_save(self) -> None:
        orders = self._connector_metadata
        if isinstance(orders, OffloadingMetadata):
            self._worker.after_forward(orders)

    def get_finished(
        self, finished_req_ids: set[str]
    ) -> tuple[set[str] | None, set[str] | None]:
        return None, self._worker.take_received() or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_failed_block_ids()

    def build_connector_worker_meta(self) -> OffloadingNews | None:
        return self._worker.take_news()

    # --- both sides -------------------------------------------------------------------

    def get_kv_connector_stats(self) -> TransferStats | None:
        side = self.worker or self._scheduler
        return side.take_stats()

    def shutdown(self) -> None:
        if self.worker is not None:
            self.worker.shutdown()

    @classmethod
    def check_config(
        cls, transfer: KVTransferConfig, block_bytes: int | None = None
    ) -> None:
        """ValueError for sizes that are none, and for memory that the host has not."""
        _, num_bytes = _asked(transfer)
        if transfer.get_from_extra_config("disk_bytes_to_use", None) is not None:
            _size(transfer, "disk_bytes_to_use")
        policy_by_name(transfer.get_from_extra_config("eviction_policy", "lru"), 2)
        if block_bytes is not None:
            num_bytes = _num_slots(transfer, block_bytes) * block_bytes
        _check_memory(num_bytes)

    @classmethod
    def check_plan(
        cls, vllm_config: VllmConfig, transfer: KVTransferConfig, plan: KVCacheConfig
    ) -> None:
        store = model_store(vllm_config, transfer, "disk_path")
        if store is not None:
            store.open(layout_fingerprint(plan))

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> TransferStats:
        return TransferStats(dict(data or {}))

    @classmethod
    def build_prom_metrics(cls, *args: Any, **kwargs: Any) -> TransferPromMetrics:
        return TransferPromMetrics(*args, **kwargs)


def _check_memory(num_bytes: int) -> None:
    free = available_memory_bytes()
    if num_bytes > free:
        raise ValueError(
            f"KV blocks are to be kept in {format_gib(num_bytes)} GiB of host memory, "
            f"which has {format_gib(free)} GiB left: lower --kv-offloading-size or "
            "cpu_bytes_to_use"
        )
