"""Pretends that every prompt was computed elsewhere, to measure decoding alone.

The pages of a prompt are filled with one byte, so the text means nothing.
`kv_connector_extra_config`: `fill_byte` (0).
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.page_table import BlockMover
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.forward_context import ForwardContext
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig


@dataclass
class DecodeBenchMetadata(KVConnectorMetadata):
    """Blocks to fill in this step, by KV cache group."""

    block_ids: list[list[int]] = field(default_factory=list)


class DecodeBenchConnector(KVConnectorBase_V1, SupportsHMA):
    """Every prompt is a hit but for its last token."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig,
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._plan = kv_cache_config
        fill = self._kv_transfer_config.get_from_extra_config("fill_byte", 0)
        self._fill_byte = int(fill or 0)
        self._mover: BlockMover | None = None
        self._num_local: dict[str, int] = {}
        self._orders = self._no_orders()

    def _no_orders(self) -> DecodeBenchMetadata:
        return DecodeBenchMetadata([[] for _ in self._plan.kv_cache_groups])

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        self._num_local[request.request_id] = num_computed_tokens
        return max(request.num_tokens - 1 - num_computed_tokens, 0), False

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        num_local = self._num_local.pop(request.request_id, 0)
        if not num_external_tokens:
            return
        for group_id, group in enumerate(blocks.blocks):
            spec = self._plan.kv_cache_groups[group_id].kv_cache_spec
            # A block that begins with local tokens may be another request's, too.
            first = -(-num_local // spec.block_size)
            self._orders.block_ids[group_id] += [
                block.block_id for block in group[first:] if not block.is_null
            ]

    def build_connector_meta(
        self, scheduler_output: SchedulerOutput
    ) -> DecodeBenchMetadata:
        orders, self._orders = self._orders, self._no_orders()
        return orders

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._num_local.pop(request.request_id, None)
        return False, None

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._mover = BlockMover(self._plan, kv_caches)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        orders = self._connector_metadata
        if self._mover is None or not isinstance(orders, DecodeBenchMetadata):
            return
        for group_id, block_ids in enumerate(orders.block_ids):
            self._mover.fill(group_id, block_ids, self._fill_byte)

    def wait_for_layer_load(self, layer_name: str) -> None:
        return  # pages are filled before the forward pass

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: Any,
        **kwargs: Any,
    ) -> None:
        return  # nothing is kept

    def wait_for_save(self) -> None:
        return
