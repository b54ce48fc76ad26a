"""Which blocks the tiers hold, told to routers by the hashes of the engine's events.

Knows blocks by key and by hash. Blocks that an earlier engine left on disk have no hash
here until a request asks for them.
"""

from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.prefix_blocks import (
    BlockRef,
    PrefixBlocks,
)

MEMORY = "CPU"
DISK = "DISK"


class TierEvents:
    """Events since the last `take`. Does nothing unless it `is_on`."""

    def __init__(self, blocks: PrefixBlocks, is_on: bool) -> None:
        self.is_on = is_on
        self._blocks = blocks
        self._events: list[KVCacheEvent] = []
        # What is said of a block when it is stored, and where it is.
        self._stored: dict[str, BlockStored] = {}
        self._places: dict[str, set[str]] = {}

    def learn(self, request: Any, refs: Iterable[BlockRef]) -> None:
        """Notes what blocks are, while the request is known."""
        if not self.is_on:
            return
        for ref in refs:
            if ref.key not in self._stored:
                self._stored[ref.key] = self._event(request, ref)

    def _event(self, request: Any, ref: BlockRef) -> BlockStored:
        group_id, index = ref.group_id, ref.index
        name, positions = self._blocks.published(request, group_id, index)
        before = None
        if index:
            before, _ = self._blocks.published(request, group_id, index - 1)
        lora = request.lora_request
        return BlockStored(
            block_hashes=[name],
            parent_block_hash=before,
            token_ids=list(request.all_token_ids[positions.start : positions.stop]),
            block_size=len(positions),
            lora_id=None if lora is None else lora.adapter_id,
            medium=None,
            lora_name=None if lora is None else lora.name,
            group_idx=group_id,
        )

    def stored(self, keys: Iterable[str], medium: str) -> None:
        """Blocks have come to a tier."""
        for key in keys:
            said = self._stored.get(key)
            if said is not None:
                self._places.setdefault(key, set()).add(medium)
                fields = {name: getattr(said, name) for name in said.__struct_fields__}
                self._events.append(BlockStored(**(fields | {"medium": medium})))

    def removed(self, keys: Iterable[str], medium: str) -> None:
        """Blocks have left a tier, or did not come to it."""
        for key in keys:
            places = self._places.get(key, set())
            if medium in places:
                said = self._stored[key]
                self._events.append(
                    BlockRemoved(
                        block_hashes=said.block_hashes,
                        medium=medium,
                        group_idx=said.group_idx,
                    )
                )
                places.discard(medium)
            if not places:
                self._places.pop(key, None)
                self._stored.pop(key, None)

    def take(self) -> list[KVCacheEvent]:
        taken, self._events = self._events, []
        return taken
