"""A connector as others write it: blocks as raw bytes, layer by layer, one group.

Uses the interface only: caches whose first axis is blocks, and SchedulerOutput.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)

#: (tokens up to the block's end, layer) -> dtype name and bytes.
STORE: dict[tuple[tuple[int, ...], str], tuple[str, bytes]] = {}
BLOCK = 16


@dataclass
class Orders(KVConnectorMetadata):
    loads: list[tuple[tuple[int, ...], int]] = field(default_factory=list)
    saves: list[tuple[tuple[int, ...], int]] = field(default_factory=list)


class BlockBytesConnector(KVConnectorBase_V1):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.to_load: dict[str, tuple[Any, int]] = {}
        self.caches: dict[str, torch.Tensor] = {}

    def get_num_new_matched_tokens(self, request: Any, n: int) -> tuple[int, bool]:
        tokens, end = request.prompt_token_ids, n
        while end + BLOCK < len(tokens) and any(
            key[0] == tuple(tokens[: end + BLOCK]) for key in STORE
        ):
            end += BLOCK
        return end - n, False

    def update_state_after_alloc(self, request: Any, blocks: Any, n: int) -> None:
        if n:
            self.to_load[request.request_id] = (request, n)

    def build_connector_meta(self, scheduler_output: Any) -> Orders:
        orders = Orders()
        for new in scheduler_output.scheduled_new_reqs:
            tokens, (ids,) = new.prompt_token_ids, new.block_ids
            _, num_loaded = self.to_load.pop(new.req_id, (None, 0))
            num_computed = new.num_computed_tokens
            end = num_computed + scheduler_output.num_scheduled_tokens[new.req_id]
            for index in range((num_computed - num_loaded) // BLOCK, end // BLOCK):
                stop = (index + 1) * BLOCK
                where = orders.loads if stop <= num_computed else orders.saves
                where.append((tuple(tokens[:stop]), ids[index]))
        return orders

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.caches = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for tokens, block_id in self._get_connector_metadata().loads:
            for name, cache in self.caches.items():
                dtype, blob = STORE[tokens, name]
                assert dtype == str(cache.dtype)
                raw = torch.frombuffer(bytearray(blob), dtype=torch.uint8)
                page = cache[block_id]
                page.copy_(raw.view(cache.dtype).view(page.shape))

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        for tokens, block_id in self._get_connector_metadata().saves:
            page = kv_layer[block_id].contiguous().view(torch.uint8)
            STORE[tokens, layer_name] = (
                str(kv_layer.dtype),
                page.numpy().tobytes(),
            )

    def wait_for_save(self) -> None:
        return
