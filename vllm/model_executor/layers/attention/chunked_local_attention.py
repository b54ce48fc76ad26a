"""Attention within chunks: a token sees the tokens before it in its own chunk.

Any backend serves it: to the kernels, every chunk of a request that the step touches is
a request of its own, whose first block is the chunk's. Knows how to cut a batch;
refuses to know kernels and formats.
"""

from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any

import torch

from vllm.config import VllmConfig
from vllm.model_executor.layers.attention.attention import Attention
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    KVCacheSpec,
)


class ChunkedLocalAttention(Attention):
    """`Attention` within chunks of `attention_chunk_size` tokens."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        attention_chunk_size: int,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_heads, head_size, scale, **kwargs)
        if self.sliding_window is not None:
            raise ValueError(
                f"layer {self.layer_name!r} has a window and chunks: expected one"
            )
        self.attention_chunk_size = attention_chunk_size
        self.attn_backend = in_chunks(self.attn_backend, attention_chunk_size)

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        """The raw spec; blocks before the current chunk can be freed."""
        return ChunkedLocalAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            attention_chunk_size=self.attention_chunk_size,
            **self._spec_fields(),
        )


@cache
def in_chunks(
    backend: type[AttentionBackend], chunk_size: int
) -> type[AttentionBackend]:
    """The backend, with metadata that cuts requests at multiples of `chunk_size`."""
    builder_cls: Any = backend.get_builder_cls()

    class Builder(builder_cls):
        """Builds the metadata of the cut batch."""

        supports_update_block_table = False
        # How a batch is cut depends on lengths, which a captured graph is not told.
        _cudagraph_support = AttentionCGSupport.NEVER

        def build(
            self,
            common_prefix_len: int,
            common_attn_metadata: CommonAttentionMetadata,
            fast_build: bool = False,
        ) -> Any:
            block_size = self.kv_cache_spec.block_size
            cut = cut_at_chunks(common_attn_metadata, chunk_size, block_size)
            return super().build(0, cut, fast_build)

    class InChunks(backend):  # type: ignore[misc,valid-type]
        """The wrapped backend in all but its builder."""

        @staticmethod
        def get_builder_cls() -> type[Any]:
            return Builder

    InChunks.__qualname__ = f"{backend.__qualname__}.InChunks[{chunk_size}]"
    InChunks.__module__ = backend.__module__
    return InChunks


def cut_at_chunks(
    common: CommonAttentionMetadata, chunk_size: int, block_size: int
) -> CommonAttentionMetadata:
    """The batch with one request for each chunk that a request has queries in.

    Slots stay as they are. Raises ValueError unless chunks start with a block.
    """
    if chunk_size % block_size:
        raise ValueError(
            f"chunks of {chunk_size} tokens do not start with blocks of {block_size} "
            "tokens: set --block-size to a divisor of the chunk"
        )
    starts = common.query_start_loc_cpu.tolist()
    ends = common.seq_lens_cpu.tolist()
    pieces = [
        piece
        for row, (start, stop) in enumerate(pairwise(starts))
        for piece in _pieces(row, ends[row] - (stop - start), ends[row], chunk_size)
    ]
    rows, firsts, query_lens, seq_lens = zip(*pieces, strict=True)
    device = common.block_table_tensor.device
    offsets = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0)
    offsets = offsets.to(torch.int32)
    lengths = torch.tensor(seq_lens, dtype=torch.int32)
    table = common.block_table_tensor
    columns = torch.tensor(firsts, device=device)[:, None] // block_size
    columns = columns + torch.arange(chunk_size // block_size, device=device)
    columns = columns.clamp(max=table.shape[1] - 1)  # nothing is read past seq_lens
    return common.replace(
        query_start_loc=offsets.to(device),
        query_start_loc_cpu=offsets,
        seq_lens=lengths.to(device),
        num_reqs=len(pieces),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        block_table_tensor=table[torch.tensor(rows, device=device)[:, None], columns],
        _seq_lens_cpu=lengths,
    )


def _pieces(
    row: int, start: int, end: int, chunk_size: int
) -> Iterator[tuple[int, int, int, int]]:
    """(request, chunk's first position, queries, tokens of the chunk seen) for each
    chunk of the queries at positions `start` to `end`; one piece if there are none."""
    if start == end:
        yield row, 0, 0, 0
    while start < end:
        first = start // chunk_size * chunk_size
        stop = min(end, first + chunk_size)
        yield row, first, stop - start, stop - first
        start = stop
