"""Managers of groups that keep a request's blocks while it runs."""

from collections.abc import Sequence
from itertools import islice
from typing import Any, ClassVar

from vllm.utils.math_utils import cdiv
from vllm.v1.core.block_hash import BlockHashList, KVCacheBlock
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.managers.base import SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import (
    KVCacheSpec,
    RSWASpec,
    SinkFullAttentionSpec,
)
from vllm.v1.request import Request


class FullAttentionManager(SingleTypeKVCacheManager):
    """Every token attends to all before it, so nothing is given back early."""

    hits_are_prefix_closed: ClassVar[bool] = True

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
        """Left to right, up to the first block that is not cached."""
        block_size = kv_cache_spec.block_size * dcp_world_size * pcp_world_size
        wanted = islice(block_hashes, max_length // block_size)
        hits = block_pool.get_cached_run(wanted, kv_cache_group_ids)
        num_blocks = len(hits[0])
        if drop_eagle_block and num_blocks:
            num_blocks -= 1
        while num_blocks * block_size % alignment_tokens:
            num_blocks -= 1
        return tuple(hit[:num_blocks] for hit in hits), num_blocks * block_size


class RSWAManager(FullAttentionManager):
    """The prompt is kept whole; of the generated tokens only a window is."""

    def __init__(self, kv_cache_spec: RSWASpec, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self.rswa_window = kv_cache_spec.rswa_window

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Caches blocks of the prompt. Generated tokens saw a window only: as part of
        another prompt they would have other states."""
        super().cache_blocks(request, min(num_tokens, request.num_prompt_tokens))

    def remove_skipped_blocks(
        self,
        request_id: str,
        processed_computed_tokens: int,
        num_prompt_tokens: int | None = None,
    ) -> None:
        """Gives back blocks between the prompt and the window. Does nothing when the
        prompt's length is not given."""
        if num_prompt_tokens is None:
            return
        first = cdiv(num_prompt_tokens, self.block_size)
        skipped = processed_computed_tokens - self.rswa_window + 1
        self._give_back(request_id, first, max(skipped, 0) // self.block_size)


class SinkFullAttentionManager(FullAttentionManager):
    """Sets blocks aside for the sink states that all requests share."""

    def __init__(
        self,
        kv_cache_spec: SinkFullAttentionSpec,
        block_pool: BlockPool,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(kv_cache_spec, block_pool, *args, **kwargs)
        sink_len = kv_cache_spec.sink_len
        if not sink_len or sink_len % self.block_size:
            raise ValueError(
                f"sink_len {sink_len} does not fill whole blocks of {self.block_size} "
                "tokens: choose a block size that divides it"
            )
        self.sink_blocks = block_pool.reserve_blocks(sink_len // self.block_size)


class CrossAttentionManager(SingleTypeKVCacheManager):
    """States of the encoder's output: one request's alone, never cached.

    Callers give the encoder's token count where other managers get the decoder's.
    """

    counts_encoder_tokens: ClassVar[bool] = True

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        """Starts a request. Raises ValueError when it is given cached blocks."""
        if new_computed_blocks:
            raise ValueError("cross-attention blocks are never shared between requests")
        super().add_local_computed_blocks(request_id, new_computed_blocks, 0, 0)

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Always raises ValueError."""
        raise ValueError(
            "cross-attention blocks depend on the encoder's input and are not cached: "
            "turn prefix caching off for encoder-decoder models"
        )

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
        """Always raises NotImplementedError."""
        raise NotImplementedError("cross-attention blocks are not cached")
