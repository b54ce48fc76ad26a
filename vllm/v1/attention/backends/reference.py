"""REFERENCE: attention in plain torch over any format's `store` and `load`.

Knows how to gather a batch's states and mask them. Refuses to know any format's
bytes. It is what every kernel is measured against, and it serves formats that have
no kernel yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm.utils.math_utils import cdiv
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionLayer,
    AttentionType,
    CacheDType,
    PagedAttentionMetadata,
)
from vllm.v1.attention.ops.online_softmax import OnlineSoftmax
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.kv_formats import KVFormat, KVScales, all_formats, by_mode, by_name

# States decoded to float32 at once; bounds the memory of one chunk.
_MAX_CHUNK_STATES = 8192

# Keys [R, S, Hkv, D], values [R, S, Hkv, Dv], and which query sees which: [R, n, S].
Chunk = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class ReferenceAttentionBackend(AttentionBackend):
    """Serves every format that stores a K and a V per head."""

    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [
        torch.float16,
        torch.bfloat16,
        torch.float32,
    ]
    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = [
        fmt.name for fmt in all_formats() if not fmt.latent
    ]
    supported_attn_types = (AttentionType.DECODER, AttentionType.ENCODER_ONLY)

    @staticmethod
    def get_name() -> str:
        return "REFERENCE"

    @staticmethod
    def get_impl_cls() -> type[ReferenceAttentionImpl]:
        return ReferenceAttentionImpl

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        mode = spec.kv_quant_mode
        mine = mode.is_per_token_head or mode.is_nvfp4 or mode.is_turboquant
        return spec.packed(by_mode(mode)) if mine and not spec.is_packed else spec

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: CacheDType | None) -> bool:
        return kv_cache_dtype is None or not by_name(kv_cache_dtype).latent

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class RequestGroup:
    """Requests attended to together: all have `query_len` queries.

    `rows` are request indices, `starts` their first token in the batch, `contexts`
    their tokens in the cache.
    """

    rows: list[int]
    starts: list[int]
    contexts: list[int]
    query_len: int
    causal: bool


class ReferenceAttentionImpl(AttentionImpl[PagedAttentionMetadata]):
    """Reads what is stored, in prefill as in decode; softmax in float32."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        if alibi_slopes is not None:
            raise ValueError(
                "ALiBi slopes are not supported by the REFERENCE and CPU_ATTN "
                "backends: use a model with rotary or learned positions."
            )
        if attn_type not in ReferenceAttentionBackend.supported_attn_types:
            raise ValueError(
                f"Attention type {attn_type} is not supported here: expected decoder "
                "or encoder_only."
            )
        if sinks is not None and sinks.shape != (num_heads,):
            raise ValueError(
                f"sinks has shape {tuple(sinks.shape)}, expected one logit for each of "
                f"{num_heads} heads"
            )
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.sliding_window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self.soft_cap = float(logits_soft_cap or 0.0)
        self.attn_type = attn_type
        self.shares_kv_cache = kv_sharing_target_layer_name is not None
        self.sinks = sinks
        self.format: KVFormat = by_name(kv_cache_dtype)

    def do_kv_cache_update(
        self,
        layer: AttentionLayer,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        if self.attn_type == AttentionType.ENCODER_ONLY or self.shares_kv_cache:
            return
        tokens = slot_mapping.shape[0]
        self.format.resolve(kv_cache.dtype).store(
            kv_cache.view(torch.uint8),
            slot_mapping,
            key[:tokens],
            value[:tokens],
            scales_of(layer),
        )

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: PagedAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if output_scale is not None or output_block_scale is not None:
            raise ValueError("This backend writes unquantised outputs only.")
        if attn_metadata is None:  # a profiling run has no cache to read
            return output.zero_()
        for group in self._request_groups(attn_metadata, kv_cache):
            index = _token_indices(group, query.device)
            if self.attn_type == AttentionType.ENCODER_ONLY:
                chunks = self._chunk_of_step(group, index, key, value)
            else:
                chunks = self._chunks_of_cache(
                    group, layer, kv_cache, attn_metadata, self._value_size(output)
                )
            output[index] = self._attend(query[index], chunks, layer, output)
        return output

    def _request_groups(
        self, metadata: PagedAttentionMetadata, kv_cache: torch.Tensor
    ) -> Iterator[RequestGroup]:
        """The requests that are attended to together."""
        return _groups(metadata)

    def _value_size(self, output: torch.Tensor) -> int:
        """Elements of a stored value."""
        return output.shape[-1]

    def _attend(
        self,
        query: torch.Tensor,
        chunks: Iterator[Chunk],
        layer: AttentionLayer,
        output: torch.Tensor,
    ) -> torch.Tensor:
        """What queries [R, n, Hq, D] see in the chunks: [R, n, Hq, Dv], as `output`."""
        attended = self._running(query, output.shape[-1])
        for chunk in chunks:
            attended.add(*chunk)
        return attended.result().to(output.dtype)

    def _running(self, query: torch.Tensor, head_size_v: int) -> OnlineSoftmax:
        return OnlineSoftmax(
            query,
            self.num_kv_heads,
            head_size_v,
            self.scale,
            self.soft_cap,
            self.sinks,
        )

    def _chunk_of_step(
        self,
        group: RequestGroup,
        index: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> Iterator[Chunk]:
        """Keys and values of this very step, for layers without a cache."""
        positions = torch.arange(group.query_len, device=key.device)[None]
        ends = torch.full((len(group.rows), 1), group.query_len, device=key.device)
        mask = self._mask(positions, positions, ends, group.causal)
        yield key[index].float(), value[index].float(), mask

    def _chunks_of_cache(
        self,
        group: RequestGroup,
        layer: AttentionLayer,
        kv_cache: torch.Tensor,
        metadata: PagedAttentionMetadata,
        head_size_v: int,
    ) -> Iterator[Chunk]:
        """Stored keys and values of a group, from its first visible block on."""
        fmt, pages = self.format.resolve(kv_cache.dtype), kv_cache.view(torch.uint8)
        device, block_size = kv_cache.device, pages.shape[2]
        ends = torch.tensor(group.contexts, device=device)[:, None]
        queries = ends - group.query_len + torch.arange(group.query_len, device=device)
        first = self._first_blocks(group, block_size)
        last = [cdiv(context, block_size) for context in group.contexts]
        width = max(b - a for a, b in zip(first, last, strict=True))
        states = self._max_chunk_states(group.query_len)
        step = max(1, states // (block_size * len(group.rows)))
        first_block = torch.tensor(first, device=device)[:, None]
        last_block = torch.tensor(last, device=device)[:, None] - 1
        table = metadata.block_table[torch.tensor(group.rows, device=device)].long()
        for start in range(0, width, step):
            columns = torch.arange(start, min(start + step, width), device=device)
            blocks = first_block + columns
            keys = blocks[..., None] * block_size
            keys = (keys + torch.arange(block_size, device=device)).flatten(1)
            ids = table.gather(1, torch.minimum(blocks, last_block))
            key, value = fmt.load(
                pages,
                ids.flatten(),
                ids.numel() * block_size,
                self.head_size,
                head_size_v,
                torch.float32,
                scales_of(layer),
            )
            stored = keys < ends
            value = value.view(*keys.shape, *value.shape[1:])
            # States beyond the context hold whatever the block held before.
            value = value.masked_fill(~stored[..., None, None], 0.0)
            mask = self._mask(queries, keys, ends, group.causal)
            yield key.view(*keys.shape, *key.shape[1:]), value, mask

    def _max_chunk_states(self, query_len: int) -> int:
        """States of a group with such queries that may be decoded at once."""
        return _MAX_CHUNK_STATES

    def _first_blocks(self, group: RequestGroup, block_size: int) -> list[int]:
        """The first block that any query of a request can see."""
        if self.sliding_window is None:
            return [0] * len(group.rows)
        reach = group.query_len + self.sliding_window - 1
        return [max(0, context - reach) // block_size for context in group.contexts]

    def _mask(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        ends: torch.Tensor,
        causal: bool,
    ) -> torch.Tensor:
        """Bool [R, n, S] from positions [R, n] and [R, S], and contexts [R, 1]."""
        distance = queries[:, :, None] - keys[:, None, :]
        mask = (keys < ends)[:, None, :].expand(-1, distance.shape[1], -1)
        if causal:
            mask = mask & (distance >= 0)
        if self.sliding_window is not None:
            mask = mask & (distance.abs() < self.sliding_window)
        return mask


def _groups(metadata: PagedAttentionMetadata) -> Iterator[RequestGroup]:
    """Requests cut into groups: decodes of similar length together, others alone."""
    causal = _causal_flags(metadata)
    starts, position = [], 0
    for query_len in metadata.query_lens:
        starts.append(position)
        position += query_len
    decodes: dict[bool, list[int]] = {True: [], False: []}
    for row, query_len in enumerate(metadata.query_lens):
        if query_len == 1:
            decodes[causal[row]].append(row)
        elif query_len > 1:
            yield _group([row], starts, metadata, causal[row])
    for flag, rows in decodes.items():
        rows.sort(key=lambda row: metadata.context_lens[row])
        for batch in _batches(rows, metadata.context_lens):
            yield _group(batch, starts, metadata, flag)


def _group(
    rows: list[int],
    starts: list[int],
    metadata: PagedAttentionMetadata,
    causal: bool,
) -> RequestGroup:
    return RequestGroup(
        rows=rows,
        starts=[starts[row] for row in rows],
        contexts=[metadata.context_lens[row] for row in rows],
        query_len=metadata.query_lens[rows[0]],
        causal=causal,
    )


def _batches(rows: Sequence[int], contexts: Sequence[int]) -> Iterator[list[int]]:
    """Runs of `rows`, sorted by context, whose padding costs at most the states
    themselves again."""
    batch: list[int] = []
    states = 0
    for row in rows:
        padded = (len(batch) + 1) * contexts[row]
        if batch and padded > 2 * (states + contexts[row]):
            yield batch
            batch, states = [], 0
        batch.append(row)
        states += contexts[row]
    if batch:
        yield batch


def _causal_flags(metadata: PagedAttentionMetadata) -> list[bool]:
    requests = len(metadata.query_lens)
    if isinstance(metadata.causal, torch.Tensor):
        return [bool(flag) for flag in metadata.causal.tolist()]
    return [bool(metadata.causal)] * requests


def _token_indices(group: RequestGroup, device: torch.device) -> torch.Tensor:
    """Rows of the batch's tokens that belong to a group, int64 [R, n]."""
    starts = torch.tensor(group.starts, device=device)[:, None]
    return starts + torch.arange(group.query_len, device=device)


def scales_of(layer: AttentionLayer) -> KVScales:
    return KVScales(k=layer._k_scale_float, v=layer._v_scale_float)
