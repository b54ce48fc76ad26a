"""Batches over packed pages for the CPU kernels, beside the format's own decoding.

Pages are written by the format in torch; the expected attention decodes them state by
state through the block table, in float64.
"""

from dataclasses import dataclass, field

import torch

from tests.kernels.cpu_attention_cases import Options, visible, weigh
from vllm.v1.attention.ops import cpu_cells, cpu_kernels
from vllm.v1.kv_formats import KVFormat, KVScales, all_formats
from vllm.v1.kv_formats.base import TILE16

FORMATS = [
    fmt.name
    for fmt in all_formats()
    if fmt.mode.is_quantized and fmt.format_id in cpu_cells.NUMBERS
]
# Ids of the formats that the kernels read in tiles of 16 states, bfloat16 included.
TILED = [
    fmt.arranged(TILE16).format_id
    for fmt in all_formats()
    if cpu_cells.is_tiled(fmt) and not fmt.alias_of
]
# Of the largest output. Queries of float32 are computed exactly up to rounding. For
# bfloat16 the output is rounded, and AVX-512 rounds queries, codebooks and
# probabilities too.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}
SCALES = KVScales(k=0.75, v=1.25)
MIXED = ((1, 200), (5, 5), (34, 131), (1, 1), (3, 65))


def fits(fmt: KVFormat, head_size: int, head_size_v: int) -> bool:
    try:
        fmt.check_head_size(head_size, head_size_v)
    except ValueError:
        return False
    return True


@dataclass(kw_only=True)
class PackedBatch:
    """Requests of (new tokens, sequence length) over pages that the format wrote."""

    fmt: KVFormat
    dtype: torch.dtype
    head_size: int = 64
    head_size_v: int = 64
    kv_heads: int = 2
    group: int = 3
    block_size: int = 16
    requests: tuple[tuple[int, int], ...] = MIXED
    query: torch.Tensor = field(init=False)
    pages: torch.Tensor = field(init=False)
    block_table: torch.Tensor = field(init=False)
    query_start_loc: torch.Tensor = field(init=False)
    seq_lens: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        sizes = self.head_size, self.head_size_v
        packing = self.fmt.packing(self.kv_heads, *sizes, self.dtype)
        blocks = [-(-length // self.block_size) for _, length in self.requests]
        order = torch.randperm(sum(blocks) + 2).int()
        self.block_table = torch.full((len(blocks), max(blocks)), -1).int()
        shape = len(order), packing.head_slots, self.block_size, packing.state_bytes
        self.pages = torch.full(shape, 0xFF, dtype=torch.uint8)  # NaN as e4m3 and f16
        used = 0
        for row, count in enumerate(blocks):
            self.block_table[row, :count] = order[used : used + count]
            used += count
            length = self.requests[row][1]
            key, value = (torch.randn(length, self.kv_heads, n) for n in sizes)
            value += torch.linspace(-1, 2, self.head_size_v)  # ranges off the middle
            self.fmt.store(
                self.pages,
                self.slots(row, length),
                key.to(self.dtype),
                value.to(self.dtype),
                SCALES,
            )
        new = torch.tensor([0, *(n for n, _ in self.requests)])
        self.query_start_loc = new.cumsum(0).int()
        self.seq_lens = torch.tensor([s for _, s in self.requests], dtype=torch.int32)
        heads = self.kv_heads * self.group
        self.query = torch.randn(int(new.sum()), heads, self.head_size).to(self.dtype)

    def slots(self, row: int, length: int) -> torch.Tensor:
        position = torch.arange(length)
        block = self.block_table[row][position // self.block_size].long()
        return block * self.block_size + position % self.block_size

    def run(self, options: Options) -> torch.Tensor:
        """The kernel's output."""
        shape = (*self.query.shape[:2], self.head_size_v)
        out = torch.full(shape, float("nan"), dtype=self.dtype)
        cpu_kernels.paged_attention(
            out,
            self.query,
            self.pages,
            self.fmt,
            self.query_start_loc,
            self.seq_lens,
            self.block_table,
            self.head_size,
            self.head_size_v,
            self.head_size**-0.5,
            sliding_window=options.sliding_window,
            soft_cap=options.soft_cap,
            sinks=options.sinks,
            causal=options.causal,
            scales=SCALES,
        )
        return out

    def expected(self, options: Options) -> torch.Tensor:
        """The same attention in float64: [tokens, query heads, head_size_v]."""
        outputs = []
        sizes = self.head_size, self.head_size_v
        for row, (new, length) in enumerate(self.requests):
            ids = self.block_table[row].clamp(min=0).long()
            key, value = self.fmt.load(
                self.pages, ids, length, *sizes, torch.float32, SCALES
            )
            key = key.double().repeat_interleave(self.group, 1)
            value = value.double().repeat_interleave(self.group, 1)
            start = int(self.query_start_loc[row])
            query = self.query[start : start + new].double()
            logits = torch.einsum("qhd,khd->hqk", query, key) * self.head_size**-0.5
            if options.soft_cap:
                logits = options.soft_cap * torch.tanh(logits / options.soft_cap)
            hidden = ~visible(new, length, options)
            outputs.append(
                weigh(logits.masked_fill(hidden, -torch.inf), value, options)
            )
        return torch.cat(outputs)

    def check(self, options: Options) -> None:
        """The kernel's output equals the format's within the dtype's tolerance."""
        out, expected = self.run(options), self.expected(options)
        error = (out.double() - expected).abs().max() / expected.abs().max()
        assert error <= TOLERANCE[self.dtype], f"relative error {error:.2e}"
