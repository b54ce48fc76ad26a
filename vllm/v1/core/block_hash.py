"""Names of KV blocks: content hashes, the block record and the queue of free blocks.

Knows token ids and what else decides a block's content. Knows nothing of pages, bytes
or of who holds a block.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NewType

from vllm.utils.hashing import sha256
from vllm.v1.request import Request
from vllm.v1.utils import tensor_data

BlockHash = NewType("BlockHash", bytes)
"""Hash of one block of tokens and of everything before it."""

BlockHashWithGroupId = NewType("BlockHashWithGroupId", bytes)
"""A block hash followed by the id of a KV cache group: four bytes, big-endian."""

HashFn = Callable[[Any], bytes]

_GROUP_ID_BYTES = 4

NONE_HASH: BlockHash = BlockHash(b"")
"""Stands for the parent of a first block. Set by `init_none_hash`."""


class KVCacheInvariantError(AssertionError, RuntimeError):
    """The bookkeeping of blocks contradicts itself: pages may be shared by mistake."""


def init_none_hash(hash_fn: HashFn) -> None:
    """Chooses the root of all hash chains.

    Random per process, so that nobody can precompute hashes that collide; the hash of
    PYTHONHASHSEED where that is set, so that several processes agree.
    """
    global NONE_HASH
    seed = os.environ.get("PYTHONHASHSEED")
    NONE_HASH = BlockHash(os.urandom(32) if seed is None else hash_fn(seed))


def make_block_hash_with_group_id(
    block_hash: BlockHash, group_id: int
) -> BlockHashWithGroupId:
    """The key of a block in one KV cache group."""
    return BlockHashWithGroupId(block_hash + group_id_suffix(group_id))


def group_id_suffix(group_id: int) -> bytes:
    """What a key of this group ends with."""
    return group_id.to_bytes(_GROUP_ID_BYTES, "big")


def get_block_hash(key: BlockHashWithGroupId) -> BlockHash:
    """The block hash inside a key."""
    return BlockHash(key[:-_GROUP_ID_BYTES])


def get_group_id(key: BlockHashWithGroupId) -> int:
    """The group id inside a key."""
    return int.from_bytes(key[-_GROUP_ID_BYTES:], "big")


@dataclass(slots=True)
class KVCacheBlock:
    """One block of the pool: who holds it, what it caches, where it waits.

    `ref_cnt` counts the requests that hold it. `prev_free_block` and `next_free_block`
    are set only while it is in the free queue. The null block stands for positions that
    need no memory; it is never counted, cached or freed.
    """

    block_id: int
    ref_cnt: int = 0
    _block_hash: BlockHashWithGroupId | None = None
    _block_hash_num_tokens: int | None = None
    prev_free_block: "KVCacheBlock | None" = None
    next_free_block: "KVCacheBlock | None" = None
    is_null: bool = False

    @property
    def block_hash(self) -> BlockHashWithGroupId | None:
        """The key under which the block is cached, or None."""
        return self._block_hash

    @property
    def block_hash_num_tokens(self) -> int | None:
        """How many tokens of the block the hash covers; None means all of them."""
        return self._block_hash_num_tokens

    def set_block_hash(
        self, block_hash: BlockHashWithGroupId, num_tokens: int | None = None
    ) -> None:
        """Gives the block its key. Raises KVCacheInvariantError when it has one."""
        if self._block_hash is not None:
            raise KVCacheInvariantError(
                f"block {self.block_id} is cached under another hash: reset it first"
            )
        self._block_hash = block_hash
        self._block_hash_num_tokens = num_tokens

    def reset_hash(self) -> None:
        """Forgets the key, when the block is evicted."""
        self._block_hash = None
        self._block_hash_num_tokens = None

    def __repr__(self) -> str:
        def block_id(block: "KVCacheBlock | None") -> int | None:
            return None if block is None else block.block_id

        return (
            f"KVCacheBlock(block_id={self.block_id}, ref_cnt={self.ref_cnt}, "
            f"_block_hash={self._block_hash!r}, "
            f"prev_free_block={block_id(self.prev_free_block)}, "
            f"next_free_block={block_id(self.next_free_block)})"
        )


class KVCacheBlockCopy(NamedTuple):
    """A copy of one block's pages to another block."""

    src_block_id: int
    dst_block_id: int


class FreeKVCacheBlockQueue:
    """Free blocks in the order in which they will be taken: every act is O(1) a block.

    A doubly linked list through the blocks themselves, between two sentinels. The front
    is taken first, so cached blocks appended at the back live longest.
    """

    def __init__(self, blocks: list[KVCacheBlock]) -> None:
        self.num_free_blocks = 0
        self.fake_free_list_head = KVCacheBlock(block_id=-1)
        self.fake_free_list_tail = KVCacheBlock(block_id=-1)
        self.fake_free_list_head.next_free_block = self.fake_free_list_tail
        self.fake_free_list_tail.prev_free_block = self.fake_free_list_head
        self.append_n(blocks)

    def popleft(self) -> KVCacheBlock:
        """Takes the first block. Raises ValueError when there is none."""
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """Takes the first n blocks. Raises ValueError when there are fewer."""
        if n > self.num_free_blocks:
            raise ValueError("No free blocks available")
        taken: list[KVCacheBlock] = []
        block = self.fake_free_list_head.next_free_block
        for _ in range(n):
            if block is None:
                raise KVCacheInvariantError("the free queue ends before its count")
            taken.append(block)
            following = block.next_free_block
            block.prev_free_block = block.next_free_block = None
            block = following
        if taken:
            if block is None:
                raise KVCacheInvariantError("the free queue lost its end")
            self.fake_free_list_head.next_free_block = block
            block.prev_free_block = self.fake_free_list_head
            self.num_free_blocks -= n
        return taken

    def remove(self, block: KVCacheBlock) -> None:
        """Takes one block from anywhere. Raises RuntimeError when it is not queued."""
        before, after = block.prev_free_block, block.next_free_block
        if before is None or after is None:
            raise RuntimeError(f"block {block.block_id} is not in the free queue")
        before.next_free_block = after
        after.prev_free_block = before
        block.prev_free_block = block.next_free_block = None
        self.num_free_blocks -= 1

    def append(self, block: KVCacheBlock) -> None:
        """Adds one block at the back."""
        self.append_n([block])

    def append_n(self, blocks: list[KVCacheBlock]) -> None:
        """Adds blocks at the back, in their order."""
        last = self.fake_free_list_tail.prev_free_block
        if last is None:
            raise KVCacheInvariantError("the free queue lost its end")
        self._insert_after(last, blocks)

    def prepend_n(self, blocks: list[KVCacheBlock]) -> None:
        """Adds blocks at the front, in their order: the first is taken next."""
        self._insert_after(self.fake_free_list_head, blocks)

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """All free blocks in order. Walks the queue: for tests."""
        blocks = []
        block = self.fake_free_list_head.next_free_block
        while block is not None and block is not self.fake_free_list_tail:
            blocks.append(block)
            block = block.next_free_block
        return blocks

    def _insert_after(self, before: KVCacheBlock, blocks: list[KVCacheBlock]) -> None:
        after = before.next_free_block
        if after is None:
            raise KVCacheInvariantError("the free queue lost its end")
        for block in blocks:
            if block.next_free_block is not None:
                raise KVCacheInvariantError(f"block {block.block_id} is freed twice")
            before.next_free_block = block
            block.prev_free_block = before
            # Set at once, so that a block given twice in one call is noticed.
            block.next_free_block = after
            before = block
        before.next_free_block = after
        after.prev_free_block = before
        self.num_free_blocks += len(blocks)


def hash_block_tokens(
    hash_function: HashFn,
    parent_block_hash: BlockHash | None,
    curr_block_token_ids: Sequence[int],
    extra_keys: tuple[Any, ...] | None = None,
) -> BlockHash:
    """The hash of one block, given that of all blocks before it (None: no block)."""
    parent = parent_block_hash or NONE_HASH
    return BlockHash(hash_function((parent, tuple(curr_block_token_ids), extra_keys)))


def need_extra_keys(request: Request) -> bool:
    """Says whether anything besides the tokens decides what a block holds."""
    return bool(
        request.mm_features
        or request.lora_request is not None
        or request.cache_salt is not None
        or request.prompt_embeds is not None
    )


def _multimodal_keys(
    request: Request, start: int, end: int, start_mm_idx: int
) -> tuple[list[Any], int]:
    """Items that overlap tokens [start, end) as (identifier, offset in the block), and
    the index of the first item that a later block may overlap. Items are in order."""
    keys: list[Any] = []
    features = request.mm_features
    index = len(features) + start_mm_idx if start_mm_idx < 0 else start_mm_idx
    while index < len(features):
        position = features[index].mm_position
        item_end = position.offset + position.length
        if position.offset >= end:
            break
        if item_end > start:
            keys.append((features[index].identifier, position.offset - start))
        if item_end > end:
            break
        index += 1
    return keys, index


def generate_block_hash_extra_keys(
    request: Request, start_token_idx: int, end_token_idx: int, start_mm_idx: int
) -> tuple[tuple[Any, ...] | None, int]:
    """What decides the content of tokens [start, end) besides the tokens themselves.

    In this order: the LoRA adapter's name, multimodal items, the cache salt (first
    block only: the chain carries it on), a digest of the prompt embeddings. Returns
    None when there is nothing, and the multimodal index at which the next block starts
    to look.
    """
    keys: list[Any] = []
    if request.lora_request is not None:
        keys.append(request.lora_request.lora_name)
    mm_keys, next_mm_idx = _multimodal_keys(
        request, start_token_idx, end_token_idx, start_mm_idx
    )
    keys.extend(mm_keys)
    if start_token_idx == 0 and request.cache_salt:
        keys.append(request.cache_salt)
    if request.prompt_embeds is not None:
        embeds = request.prompt_embeds[start_token_idx:end_token_idx]
        if len(embeds):
            keys.append(sha256(bytes(tensor_data(embeds))))
    return (tuple(keys) or None), next_mm_idx


def get_request_block_hasher(
    hash_block_size: int, caching_hash_fn: HashFn
) -> Callable[[Request], list[BlockHash]]:
    """A function that hashes those full blocks of a request that have no hash yet."""

    def hash_new_blocks(request: Request) -> list[BlockHash]:
        start = len(request.block_hashes) * hash_block_size
        if start + hash_block_size > request.num_tokens:
            return []
        parent = request.block_hashes[-1] if request.block_hashes else None
        has_extra_keys = need_extra_keys(request)
        # The chain has passed all earlier items; generated tokens meet none.
        mm_idx, extra_keys = 0, None
        tokens = request.all_token_ids
        hashes: list[BlockHash] = []
        for block_start in range(
            start, request.num_tokens - hash_block_size + 1, hash_block_size
        ):
            end = block_start + hash_block_size
            if has_extra_keys:
                extra_keys, mm_idx = generate_block_hash_extra_keys(
                    request, block_start, end, mm_idx
                )
            parent = hash_block_tokens(
                caching_hash_fn, parent, tokens[block_start:end], extra_keys
            )
            hashes.append(parent)
        return hashes

    return hash_new_blocks


class BlockHashListWithBlockSize(Sequence[BlockHash]):
    """Hashes of larger blocks, read from the hashes of small ones.

    Hashes are chained, so the last small hash of a larger block already names all of
    its content and everything before it. Raises ValueError when the sizes do not
    divide.
    """

    def __init__(
        self,
        block_hashes: list[BlockHash],
        hash_block_size: int,
        target_block_size: int,
    ) -> None:
        if target_block_size % hash_block_size:
            raise ValueError(
                f"block size {target_block_size} is no multiple of the hash block size "
                f"{hash_block_size}: choose hash blocks that divide all groups' blocks"
            )
        self.block_hashes = block_hashes
        self.scale_factor = target_block_size // hash_block_size

    def __len__(self) -> int:
        return len(self.block_hashes) // self.scale_factor

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"block {index} of {len(self)}")
        return self.block_hashes[(position + 1) * self.scale_factor - 1]

    def __iter__(self) -> Iterator[BlockHash]:
        step = self.scale_factor
        yield from self.block_hashes[step - 1 :: step]


BlockHashList = list[BlockHash] | BlockHashListWithBlockSize


def block_hashes_of_size(
    request: Request, hash_block_size: int, block_size: int
) -> BlockHashList:
    """The request's hashes for blocks of `block_size` tokens."""
    if block_size == hash_block_size:
        return request.block_hashes
    return BlockHashListWithBlockSize(request.block_hashes, hash_block_size, block_size)
