"""Batches for the CPU kernels and their attention in plain torch, float64.

Shares nothing with the package: pages are read cell by cell through the block table.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch

from vllm.v1.attention.ops import cpu_kernels

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Of the largest output. float32 is exact up to rounding; outputs of the others are
# rounded, and bfloat16 rounds the probabilities as well.
TOLERANCE = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
# Decode, prefill, chunked prefill and a context over several chunks; lengths that do
# not end with a block, a tile or a register.
MIXED = ((1, 700), (5, 5), (37, 331), (1, 1), (3, 65), (70, 130))

needs_library = pytest.mark.skipif(
    not cpu_kernels.available(), reason=cpu_kernels.why_unavailable()
)


def isas() -> list[str]:
    """The instruction sets this processor can run."""
    if not cpu_kernels.available():
        return ["none"]
    names = []
    for name in cpu_kernels.ISAS:
        try:
            names.append(cpu_kernels.choose_isa(name))
        except ValueError:
            continue
    cpu_kernels.choose_isa(None)
    return names


@pytest.fixture
def using_isa() -> Iterator[Callable[[str], str]]:
    """Gives `choose_isa` and restores the process's choice."""
    before = cpu_kernels.isa()
    yield cpu_kernels.choose_isa
    cpu_kernels.choose_isa(before)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What attention may be asked for besides the plain product."""

    sliding_window: int = -1
    soft_cap: float = 0.0
    sinks: torch.Tensor | None = None
    causal: bool = True


@dataclass(kw_only=True)
class Batch:
    """Requests of (new tokens, sequence length) with random pages."""

    dtype: torch.dtype
    head_size: int = 64
    head_size_v: int = 64
    kv_heads: int = 2
    group: int = 3
    block_size: int = 16
    requests: tuple[tuple[int, int], ...] = MIXED
    query_dtype: torch.dtype | None = None
    seed: int = 0
    query: torch.Tensor = field(init=False)
    pages: torch.Tensor = field(init=False)
    block_table: torch.Tensor = field(init=False)
    query_start_loc: torch.Tensor = field(init=False)
    seq_lens: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        blocks = [-(-length // self.block_size) for _, length in self.requests]
        width = max(blocks, default=0) + 1
        order = torch.randperm(sum(blocks) + 2).int()
        self.block_table = torch.full((len(blocks), width), -1, dtype=torch.int32)
        used = 0
        for row, count in enumerate(blocks):
            self.block_table[row, :count] = order[used : used + count]
            used += count
        cell = self.head_size + self.head_size_v
        shape = (len(order), self.kv_heads, self.block_size, cell)
        self.pages = torch.randn(shape).to(self.dtype).view(torch.uint8)
        new = torch.tensor([0, *(n for n, _ in self.requests)])
        self.query_start_loc = new.cumsum(0).int()
        self.seq_lens = torch.tensor([s for _, s in self.requests], dtype=torch.int32)
        heads = self.kv_heads * self.group
        query = torch.randn(int(new.sum()), heads, self.head_size)
        self.query = query.to(self.query_dtype or self.dtype)

    @property
    def scale(self) -> float:
        return self.head_size**-0.5

    def run(self, options: Options, out: torch.Tensor | None = None) -> torch.Tensor:
        """The kernel's output."""
        if out is None:
            shape = (*self.query.shape[:2], self.head_size_v)
            out = torch.full(shape, float("nan"), dtype=self.query.dtype)
        cpu_kernels.paged_attention(
            out,
            self.query,
            self.pages,
            cpu_kernels.dense_format(self.dtype),
            self.query_start_loc,
            self.seq_lens,
            self.block_table,
            self.head_size,
            self.head_size_v,
            self.scale,
            sliding_window=options.sliding_window,
            soft_cap=options.soft_cap,
            sinks=options.sinks,
            causal=options.causal,
        )
        return out

    def states(self, request: int) -> torch.Tensor:
        """[seq_len, kv_heads, head_size + head_size_v] of a request, float64."""
        length = int(self.seq_lens[request])
        rows = []
        for position in range(length):
            block = int(self.block_table[request, position // self.block_size])
            rows.append(self.pages[block, :, position % self.block_size])
        if not rows:
            return torch.empty(0, self.kv_heads, self.head_size + self.head_size_v)
        return torch.stack(rows).contiguous().view(self.dtype).double()

    def expected(self, options: Options) -> torch.Tensor:
        """The same attention in float64: [tokens, query heads, head_size_v]."""
        outputs = []
        for request, (new, length) in enumerate(self.requests):
            start = int(self.query_start_loc[request])
            states = self.states(request).repeat_interleave(self.group, 1)
            key, value = states.split((self.head_size, self.head_size_v), -1)
            query = self.query[start : start + new].double()
            logits = torch.einsum("qhd,khd->hqk", query, key) * self.scale
            if options.soft_cap:
                logits = options.soft_cap * torch.tanh(logits / options.soft_cap)
            hidden = ~visible(new, length, options)
            outputs.append(
                weigh(logits.masked_fill(hidden, -torch.inf), value, options)
            )
        return torch.cat(outputs)

    def check(self, options: Options) -> None:
        """The kernel's output equals the reference's within the dtype's tolerance."""
        out, expected = self.run(options), self.expected(options)
        error = (out.double() - expected).abs().max() / expected.abs().max()
        assert error <= TOLERANCE[self.dtype], f"relative error {error:.2e}"


def visible(new: int, length: int, options: Options) -> torch.Tensor:
    """Bool [new, length]: which keys each query sees."""
    query = torch.arange(length - new, length)[:, None]
    key = torch.arange(length)[None]
    seen = key <= query if options.causal else torch.full((new, length), True)
    if options.sliding_window > 0:
        seen = seen & ((key - query).abs() < options.sliding_window)
    return seen


def weigh(logits: torch.Tensor, value: torch.Tensor, options: Options) -> torch.Tensor:
    """Softmax over keys (and the sink) times values; 0 where nothing is seen."""
    heads, new, length = logits.shape
    if options.sinks is not None:
        sink = options.sinks.double()[:, None, None].expand(heads, new, 1)
        logits = torch.cat((logits, sink), -1)
    weights = logits.softmax(-1)[..., :length].nan_to_num(0.0)
    return torch.einsum("hqk,khd->qhd", weights, value)
