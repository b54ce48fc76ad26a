"""MAMBA2: which states a step reads and writes, for layers that keep a recurrent state.

Knows blocks of states and the modes in which they are cached. Refuses to know what a
state holds; the layer computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch

from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)

_NO_BLOCK = -1


@dataclass(frozen=True, kw_only=True)
class StateSegment:
    """Tokens `start` to `stop` of the batch, of one request.

    They go on from the state in block `source` (-1: from nothing); the state after them
    belongs in block `target`.
    """

    start: int
    stop: int
    source: int
    target: int


@dataclass(kw_only=True)
class Mamba2AttentionMetadata(AttentionMetadata):
    """A step: requests that go on by one token, all at once, and segments, in order.

    `decode_tokens`, `decode_sources` and `decode_targets` are int64 [D]: the token in
    the batch, and the blocks of the states before and after it.
    """

    decode_tokens: torch.Tensor
    decode_sources: torch.Tensor
    decode_targets: torch.Tensor
    segments: list[StateSegment]


class Mamba2AttentionMetadataBuilder(AttentionMetadataBuilder[Mamba2AttentionMetadata]):
    """Finds the blocks. Mode "none" has one state a request; in the others the state
    after a token lies in the token's block, and mode "all" leaves one at the end of
    every block passed."""

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Mamba2AttentionMetadata:
        common = common_attn_metadata
        table = common.block_table_tensor.tolist()
        ends = common.seq_lens_cpu.tolist()
        decodes: list[StateSegment] = []
        segments: list[StateSegment] = []
        bounds = pairwise(common.query_start_loc_cpu.tolist())
        for row, (start, stop) in enumerate(bounds):
            pieces = list(self._pieces(table[row], start, stop, ends[row]))
            one = stop - start == 1 and pieces[0].source != _NO_BLOCK
            (decodes if one else segments).extend(pieces)

        def tensor(name: str) -> torch.Tensor:
            values = [getattr(piece, name) for piece in decodes]
            return torch.tensor(values, dtype=torch.int64, device=self.device)

        return Mamba2AttentionMetadata(
            decode_tokens=tensor("start"),
            decode_sources=tensor("source"),
            decode_targets=tensor("target"),
            segments=segments,
        )

    def _pieces(
        self, blocks: list[int], start: int, stop: int, end: int
    ) -> Iterator[StateSegment]:
        """The segments of one request, whose tokens end at position `end`."""
        spec: Any = self.kv_cache_spec
        first = end - (stop - start)  # position of the token `start`
        size = end if spec.mamba_cache_mode == "none" else spec.block_size
        while first < end:
            last = end
            if spec.mamba_cache_mode == "all":
                last = min(end, (first // size + 1) * size)
            yield StateSegment(
                start=stop - (end - first),
                stop=stop - (end - last),
                source=_NO_BLOCK if first == 0 else blocks[(first - 1) // size],
                target=blocks[(last - 1) // size],
            )
            first = last


class Mamba2AttentionBackend(AttentionBackend):
    """States of any shape; the layer itself reads and writes them."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [
        torch.float16,
        torch.bfloat16,
        torch.float32,
    ]

    @staticmethod
    def get_name() -> str:
        return "MAMBA2"

    @staticmethod
    def get_impl_cls() -> Any:
        raise ValueError("MAMBA2 has no impl: the layer computes with its own states")

    @staticmethod
    def get_builder_cls() -> type[Mamba2AttentionMetadataBuilder]:
        return Mamba2AttentionMetadataBuilder

    @classmethod
    def is_ssm(cls) -> bool:
        return True
