"""Managers of groups whose tokens attend to nearby tokens only."""

from typing import Any

from vllm.utils.math_utils import cdiv, round_down
from vllm.v1.core.block_hash import BlockHashList, KVCacheBlock
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.managers.base import SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)


class SlidingWindowManager(SingleTypeKVCacheManager):
    """A token attends to itself and to the `sliding_window - 1` tokens before it."""

    def __init__(self, kv_cache_spec: SlidingWindowSpec, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self.sliding_window = kv_cache_spec.sliding_window
        self.extra_retained_tokens = kv_cache_spec.extra_retained_tokens

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """With n tokens computed the next is at position n: it reads n - w + 1 on."""
        kept = self.sliding_window - 1 + self.extra_retained_tokens
        return max(0, num_computed_tokens - kept)

    @classmethod
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
        """Right to left, up to a run of cached blocks that covers a window before an
        aligned end, or that reaches the start of the prompt."""
        if not isinstance(kv_cache_spec, SlidingWindowSpec):
            raise TypeError(f"expected a SlidingWindowSpec, got {kv_cache_spec!r}")
        block_size = kv_cache_spec.block_size * dcp_world_size * pcp_world_size
        kept = kv_cache_spec.sliding_window - 1 + kv_cache_spec.extra_retained_tokens
        dropped = int(drop_eagle_block)
        run_wanted = max(cdiv(kept, block_size), 1) + dropped
        num_blocks = min(max_length // block_size, len(block_hashes))
        hits = [[block_pool.null_block] * num_blocks for _ in kv_cache_group_ids]
        run = end = 0
        for index in range(num_blocks - 1, -1, -1):
            if not run and (index + 1 - dropped) * block_size % alignment_tokens:
                continue
            cached = block_pool.get_cached_block(
                block_hashes[index], kv_cache_group_ids
            )
            if cached is None:
                run = 0
                continue
            if not run:
                end = index + 1
            run += 1
            for hit, block in zip(hits, cached, strict=True):
                hit[index] = block
            if run == run_wanted:
                break
        # A run that ended at a miss is no hit; one that reached block 0 is.
        length = max(end - dropped, 0) if run else 0
        return tuple(hit[:length] for hit in hits), length * block_size


class ChunkedLocalAttentionManager(SingleTypeKVCacheManager):
    """A token attends to itself and to the tokens before it in its own chunk."""

    def __init__(self, kv_cache_spec: ChunkedLocalAttentionSpec, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self.attention_chunk_size = kv_cache_spec.attention_chunk_size

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """All chunks before that of the next token."""
        chunk = self.attention_chunk_size
        return num_computed_tokens // chunk * chunk

    @classmethod
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
        """Blocks before the chunk that holds position `max_length` are not needed; from
        there on, left to right up to the first block that is not cached."""
        if not isinstance(kv_cache_spec, ChunkedLocalAttentionSpec):
            raise TypeError(
                f"expected a ChunkedLocalAttentionSpec, got {kv_cache_spec!r}"
            )
        if drop_eagle_block:
            raise ValueError("chunked local attention does not serve draft models")
        block_size = kv_cache_spec.block_size * dcp_world_size * pcp_world_size
        chunk = kv_cache_spec.attention_chunk_size
        max_length = min(max_length, len(block_hashes) * block_size)
        while True:
            first = max_length // chunk * chunk // block_size
            hits = [[block_pool.null_block] * first for _ in kv_cache_group_ids]
            for index in range(first, max_length // block_size):
                cached = block_pool.get_cached_block(
                    block_hashes[index], kv_cache_group_ids
                )
                if cached is None:
                    break
                for hit, block in zip(hits, cached, strict=True):
                    hit.append(block)
            length = round_down(len(hits[0]) * block_size, alignment_tokens)
            if length >= first * block_size or length % chunk == 0:
                num_blocks = length // block_size
                return tuple(hit[:num_blocks] for hit in hits), length
            # Alignment moved the end into an earlier chunk, whose blocks it needs.
            max_length = length
