"""Manager of groups that keep a recurrent state instead of one entry a token.

A block holds the state after the last token written to it. Modes: `none` keeps one
block a request and caches nothing; `all` has a block for every `block_size` tokens,
each with the state at its end; `align` lists blocks by position like `all` but backs
only those at which a step ended.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

from vllm.v1.core.block_hash import BlockHashList, KVCacheBlock
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.managers.base import SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec
from vllm.v1.request import Request

_MODES = ("none", "all", "align")


class MambaManager(SingleTypeKVCacheManager):
    """States are cached once the step that computes them is behind: a request of the
    same step could not start from them."""

    can_step_back: ClassVar[bool] = False

    def __init__(
        self, kv_cache_spec: MambaSpec, block_pool: BlockPool, **kwargs: Any
    ) -> None:
        super().__init__(kv_cache_spec, block_pool, **kwargs)
        self.block_size = kv_cache_spec.block_size  # not spread over ranks
        self.mode = kv_cache_spec.mamba_cache_mode
        self.num_speculative_blocks = kv_cache_spec.num_speculative_blocks
        if self.mode not in _MODES:
            raise ValueError(
                f"unknown mamba_cache_mode {self.mode!r}: expected one of "
                f"{', '.join(_MODES)}"
            )
        if self.mode == "align" and self.num_speculative_blocks:
            raise ValueError(
                "mamba_cache_mode 'align' serves no draft tokens: use 'none' or 'all'"
            )
        self._to_cache: list[tuple[Request, int]] = []
        # Requests whose state at the end of the external prefix has no block yet.
        self._awaits_external_state: set[str] = set()

    @property
    def records_new_block_ids(self) -> bool:
        """States are written whole before they are read: nothing to zero."""
        return False

    def num_required_blocks(self, num_tokens: int) -> int:
        if self.mode == "none":
            return 1 + self.num_speculative_blocks
        return super().num_required_blocks(num_tokens) + self.num_speculative_blocks

    def has_slots(self, request_id: str, num_tokens: int) -> bool:
        return request_id not in self._awaits_external_state and super().has_slots(
            request_id, num_tokens
        )

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Everything before the token whose state is the latest."""
        return 0 if self.mode == "none" else max(0, num_computed_tokens - 1)

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
        """In `align` mode a step takes one block, two with an external prefix."""
        if self.mode != "align":
            return super().get_num_blocks_to_allocate(
                request_id,
                num_tokens,
                new_computed_blocks,
                total_computed_tokens,
                num_local_computed_tokens,
                num_tokens_main_model,
                apply_admission_cap,
            )
        required = self.num_required_blocks(num_tokens)
        if request_id in self.num_cached_block:
            held = len(self.req_to_blocks[request_id])
            return int(required > held) + (request_id in self._awaits_external_state)
        first = self.get_num_skipped_tokens(total_computed_tokens) // self.block_size
        reused = new_computed_blocks[first:]
        needed = sum(not b.is_null and b.ref_cnt == 0 for b in reused)
        if total_computed_tokens > num_local_computed_tokens:
            needed += 1
        if required > (first + 1 if total_computed_tokens else 0):
            needed += 1
        # While a request moves on to its next block it holds two.
        return max(needed, min(required, 2)) if apply_admission_cap else needed

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        is_new = request_id not in self.num_cached_block
        super().add_local_computed_blocks(
            request_id,
            new_computed_blocks,
            num_local_computed_tokens,
            num_external_computed_tokens,
        )
        if is_new and num_external_computed_tokens and self.mode == "align":
            self._awaits_external_state.add(request_id)

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        """In `align` mode backs the last position only; null blocks stand before it."""
        if self.mode != "align":
            return super().allocate_new_blocks(
                request_id, num_tokens, num_tokens_main_model
            )
        blocks = self.req_to_blocks[request_id]
        start = len(blocks)
        if request_id in self._awaits_external_state:
            self._awaits_external_state.discard(request_id)
            blocks.extend(self._take_blocks(1))
        num_missing = self.num_required_blocks(num_tokens) - len(blocks)
        if num_missing > 0:
            blocks.extend([self._null_block] * (num_missing - 1))
            blocks.extend(self._take_blocks(1))
        return blocks[start:]

    @property
    def step_alignment_tokens(self) -> int:
        return self.block_size if self.mode == "align" else 1

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Notes what the step will compute; it is cached when the next step starts."""
        if self.mode != "none":
            self._to_cache.append((request, num_tokens))

    def new_step_starts(self) -> None:
        """Caches the states of the steps before."""
        computed, self._to_cache = self._to_cache, []
        for request, num_tokens in computed:
            self._cache_states(request, num_tokens)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        for request, num_tokens in self._to_cache:
            if request.request_id == request_id:
                self._cache_states(request, num_tokens)
        self._to_cache = [n for n in self._to_cache if n[0].request_id != request_id]
        self._awaits_external_state.discard(request_id)
        return super().pop_blocks_for_free(request_id)

    def _cache_states(self, request: Request, num_tokens: int) -> None:
        request_id = request.request_id
        if request_id not in self.num_cached_block:
            return
        if self.mode == "align":
            # Only a step that ends at a block's end leaves the state after it.
            if num_tokens % self.block_size:
                return
            end = num_tokens // self.block_size
            self.num_cached_block[request_id] = max(
                self.num_cached_block[request_id], end - 1
            )
        super().cache_blocks(request, num_tokens)

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
        """The last cached state at an aligned end; no block before it is needed."""
        if drop_eagle_block:
            raise ValueError("recurrent states do not serve draft models")
        block_size = kv_cache_spec.block_size
        num_blocks = min(max_length // block_size, len(block_hashes))
        for index in range(num_blocks - 1, -1, -1):
            if (index + 1) * block_size % alignment_tokens:
                continue
            cached = block_pool.get_cached_block(
                block_hashes[index], kv_cache_group_ids
            )
            if cached is not None:
                nulls = [block_pool.null_block] * index
                return tuple([*nulls, block] for block in cached), (
                    (index + 1) * block_size
                )
        return tuple([] for _ in kv_cache_group_ids), 0
