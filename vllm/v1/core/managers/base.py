"""What managers of one KV cache group share: giving blocks and taking them back.

Knows one group's blocks by request. Knows nothing of other groups or of policy.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from typing import ClassVar

from vllm.utils.math_utils import cdiv
from vllm.v1.core.block_hash import (
    BlockHashList,
    KVCacheBlock,
    KVCacheInvariantError,
)
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.request import Request


class SingleTypeKVCacheManager(ABC):
    """Blocks of one group.

    A request's list in `req_to_blocks` has one block for each `block_size` tokens from
    position 0 on; positions that need no memory hold the null block. A request is in
    `num_cached_block` from its first allocation until it is freed.
    """

    #: Says whether every prefix of a hit is a hit, so that hits can be cut short.
    hits_are_prefix_closed: ClassVar[bool] = False
    #: Says whether a request can go back by a token, keeping its blocks.
    can_step_back: ClassVar[bool] = True
    #: Says whether token counts given to this manager are the encoder's.
    counts_encoder_tokens: ClassVar[bool] = False

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        block_pool: BlockPool,
        enable_caching: bool,
        kv_cache_group_id: int,
        scheduler_block_size: int,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
        needs_kv_cache_zeroing: bool = False,
        max_admission_blocks_per_request: int | None = None,
    ) -> None:
        self.kv_cache_spec = kv_cache_spec
        self.block_pool = block_pool
        self.enable_caching = enable_caching
        self.kv_cache_group_id = kv_cache_group_id
        self.scheduler_block_size = scheduler_block_size
        # A block is spread over the context-parallel ranks.
        self.block_size = kv_cache_spec.block_size * dcp_world_size * pcp_world_size
        self.needs_kv_cache_zeroing = needs_kv_cache_zeroing
        self.max_admission_blocks_per_request = max_admission_blocks_per_request
        self.req_to_blocks: defaultdict[str, list[KVCacheBlock]] = defaultdict(list)
        self.num_cached_block: dict[str, int] = {}
        # Leading blocks of a request that were given back already.
        self._num_skipped_blocks: dict[str, int] = {}
        self._new_block_ids: list[int] = []
        self._null_block = block_pool.null_block

    # Counting

    def num_required_blocks(self, num_tokens: int) -> int:
        """Entries of the block list of a request of `num_tokens` tokens."""
        return cdiv(num_tokens, self.block_size)

    def has_slots(self, request_id: str, num_tokens: int) -> bool:
        """Says whether a request holds all the blocks that `num_tokens` tokens take:
        then nothing is counted and allocated for it."""
        blocks = self.req_to_blocks.get(request_id, ())
        return len(blocks) >= self.num_required_blocks(num_tokens)

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Leading tokens that no later token attends to, once so many are computed."""
        return 0

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
    ) -> int:
        """How many free blocks it takes to give the request slots for `num_tokens`.

        Cached blocks that nobody holds count: they leave the free queue too. With the
        admission cap, a request that gives blocks back as it goes is counted by the
        most it holds at once.
        """
        held = len(self.req_to_blocks.get(request_id, ()))
        required = self.num_required_blocks(num_tokens)
        if request_id in self.num_cached_block:
            needed = max(required - held, 0)
        else:
            skipped = self.get_num_skipped_tokens(total_computed_tokens)
            num_skipped_blocks = skipped // self.block_size
            first_new = max(num_skipped_blocks, len(new_computed_blocks))
            reused = new_computed_blocks[num_skipped_blocks:]
            evictable = sum(not b.is_null and b.ref_cnt == 0 for b in reused)
            needed = max(required - first_new, 0) + evictable
        cap = self.max_admission_blocks_per_request
        if apply_admission_cap and cap is not None:
            needed = min(needed, cap)
        return needed

    # Giving

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        """Starts a request with the cached blocks it hit. A request that holds blocks
        already cannot hit any (KVCacheInvariantError)."""
        if request_id in self.num_cached_block:
            if new_computed_blocks:
                raise KVCacheInvariantError(
                    f"request {request_id!r} holds blocks and got further cached ones"
                )
            return
        total = num_local_computed_tokens + num_external_computed_tokens
        num_skipped_blocks = self.get_num_skipped_tokens(total) // self.block_size
        reused = new_computed_blocks[num_skipped_blocks:]
        if reused and not self.enable_caching:
            raise KVCacheInvariantError(
                f"request {request_id!r} got cached blocks while caching is off"
            )
        self.block_pool.touch(reused)
        blocks = self.req_to_blocks[request_id]
        blocks.extend([self._null_block] * num_skipped_blocks)
        blocks.extend(reused)
        self.num_cached_block[request_id] = len(blocks)

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        """Extends the request's blocks to `num_tokens` tokens; returns what was added.

        `num_tokens_main_model` leaves out the tokens that drafts look ahead.
        """
        blocks = self.req_to_blocks[request_id]
        missing = self.num_required_blocks(num_tokens) - len(blocks)
        if missing <= 0:
            return []
        new_blocks = self._take_blocks(missing)
        blocks.extend(new_blocks)
        return new_blocks

    def _take_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        new_blocks = self.block_pool.get_new_blocks(num_blocks)
        if self.records_new_block_ids:
            self._new_block_ids.extend(block.block_id for block in new_blocks)
        return new_blocks

    @property
    def records_new_block_ids(self) -> bool:
        """Says whether workers must zero new blocks of this group before use."""
        return self.needs_kv_cache_zeroing

    def take_new_block_ids(self) -> list[int]:
        """Blocks handed out since the last call, when they are to be zeroed."""
        taken, self._new_block_ids = self._new_block_ids, []
        return taken

    # Caching

    @property
    def step_alignment_tokens(self) -> int:
        """Steps had better end at multiples of this position, so that their result can
        be cached; 1 when every position is as good."""
        return 1

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Caches the full blocks among the first `num_tokens` tokens."""
        num_cached = self.num_cached_block.get(request.request_id, 0)
        num_full = num_tokens // self.block_size
        if num_full <= num_cached:
            return
        self.block_pool.cache_full_blocks(
            request=request,
            blocks=self.req_to_blocks[request.request_id],
            num_cached_blocks=num_cached,
            num_full_blocks=num_full,
            block_size=self.block_size,
            kv_cache_group_id=self.kv_cache_group_id,
        )
        self.num_cached_block[request.request_id] = num_full

    @classmethod
    @abstractmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: BlockHashList,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: BlockPool,
        kv_cache_spec: KVCacheSpec,
        drop_eagle_block: bool,
        alignment_tokens: int,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """The longest cached prefix within `max_length` tokens, in whole alignments.

        Returns one block list for each group id, null where no block is needed, and the
        length in tokens. `block_hashes` are hashes of this spec's blocks. With
        `drop_eagle_block` the last block of a hit is given up, for a draft model that
        needs its hidden states.
        """

    # Taking back

    @property
    def gives_back_early(self) -> bool:
        """Says whether blocks may come free while their request goes on."""
        ours, base = type(self), SingleTypeKVCacheManager
        return (
            ours.get_num_skipped_tokens is not base.get_num_skipped_tokens
            or ours.remove_skipped_blocks is not base.remove_skipped_blocks
        )

    def remove_skipped_blocks(
        self,
        request_id: str,
        processed_computed_tokens: int,
        num_prompt_tokens: int | None = None,
    ) -> None:
        """Gives back blocks that nothing attends to any more, and puts the null block
        in their place. Counts only tokens whose computation is certain to be kept."""
        skipped = self.get_num_skipped_tokens(processed_computed_tokens)
        self._give_back(request_id, 0, skipped // self.block_size)

    def _give_back(self, request_id: str, first: int, end: int) -> None:
        """Gives back blocks [first, end), later ones to be reused first."""
        blocks = self.req_to_blocks.get(request_id)
        if blocks is None:
            return
        first = max(first, self._num_skipped_blocks.get(request_id, 0))
        end = min(end, len(blocks))
        if end <= first:
            return
        self.block_pool.free_blocks(reversed(blocks[first:end]))
        blocks[first:end] = [self._null_block] * (end - first)
        self._num_skipped_blocks[request_id] = end

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Forgets a request; returns its blocks, last first, for the caller to free.

        The tail of a prefix is less likely to be hit than its head, so it goes first.
        """
        self.num_cached_block.pop(request_id, None)
        self._num_skipped_blocks.pop(request_id, None)
        return self.req_to_blocks.pop(request_id, [])[::-1]

    def free(self, request_id: str) -> None:
        """Forgets a request and frees its blocks."""
        self.block_pool.free_blocks(self.pop_blocks_for_free(request_id))

    def new_step_starts(self) -> None:
        """Tells that the steps scheduled so far come before what is decided next."""
        return
