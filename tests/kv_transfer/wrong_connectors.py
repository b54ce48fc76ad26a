"""A connector over a dict, and connectors that do one thing each wrong.

`Right` is right; the others show what the conformance kit sees.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from vllm.distributed.kv_transfer.kv_connector.utils import BlockMover
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.prefix_blocks import (
    BlockRef,
    PrefixBlocks,
)

#: Whatever was stored: by folder of the check and name of the block.
STORE: dict[tuple[str, str], Any] = {}


@dataclass
class Orders(KVConnectorMetadata):
    loads: list[BlockRef] = field(default_factory=list)
    saves: list[BlockRef] = field(default_factory=list)


class Right(KVConnectorBase_V1, SupportsHMA):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.folder = self._kv_transfer_config.get_from_extra_config("folder", "")
        self.plan = kv_cache_config
        self.blocks = PrefixBlocks(kv_cache_config)
        self.num_local: dict[str, int] = {}
        self.orders = Orders()

    # --- scheduler side

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self.blocks.bind(kv_cache_manager)

    def on_new_request(self, request: Any) -> None:
        self.blocks.add(request)

    def has(self, key: str) -> bool:
        return (self.folder, key) in STORE

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        self.num_local[request.request_id] = num_computed_tokens
        return self.blocks.longest_hit(request, num_computed_tokens, self.has), False

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        if num_external_tokens:
            self.orders.loads += self.blocks.to_load(
                request,
                blocks,
                self.num_local[request.request_id],
                num_external_tokens,
            )

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        orders, self.orders = self.orders, Orders()
        for _, refs in self.blocks.to_save(scheduler_output):
            orders.saves += [ref for ref in refs if not self.has(ref.key)]
        return orders

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        self.blocks.forget(request.request_id)
        return False, None

    # --- worker side

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self.caches = kv_caches
        self.mover = BlockMover(self.plan, kv_caches)

    def read(self, ref: BlockRef) -> Any:
        buffer = torch.empty(self.mover.block_bytes[ref.group_id], dtype=torch.uint8)
        self.mover.read(ref.group_id, ref.block_id, buffer)
        return buffer

    def write(self, ref: BlockRef, stored: Any) -> None:
        self.mover.write(ref.group_id, ref.block_id, stored)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for ref in self._get_connector_metadata().loads:
            self.write(ref, STORE[self.folder, ref.key])

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        return

    def wait_for_save(self) -> None:
        for ref in self._get_connector_metadata().saves:
            STORE[self.folder, ref.key] = self.read(ref)


# --- bytes ----------------------------------------------------------------------------


class DenseWidth(Right):
    """Takes a state for K and V of one byte an element, which is what heads and dtype
    say: scales stay behind."""

    def _parts(self, ref: BlockRef) -> list[torch.Tensor]:
        group = self.plan.kv_cache_groups[ref.group_id]
        parts = []
        for name in group.layer_names:
            spec: Any = group.layer_spec(name)
            width = spec.head_size + spec.head_size_v
            parts.append(self.caches[name][ref.block_id].view(torch.uint8)[..., :width])
        return parts

    def read(self, ref: BlockRef) -> Any:
        return [part.clone() for part in self._parts(ref)]

    def write(self, ref: BlockRef, stored: Any) -> None:
        for part, kept in zip(self._parts(ref), stored, strict=True):
            part.copy_(kept)


class SliceOfStates(Right):
    """Loads by token: of the last block only as many states as the hit has."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        found, is_async = super().get_num_new_matched_tokens(
            request, num_computed_tokens
        )
        return max(found - 5, 0), is_async

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        if num_external_tokens:
            super().update_state_after_alloc(request, blocks, num_external_tokens + 5)
            last = self.orders.loads[-1]
            self.orders.loads[-1] = BlockRef(
                key=f"{last.key}+5", group_id=last.group_id, block_id=last.block_id
            )

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for ref in self._get_connector_metadata().loads:
            key, _, rest = ref.key.partition("+")
            stored = STORE[self.folder, key]
            for name, kept in stored.items():
                num_states = kept.shape[1] - int(rest or 0)
                page = self.caches[name][ref.block_id]
                page[:, :num_states] = kept[:, :num_states]

    def read(self, ref: BlockRef) -> Any:
        names = self.plan.kv_cache_groups[ref.group_id].layer_names
        return {name: self.caches[name][ref.block_id].clone() for name in names}


class DenseStride(Right):
    """Takes a layer's pages for one after another, whatever the strides are."""

    def _pages(self, ref: BlockRef) -> list[torch.Tensor]:
        pages = []
        group = self.plan.kv_cache_groups[ref.group_id]
        for name in group.layer_names:
            cache, size = self.caches[name], group.layer_spec(name).page_size_bytes
            whole = torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage())
            start = cache.storage_offset() * cache.element_size()
            pages.append(whole[start + ref.block_id * size :][:size])
        return pages

    def read(self, ref: BlockRef) -> Any:
        return [page.clone() for page in self._pages(ref)]

    def write(self, ref: BlockRef, stored: Any) -> None:
        for page, kept in zip(self._pages(ref), stored, strict=True):
            page[: kept.numel()] = kept[: page.numel()]


class OffByOneGroup(Right):
    """Fills the blocks of one group with the pages of the next."""

    def write(self, ref: BlockRef, stored: Any) -> None:
        other = (ref.group_id + 1) % len(self.plan.kv_cache_groups)
        theirs = STORE.get((self.folder, f"{ref.key.rpartition('-')[0]}-{other}"))
        if theirs is not None:
            stored = stored.clone()
            size = min(stored.numel(), theirs.numel())
            stored[:size] = theirs[:size]
        super().write(ref, stored)


class OffByOneBlock(Right):
    """Fills every block with what came one block earlier."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        loads = self._get_connector_metadata().loads
        for ref, before in zip(
            loads, [loads[0], *loads] if loads else (), strict=False
        ):
            self.write(ref, STORE[self.folder, before.key])


class PromisesTooMuch(Right):
    """Says that it has blocks which it does not have, and loads nothing for them."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        whole = (request.num_tokens - 1) // 16 * 16
        return max(whole - num_computed_tokens, 0), False

    def update_state_after_alloc(self, request: Any, blocks: Any, n: int) -> None:
        return


class LateSave(Right):
    """Copies pages some steps later, without holding their blocks."""

    waiting: Any = None

    def wait_for_save(self) -> None:
        self.waiting = [*(self.waiting or []), self._get_connector_metadata().saves]
        if len(self.waiting) > 12:
            for ref in self.waiting.pop(0):
                STORE[self.folder, ref.key] = self.read(ref)


# --- the interface --------------------------------------------------------------------


class AsyncForNothing(Right):
    """Says that it loads outside of steps, also where there is nothing to load."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        return 0, True


class Forgetful(Right):
    """Finds a hit once, when asked for the first time."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        if request.request_id in self.num_local:
            return 0, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)


class KeepsBlocks(Right):
    """Asks to keep the blocks of finished requests, and never says that it is done."""

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        super().request_finished_all_groups(request, block_ids)
        return True, None


class NeverLoads(Right):
    """Promises loads outside of steps that do not end."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        found, _ = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return found, found > 0


class ChangesTheStep(Right):
    """Takes requests out of the step that it is shown."""

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        orders = super().build_connector_meta(scheduler_output)
        scheduler_output.finished_req_ids = set()
        return orders


class SharesObjects(Right):
    """Hands its worker side something that exists in this process only."""

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        orders = super().build_connector_meta(scheduler_output)
        orders.wake = lambda: None
        return orders


class ReportsStrangers(Right):
    """Names requests as sent of which nobody asked."""

    def get_finished(self, finished_req_ids: set[str]) -> Any:
        return set(finished_req_ids) or None, None


class SavesNothing(Right):
    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return Orders()


class OtherConstructor(Right):
    def __init__(self, kv_cache_config: Any, vllm_config: Any, role: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)


class OtherSignature(Right):
    def wait_for_layer_load(self) -> None:  # type: ignore[override]
        return
