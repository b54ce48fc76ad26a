"""What one batch looks like to attention: lengths, blocks, slots.

Knows tensors of the step and the default way to hand them to a kernel. Refuses to
know formats, layers and backends.
"""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import torch

from vllm.v1.kv_cache_interface import KVCacheSpec

if TYPE_CHECKING:
    import numpy as np

    from vllm.config import VllmConfig


class AttentionCGSupport(Enum):
    """Which batches a backend can run inside a captured graph."""

    ALWAYS = 3
    UNIFORM_BATCH = 2
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    NEVER = 0


class AttentionMetadata:
    """What a backend's impl reads about the batch; built once a step per group."""


M = TypeVar("M", bound=AttentionMetadata)

_CACHES = ("_num_computed_tokens_cache", "_token_to_req_indices_cache")
_HOST_COPIES = ("_seq_lens_cpu", "_num_computed_tokens_cpu")


@dataclass
class CommonAttentionMetadata:
    """The batch as the model runner knows it; every backend builds from this.

    `query_start_loc` int32 [R + 1]: first token of each request, and the end.
    `seq_lens` int32 [R]: tokens in the cache after this step, per request.
    `block_table_tensor` int32 [R, W]: kernel blocks of each request, in order.
    `slot_mapping` int64 [T]: block * tokens_per_block + offset, -1 for padding.
    Fields ending in `_cpu` live on the host; the others on the device.
    """

    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool | torch.Tensor = True
    logits_indices_padded: torch.Tensor | None = None
    num_logits_indices: int | None = None
    max_logits_per_req: int | None = None
    encoder_seq_lens: torch.Tensor | None = None
    encoder_seq_lens_cpu: np.ndarray | None = None
    dcp_local_seq_lens: torch.Tensor | None = None
    dcp_local_seq_lens_cpu: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    is_prefilling: torch.Tensor | None = None
    seq_lens_cpu_upper_bound: torch.Tensor | None = None
    mm_req_doc_ranges: dict[int, list[tuple[int, int]]] | None = None
    rswa_prefix_lens: torch.Tensor | None = None
    replayssm_decode_base_cpu: torch.Tensor | None = None
    _seq_lens_cpu: torch.Tensor | None = None
    _num_computed_tokens_cpu: torch.Tensor | None = None
    _num_computed_tokens_cache: torch.Tensor | None = None
    _token_to_req_indices_cache: torch.Tensor | None = None

    def batch_size(self) -> int:
        """Number of requests R, padding rows included."""
        return self.seq_lens.shape[0]

    def replace(self, **kwargs: Any) -> CommonAttentionMetadata:
        """A copy with some fields changed; what was derived from them is dropped."""
        lengths_change = {"seq_lens", "query_start_loc_cpu"} & kwargs.keys()
        dropped = (*_CACHES, *_HOST_COPIES) if lengths_change else _CACHES
        if unknown := kwargs.keys() - vars(self).keys():
            raise TypeError(f"no fields of a batch: {', '.join(sorted(unknown))}")
        # One copy per group and step: no constructor of 27 fields.
        other: CommonAttentionMetadata = object.__new__(type(self))
        vars(other).update(vars(self), **dict.fromkeys(dropped) | kwargs)
        return other

    def naive_query_lens(self) -> torch.Tensor:
        """Tokens of each request in this step, int32 [R]."""
        return self.query_start_loc.diff()

    def compute_num_computed_tokens(self) -> torch.Tensor:
        """Tokens of each request that were cached before this step, int32 [R]."""
        if self._num_computed_tokens_cache is None:
            self._num_computed_tokens_cache = self.seq_lens - self.naive_query_lens()
        return self._num_computed_tokens_cache

    def token_to_req_indices(self) -> torch.Tensor:
        """The request that each token of the batch belongs to, int32 [T]."""
        if self._token_to_req_indices_cache is None:
            requests = torch.arange(
                self.batch_size(), dtype=torch.int32, device=self.query_start_loc.device
            )
            self._token_to_req_indices_cache = torch.repeat_interleave(
                requests, self.naive_query_lens()
            )
        return self._token_to_req_indices_cache

    @property
    def seq_lens_cpu(self) -> torch.Tensor:
        """`seq_lens` on the host, int32 [R]; copied at most once."""
        if self._seq_lens_cpu is None:
            self._seq_lens_cpu = self.seq_lens.to("cpu")
        return self._seq_lens_cpu

    @property
    def num_computed_tokens_cpu(self) -> torch.Tensor:
        """Tokens cached before this step, on the host, int32 [R]."""
        if self._num_computed_tokens_cpu is None:
            query_lens = self.query_start_loc_cpu.diff()
            self._num_computed_tokens_cpu = self.seq_lens_cpu - query_lens
        return self._num_computed_tokens_cpu


@dataclass(kw_only=True)
class PagedAttentionMetadata(AttentionMetadata):
    """What the default builder hands to an impl. Shapes as in CommonAttentionMetadata.

    `query_lens` and `context_lens` are host lists of length R: tokens of this step,
    and tokens in the cache after it.
    """

    num_actual_tokens: int
    num_reqs: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool | torch.Tensor
    query_lens: list[int]
    context_lens: list[int]


class AttentionMetadataBuilder(ABC, Generic[M]):
    """Builds a backend's metadata. The default serves any backend that reads
    PagedAttentionMetadata; it never reorders the batch."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER
    reorder_batch_threshold: int | None = None
    supports_update_block_table: bool = False
    requires_block_table_width: ClassVar[bool] = False
    supports_draft_decode_metadata_update: bool = False

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        self.kv_cache_spec = kv_cache_spec
        self.layer_names = layer_names
        self.vllm_config = vllm_config
        self.device = device

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec
    ) -> AttentionCGSupport:
        """Which batches may be captured in a graph."""
        return cls._cudagraph_support

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> M:
        """Metadata of one step. `common_prefix_len` tokens are shared by all requests
        (0 if unknown); `fast_build` asks for speed over the best kernel schedule."""
        common = common_attn_metadata
        starts = common.query_start_loc_cpu.tolist()
        return PagedAttentionMetadata(  # type: ignore[return-value]
            num_actual_tokens=common.num_actual_tokens,
            num_reqs=common.num_reqs,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            causal=common.causal,
            query_lens=[b - a for a, b in pairwise(starts)],
            context_lens=common.seq_lens_cpu.tolist(),
        )

    def update_block_table(
        self, metadata: M, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> M:
        """The same step for another group: new blocks and slots, all else shared."""
        return replace(  # type: ignore[type-var]
            metadata, block_table=blk_table, slot_mapping=slot_mapping
        )

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> M:
        """Metadata for a captured batch; its tensors are refilled before replay."""
        return self.build(0, common_attn_metadata)

    def replan_for_graph(self, common_attn_metadata: CommonAttentionMetadata) -> None:
        """Called before a captured batch of as many requests is replayed, with its
        lengths and blocks. For kernels that are planned on the host; the tensors that
        the captured metadata holds are refilled anyway."""

    def use_cascade_attention(self, *args: Any, **kwargs: Any) -> bool:
        """Whether a shared prefix gets a pass of its own; no backend here does that."""
        return False
