"""All KV blocks of one engine: which are free, which are cached, under which hash.

Knows block ids, hashes and reference counts. Knows nothing of layers, pages or policy.
"""

from collections.abc import Iterable, Sequence

from vllm.distributed.kv_events import (
    MEDIUM_GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from vllm.logger import init_logger
from vllm.v1.core.block_hash import (
    BlockHash,
    BlockHashWithGroupId,
    FreeKVCacheBlockQueue,
    KVCacheBlock,
    KVCacheInvariantError,
    block_hashes_of_size,
    generate_block_hash_extra_keys,
    get_block_hash,
    get_group_id,
    group_id_suffix,
    make_block_hash_with_group_id,
    need_extra_keys,
)
from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector
from vllm.v1.request import Request

logger = init_logger(__name__)


class BlockHashToBlockMap:
    """Cached blocks by key. Several blocks may hold the same content: two requests that
    ran side by side computed it twice, and block tables never change under a request.

    Most keys have one block, stored bare; only duplicates pay for a dict.
    """

    def __init__(self) -> None:
        self._cache: dict[
            BlockHashWithGroupId, KVCacheBlock | dict[int, KVCacheBlock]
        ] = {}

    def get_one_block(self, key: BlockHashWithGroupId) -> KVCacheBlock | None:
        """Any block with this key, or None."""
        found = self._cache.get(key)
        if isinstance(found, dict):
            return next(iter(found.values()))
        return found

    def insert(self, key: BlockHashWithGroupId, block: KVCacheBlock) -> None:
        """Adds a block under its key."""
        found = self._cache.get(key)
        if found is None:
            self._cache[key] = block
        elif isinstance(found, dict):
            found[block.block_id] = block
        else:
            self._cache[key] = {found.block_id: found, block.block_id: block}

    def pop(self, key: BlockHashWithGroupId, block_id: int) -> KVCacheBlock | None:
        """Removes this very block; None when it is not stored under the key."""
        found = self._cache.get(key)
        if isinstance(found, dict):
            block = found.pop(block_id, None)
            if len(found) == 1:
                self._cache[key] = next(iter(found.values()))
            return block
        if found is None or found.block_id != block_id:
            return None
        del self._cache[key]
        return found

    def __contains__(self, key: BlockHashWithGroupId) -> bool:
        return key in self._cache

    def __len__(self) -> int:
        return len(self._cache)


class BlockPool:
    """Hands blocks out and takes them back; keeps freed blocks cached until reused.

    Block 0 is the null block: a placeholder in block tables, never handed out. Freed
    blocks without content worth keeping go to the front of the free queue, cached ones
    to the back, so that the least recently used cached block is reused last of all.
    """

    def __init__(
        self,
        num_gpu_blocks: int,
        enable_caching: bool,
        hash_block_size: int,
        enable_kv_cache_events: bool = False,
        metrics_collector: KVCacheMetricsCollector | None = None,
    ) -> None:
        if num_gpu_blocks < 1:
            raise ValueError(
                f"a block pool needs at least 1 block (the null block), got "
                f"{num_gpu_blocks}: give the KV cache more memory"
            )
        self.num_gpu_blocks = num_gpu_blocks
        self.enable_caching = enable_caching
        self.hash_block_size = hash_block_size
        self.enable_kv_cache_events = enable_kv_cache_events
        self.metrics_collector = metrics_collector
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_gpu_blocks)]
        self.free_block_queue = FreeKVCacheBlockQueue(self.blocks)
        self.cached_block_hash_to_block = BlockHashToBlockMap()
        self.kv_event_queue: list[KVCacheEvent] = []
        self.null_block = self.free_block_queue.popleft()
        self.null_block.is_null = True
        # Blocks that no request will ever get: the null block and reserved ones.
        self.num_reserved_blocks = 1

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that requests can hold, all together."""
        return self.num_gpu_blocks - self.num_reserved_blocks

    def get_cached_block(
        self, block_hash: BlockHash, kv_cache_group_ids: list[int]
    ) -> list[KVCacheBlock] | None:
        """The cached block of each group, or None unless every group has one."""
        found = []
        for group_id in kv_cache_group_ids:
            key = make_block_hash_with_group_id(block_hash, group_id)
            block = self.cached_block_hash_to_block.get_one_block(key)
            if block is None:
                return None
            found.append(block)
        return found

    def get_cached_run(
        self, block_hashes: Iterable[BlockHash], kv_cache_group_ids: list[int]
    ) -> list[list[KVCacheBlock]]:
        """The cached blocks of each group, up to the first hash that a group lacks."""
        runs: list[list[KVCacheBlock]] = []
        get_one_block = self.cached_block_hash_to_block.get_one_block
        hashes = list(block_hashes)
        for group_id in kv_cache_group_ids:
            suffix = group_id_suffix(group_id)
            run: list[KVCacheBlock] = []
            for block_hash in hashes:
                block = get_one_block(BlockHashWithGroupId(block_hash + suffix))
                if block is None:
                    break
                run.append(block)
            runs.append(run)
            del hashes[len(run) :]
        return [run[: len(hashes)] for run in runs]

    def cache_full_blocks(
        self,
        request: Request,
        blocks: list[KVCacheBlock],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: list[bool] | None = None,
    ) -> None:
        """Caches blocks [num_cached_blocks, num_full_blocks) of a request.

        Null blocks, and blocks whose entry of `block_mask` (one for each block of the
        range) is False, are left out. Raises KVCacheInvariantError when the request has
        not hashed that many tokens.
        """
        hashes = block_hashes_of_size(request, self.hash_block_size, block_size)
        if num_full_blocks > len(hashes):
            raise KVCacheInvariantError(
                f"request {request.request_id!r} has {len(hashes)} hashes of "
                f"{block_size} tokens, but {num_full_blocks} blocks are to be cached"
            )
        stored: list[int] = []
        for index in range(num_cached_blocks, num_full_blocks):
            block = blocks[index]
            masked = (
                block_mask is not None and not block_mask[index - num_cached_blocks]
            )
            if block.is_null or masked:
                continue
            key = make_block_hash_with_group_id(hashes[index], kv_cache_group_id)
            block.set_block_hash(key)
            self.cached_block_hash_to_block.insert(key, block)
            stored.append(index)
        if self.enable_kv_cache_events:
            self._emit_stored(request, stored, block_size, kv_cache_group_id)

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Takes free blocks, evicting what they cached. ValueError when there are too
        few: ask `get_num_free_blocks` first."""
        if num_blocks > self.get_num_free_blocks():
            raise ValueError(
                f"Cannot get {num_blocks} free blocks from the pool: "
                f"{self.get_num_free_blocks()} are free"
            )
        blocks = self.free_block_queue.popleft_n(num_blocks)
        collector = self.metrics_collector
        for block in blocks:
            if block.ref_cnt != 0:
                raise KVCacheInvariantError(
                    f"block {block.block_id} is in the free queue but held by "
                    f"{block.ref_cnt} requests"
                )
            if block.block_hash is not None or collector is not None:
                self._maybe_evict_cached_block(block)
            block.ref_cnt = 1
            if collector is not None:
                collector.on_block_allocated(block)
        return blocks

    def reserve_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Takes blocks for good, before any request runs."""
        blocks = self.get_new_blocks(num_blocks)
        self.num_reserved_blocks += num_blocks
        return blocks

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Adds a holder to cached blocks, so that they cannot be reused meanwhile."""
        for block in blocks:
            if block.is_null:
                continue
            if block.ref_cnt == 0:
                self.free_block_queue.remove(block)
            block.ref_cnt += 1
            if self.metrics_collector is not None:
                self.metrics_collector.on_block_accessed(block)

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """Drops one holder of each block; the first of those left free is reused first.

        Raises KVCacheInvariantError for a block that is free already.
        """
        cached, uncached = [], []
        for block in ordered_blocks:
            if block.is_null:
                continue
            if block.next_free_block is not None:
                raise KVCacheInvariantError(f"block {block.block_id} is freed twice")
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                (uncached if block.block_hash is None else cached).append(block)
        self.free_block_queue.prepend_n(uncached)
        self.free_block_queue.append_n(cached)

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Forgets what these blocks cache. Their holders keep them."""
        for block_id in block_ids:
            if not 0 <= block_id < self.num_gpu_blocks:
                raise ValueError(
                    f"block id {block_id} is not in a pool of {self.num_gpu_blocks}"
                )
            self._maybe_evict_cached_block(self.blocks[block_id])

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached content. False, and nothing happens, while a request holds
        any block.

        Blocks are then taken in their first order: memory that pages lay in before
        memory that nobody touched yet.
        """
        num_held = self.num_usable_blocks - self.get_num_free_blocks()
        if num_held:
            logger.warning(
                "the prefix cache is not reset: requests hold %d blocks", num_held
            )
            return False
        self.cached_block_hash_to_block = BlockHashToBlockMap()
        for block in self.blocks:
            block.reset_hash()
        free = self.free_block_queue.popleft_n(self.get_num_free_blocks())
        self.free_block_queue.append_n(sorted(free, key=lambda block: block.block_id))
        if self.metrics_collector is not None:
            self.metrics_collector.reset()
        if self.enable_kv_cache_events:
            self.kv_event_queue.append(AllBlocksCleared())
        return True

    def get_num_free_blocks(self) -> int:
        """Blocks that can be taken, cached or not."""
        return self.free_block_queue.num_free_blocks

    def get_usage(self) -> float:
        """The share of usable blocks that requests hold, 0 to 1."""
        usable = self.num_usable_blocks
        return 1.0 - self.get_num_free_blocks() / usable if usable else 0.0

    def take_events(self) -> list[KVCacheEvent]:
        """The events since the last call."""
        events, self.kv_event_queue = self.kv_event_queue, []
        return events

    def _maybe_evict_cached_block(self, block: KVCacheBlock) -> bool:
        """Forgets what a block caches; says whether it cached anything."""
        if self.metrics_collector is not None:
            self.metrics_collector.on_block_evicted(block)
        key = block.block_hash
        if key is None:
            return False
        if self.cached_block_hash_to_block.pop(key, block.block_id) is None:
            return False
        block.reset_hash()
        # Subscribers keep a set of hashes: a hash goes when its last copy goes.
        if self.enable_kv_cache_events and key not in self.cached_block_hash_to_block:
            self.kv_event_queue.append(
                BlockRemoved(
                    block_hashes=[get_block_hash(key)],
                    medium=MEDIUM_GPU,
                    group_idx=get_group_id(key),
                )
            )
        return True

    def _emit_stored(
        self, request: Request, stored: list[int], block_size: int, group_id: int
    ) -> None:
        """One event for each run of consecutive block indices."""
        start = 0
        for i in range(1, len(stored) + 1):
            if i == len(stored) or stored[i] != stored[i - 1] + 1:
                self.kv_event_queue.append(
                    self._stored_event(
                        request, stored[start], stored[i - 1] + 1, block_size, group_id
                    )
                )
                start = i

    def _stored_event(
        self, request: Request, first: int, end: int, block_size: int, group_id: int
    ) -> BlockStored:
        hashes = block_hashes_of_size(request, self.hash_block_size, block_size)
        lora = request.lora_request
        extra_keys = None
        if need_extra_keys(request):
            extra_keys = [
                generate_block_hash_extra_keys(
                    request, index * block_size, (index + 1) * block_size, 0
                )[0]
                for index in range(first, end)
            ]
        return BlockStored(
            block_hashes=[hashes[index] for index in range(first, end)],
            parent_block_hash=hashes[first - 1] if first else None,
            token_ids=request.all_token_ids[first * block_size : end * block_size],
            block_size=block_size,
            lora_id=None if lora is None else lora.adapter_id,
            medium=MEDIUM_GPU,
            lora_name=None if lora is None else lora.name,
            extra_keys=extra_keys,
            group_idx=group_id,
        )
