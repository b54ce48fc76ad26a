"""A random paged batch, and attention written in the most obvious way to check it."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_formats import KVScales, by_name

UNUSED_BLOCK = 1 << 30  # never a valid block: reading it is an error


@dataclass
class Case:
    """`requests` are (tokens of this step, tokens cached after it)."""

    requests: list[tuple[int, int]]
    cache_dtype: str = "auto"
    dtype: torch.dtype = torch.float32
    num_kv_heads: int = 2
    group: int = 2
    head_size: int = 64
    head_size_v: int | None = None
    block_size: int = 16
    sliding_window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    causal: bool = True
    scales: KVScales = field(default_factory=KVScales)
    seed: int = 0

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group

    @property
    def value_size(self) -> int:
        return self.head_size if self.head_size_v is None else self.head_size_v


class PagedBatch:
    """Tensors of a case: pages filled with noise, keys written in two steps."""

    def __init__(self, case: Case, backend: type[AttentionBackend]) -> None:
        self.case, self.backend = case, backend
        self.generator = torch.Generator().manual_seed(case.seed)
        self.scale = case.head_size**-0.5
        self.sinks = self._random(case.num_heads).float() if case.sinks else None
        self.keys = [self._states(case.head_size, c) for _, c in case.requests]
        self.values = [self._states(case.value_size, c) for _, c in case.requests]
        self.queries = [
            self._random(n, case.num_heads, case.head_size) for n, _ in case.requests
        ]
        self._allocate()
        self.layer = SimpleNamespace(
            layer_name="layer",
            kv_cache_dtype=case.cache_dtype,
            num_kv_heads=case.num_kv_heads,
            head_size=case.head_size,
            head_size_v=case.value_size,
            _k_scale_float=case.scales.k,
            _v_scale_float=case.scales.v,
        )
        self.impl = backend.get_impl_cls()(
            num_heads=case.num_heads,
            head_size=case.head_size,
            scale=self.scale,
            num_kv_heads=case.num_kv_heads,
            alibi_slopes=None,
            sliding_window=case.sliding_window,
            kv_cache_dtype=case.cache_dtype,
            logits_soft_cap=case.soft_cap,
            sinks=self.sinks,
        )

    def run(self) -> torch.Tensor:
        """Writes history and step, then attends: [T, Hq, Dv]."""
        for row, (query_len, context) in enumerate(self.case.requests):
            if context > query_len:
                self.store(row, 0, context - query_len)
        step = range(len(self.case.requests))
        key = torch.cat([self._step(self.keys, row) for row in step])
        value = torch.cat([self._step(self.values, row) for row in step])
        query = torch.cat(self.queries)
        metadata = self.metadata()
        slots = self.common().slot_mapping
        self.impl.do_kv_cache_update(self.layer, key, value, self.kv_cache, slots)
        shape = (query.shape[0], self.case.num_heads, self.case.value_size)
        output = torch.full(shape, float("nan"), dtype=self.case.dtype)
        return self.impl.forward(
            self.layer, query, key, value, self.kv_cache, metadata, output
        )

    def expected(self) -> torch.Tensor:
        """Naive attention over the round trip of every key and value."""
        fmt, case = by_name(self.case.cache_dtype), self.case
        outputs = []
        for row, (query_len, context) in enumerate(case.requests):
            key, value = fmt.roundtrip(
                self.keys[row].float(), self.values[row].float(), case.scales
            )
            outputs.append(
                naive_attention(
                    self.queries[row],
                    key,
                    value,
                    first_position=context - query_len,
                    scale=self.scale,
                    sliding_window=case.sliding_window,
                    soft_cap=case.soft_cap,
                    sinks=self.sinks,
                    causal=case.causal,
                )
            )
        return torch.cat(outputs)

    def store(self, row: int, start: int, end: int) -> None:
        """Writes states start..end of a request."""
        self.impl.do_kv_cache_update(
            self.layer,
            self.keys[row][start:end],
            self.values[row][start:end],
            self.kv_cache,
            self.slots(row, start, end),
        )

    def slots(self, row: int, start: int, end: int) -> torch.Tensor:
        size = self.case.block_size
        positions = torch.arange(start, end)
        return self.block_table[row].long()[positions // size] * size + positions % size

    def metadata(self) -> Any:
        """What the backend's builder makes of the batch."""
        builder: type[AttentionMetadataBuilder] = self.backend.get_builder_cls()
        device = torch.device("cpu")
        made = builder(self.spec, ["layer"], self.vllm_config(), device)
        return made.build(0, self.common())

    def common(self) -> CommonAttentionMetadata:
        requests = self.case.requests
        starts = torch.tensor([0, *(n for n, _ in requests)]).cumsum(0).int()
        slots = [self.slots(r, c - n, c) for r, (n, c) in enumerate(requests)]
        return CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor([c for _, c in requests], dtype=torch.int32),
            num_reqs=len(requests),
            num_actual_tokens=int(starts[-1]),
            max_query_len=max(n for n, _ in requests),
            max_seq_len=max(c for _, c in requests),
            block_table_tensor=self.block_table,
            slot_mapping=torch.cat(slots),
            causal=self.case.causal,
        )

    def vllm_config(self) -> SimpleNamespace:
        """What a builder reads of a VllmConfig."""
        layers = {"layer": SimpleNamespace(impl=self.impl)}
        return SimpleNamespace(
            compilation_config=SimpleNamespace(static_forward_context=layers),
            model_config=SimpleNamespace(dtype=self.case.dtype),
        )

    def _allocate(self) -> None:
        case, fmt = self.case, by_name(self.case.cache_dtype)
        spec = FullAttentionSpec(
            block_size=case.block_size,
            num_kv_heads=case.num_kv_heads,
            head_size=case.head_size,
            head_size_v=case.value_size,
            dtype=fmt.storage_dtype(case.dtype),
            kv_quant_mode=fmt.mode,
        )
        self.spec = self.backend.customize_spec(spec)
        widths = [-(-c // case.block_size) for _, c in case.requests]
        num_blocks = sum(widths) + 3
        shape = (num_blocks, self.spec.num_heads, case.block_size)
        state = self.spec.state_content_size_bytes
        noise = torch.randint(
            0, 256, (*shape, state), generator=self.generator, dtype=torch.uint8
        )
        self.kv_cache = noise.view(self.spec.dtype)
        order = torch.randperm(num_blocks, generator=self.generator).int()
        table = torch.full((len(widths), max(widths) + 2), UNUSED_BLOCK)
        self.block_table, used = table.int(), 0
        for row, width in enumerate(widths):
            self.block_table[row, :width] = order[used : used + width]
            used += width

    def _step(self, states: list[torch.Tensor], row: int) -> torch.Tensor:
        query_len, context = self.case.requests[row]
        return states[row][context - query_len :]

    def _states(self, size: int, tokens: int) -> torch.Tensor:
        return self._random(tokens, self.case.num_kv_heads, size)

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.case.dtype)


def naive_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    first_position: int,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    causal: bool = True,
) -> torch.Tensor:
    """Float64, one score matrix per head; K and V repeated for grouped heads."""
    group = query.shape[1] // key.shape[1]
    query = query.double().transpose(0, 1)
    key = key.double().transpose(0, 1).repeat_interleave(group, 0)
    value = value.double().transpose(0, 1).repeat_interleave(group, 0)
    scores = query @ key.transpose(1, 2) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    rows = first_position + torch.arange(query.shape[1])[:, None]
    columns = torch.arange(key.shape[1])[None]
    if causal:
        scores = scores.masked_fill(columns > rows, float("-inf"))
    if sliding_window is not None:
        far = (rows - columns).abs() >= sliding_window
        scores = scores.masked_fill(far, float("-inf"))
    if sinks is not None:
        sink = sinks.double().view(-1, 1, 1).expand(-1, query.shape[1], 1)
        scores = torch.cat([scores, sink], -1)
    weights = scores.softmax(-1)[..., : key.shape[1]]
    return (weights @ value).transpose(0, 1)
