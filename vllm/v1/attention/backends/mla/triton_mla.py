"""TRITON_MLA: facts of the Triton kernels for latent attention, and their metadata.
Publishing imports no triton."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch

from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CacheDType,
    CommonAttentionMetadata,
    MultipleOf,
    PagedAttentionMetadata,
)
from vllm.v1.attention.backends.mla.common import MLACommonBackend
from vllm.v1.attention.backends.triton_attn import OLDEST_CAPABILITY, requests_of
from vllm.v1.attention.ops.triton_batch import Requests
from vllm.v1.kv_formats import all_formats, by_name

if TYPE_CHECKING:
    from vllm.platforms.interface import DeviceCapability


class Short(NamedTuple):
    """Requests with few queries: their tokens in the batch (None: all of it)."""

    requests: Requests
    tokens: torch.Tensor | None


@dataclass(kw_only=True)
class TritonMLAMetadata(PagedAttentionMetadata):
    """The batch, and the requests whose queries move into the latent space."""

    requests: Requests
    _short: dict[int, Short | None] = field(default_factory=dict)

    def short(self, limit: int) -> Short | None:
        """Requests with at most `limit` queries; None if there are none. Picked out
        once a step, for every layer."""
        if limit not in self._short:
            self._short[limit] = self._picked(limit)
        return self._short[limit]

    def _picked(self, limit: int) -> Short | None:
        if self.max_query_len <= limit:
            return Short(self.requests, None)
        rows = [row for row, n in enumerate(self.query_lens) if 0 < n <= limit]
        if not rows:
            return None
        device = self.seq_lens.device
        starts, position = [0], 0
        tokens: list[int] = []
        for length in self.query_lens:
            if 0 < length <= limit:
                tokens += range(position, position + length)
                starts.append(len(tokens))
            position += length
        kept = torch.tensor(rows, device=device)
        requests = Requests(
            query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
            seq_lens=self.seq_lens[kept],
            block_table=self.block_table[kept],
            max_query_len=max(self.query_lens[row] for row in rows),
            max_seq_len=max(self.context_lens[row] for row in rows),
        )
        return Short(requests, torch.tensor(tokens, device=device))


class TritonMLAMetadataBuilder(AttentionMetadataBuilder[TritonMLAMetadata]):
    """Decodes can be captured: their grids follow from shapes."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = (
        AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    )

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> TritonMLAMetadata:
        paged: PagedAttentionMetadata = super().build(  # type: ignore[assignment]
            common_prefix_len, common_attn_metadata, fast_build
        )
        return TritonMLAMetadata(
            **vars(paged), requests=requests_of(common_attn_metadata)
        )


class TritonMLABackend(MLACommonBackend):
    """Dense, fp8, per-token-head and DeepSeek's own latents in blocks of any multiple
    of 16 tokens."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [
        torch.float16,
        torch.bfloat16,
        torch.float32,
    ]
    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = [
        fmt.name for fmt in all_formats() if fmt.latent_capable
    ]
    supported_devices = ("cuda", "rocm", "xpu")
    required_packages = ("triton",)
    impl_path = "vllm.v1.attention.backends.mla.triton_mla_impl:TritonMLAImpl"

    @staticmethod
    def get_name() -> str:
        return "TRITON_MLA"

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        return TritonMLAMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @staticmethod
    def get_kv_cache_stride_order(
        include_num_layers_dimension: bool = False,
    ) -> tuple[int, ...]:
        return (1, 0, 2, 3) if include_num_layers_dimension else (0, 1, 2)

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: CacheDType | None) -> bool:
        return kv_cache_dtype is None or by_name(kv_cache_dtype).latent_capable

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        return capability >= OLDEST_CAPABILITY
