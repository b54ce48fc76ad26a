"""`vllm bench attention`: decode and prefill of the CPU kernels per format and context.

Decode is bound by memory: every repetition is paired with a plain read of as many bytes
on the same threads, and with the same attention over bfloat16, so that fractions of the
bandwidth and speed-ups hold on a busy machine. One thread is measured in CPU time.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from tqdm.auto import tqdm

from vllm.benchmarks import latent_attention
from vllm.utils.argparse_utils import FlexibleArgumentParser, at_least
from vllm.utils.math_utils import cdiv
from vllm.utils.mem_constants import MiB_bytes
from vllm.v1.attention.ops import cpu_kernels
from vllm.v1.attention.ops.cpu_cells import NUMBERS
from vllm.v1.kv_formats import KVFormat, all_formats, by_name
from vllm.v1.kv_formats.base import TILE16

DTYPE = torch.bfloat16  # of queries
BASE = "bfloat16"  # what the others are measured against
FORMATS = (
    BASE,
    *(
        fmt.name
        for fmt in all_formats()
        if fmt.format_id in NUMBERS and not fmt.alias_of and fmt.name != BASE
    ),
)
CONTEXTS = (512, 2048, 8192)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A layer: KV heads, query heads of each, head size, tokens of a block."""

    kv_heads: int
    group: int
    head_size: int
    block_size: int


@dataclass(frozen=True, kw_only=True)
class Decode:
    """One query per request over a cache too large for the processor's own memory."""

    cache_dtype: str
    context: int
    requests: int
    million_token_heads_per_s: float
    times_bfloat16: float  # token-heads/s, median over pairs of repetitions
    gb_per_s: float
    read_gb_per_s: float  # plain reads in the same minute
    bandwidth_fraction: float  # median over pairs of repetitions


@dataclass(frozen=True, kw_only=True)
class Prefill:
    """New tokens of one request behind `context` cached ones, causal."""

    cache_dtype: str
    new_tokens: int
    context: int
    gflop_per_s: float


@dataclass(frozen=True, kw_only=True)
class Caches:
    """Random pages of equal requests, blocks in random order."""

    fmt: KVFormat
    pages: torch.Tensor  # uint8 [blocks, head slots, block_size, cell]
    block_table: torch.Tensor

    @classmethod
    def fill(cls, name: str, shape: Shape, context: int, requests: int) -> "Caches":
        """Requests of `context` tokens; ValueError for a format without a kernel."""
        fmt = measurable(name)
        size = shape.head_size
        packing = fmt.packing(shape.kv_heads, size, size, DTYPE)
        width = cdiv(context, shape.block_size)
        blocks = width * requests
        pages = torch.empty(
            blocks,
            packing.head_slots,
            shape.block_size,
            packing.state_bytes,
            dtype=torch.uint8,
        )
        cpu_kernels.advise_huge_pages(pages)
        rows = (shape.block_size, shape.kv_heads, size)
        key, value = (torch.randn(rows).to(DTYPE) for _ in range(2))
        cpu_kernels.store(pages, torch.arange(shape.block_size), key, value, fmt)
        pages[1:] = pages[0]
        table = torch.randperm(blocks).int().view(requests, width)
        return cls(fmt=fmt, pages=pages, block_table=table)

    def attention(self, shape: Shape, new: int, length: int) -> Callable[[], None]:
        """A call of the kernel: `new` queries for each request of `length` tokens."""
        requests = len(self.block_table)
        heads = shape.kv_heads * shape.group
        query = torch.randn(requests * new, heads, shape.head_size).to(DTYPE)
        out = torch.empty_like(query)
        starts = torch.arange(requests + 1).int() * new
        lengths = torch.full((requests,), length).int()

        def call() -> None:
            cpu_kernels.paged_attention(
                out,
                query,
                self.pages,
                self.fmt,
                starts,
                lengths,
                self.block_table,
                shape.head_size,
                shape.head_size,
                shape.head_size**-0.5,
            )

        return call


def seconds_of(call: Callable[[], object]) -> float:
    """CPU time of one thread, which other programs change less; else time passed."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    call()
    return clock() - start


def measurable(name: str) -> KVFormat:
    """The format of that name as CPU_ATTN arranges it; ValueError without a kernel."""
    fmt = by_name(name)
    if cpu_kernels.reads_tiles(fmt, DTYPE):
        fmt = fmt.arranged(TILE16)
    if fmt.format_id not in NUMBERS:
        raise ValueError(
            f"KV cache format {name} has no CPU kernel to measure: expected one of "
            f"{', '.join(FORMATS)}"
        )
    return fmt


def try_out(name: str, shape: Shape) -> None:
    """Reads one block. ValueError for a format or sizes that no kernel takes."""
    tokens = shape.block_size
    Caches.fill(name, shape, tokens, 1).attention(shape, 1, tokens)()


def decode_of(name: str, shape: Shape, context: int, cache_bytes: int) -> Caches:
    """Caches of as many requests as fit; at least one."""
    packing = measurable(name).packing(
        shape.kv_heads, shape.head_size, shape.head_size, DTYPE
    )
    token_bytes = packing.head_slots * packing.state_bytes
    return Caches.fill(
        name, shape, context, max(1, cache_bytes // context // token_bytes)
    )


def measure_decode(
    name: str, shape: Shape, context: int, cache_bytes: int, repetitions: int
) -> Decode:
    """Medians over repetitions; `cache_bytes` should exceed the last-level cache."""
    caches = decode_of(name, shape, context, cache_bytes)
    base = decode_of(BASE, shape, context, cache_bytes)
    call, base_call = (c.attention(shape, 1, context) for c in (caches, base))
    read = caches.pages.view(-1)
    call()
    base_call()
    reads, bases, calls = [], [], []
    for _ in range(repetitions):
        reads.append(seconds_of(lambda: cpu_kernels.read_all(read)))
        bases.append(seconds_of(base_call))
        calls.append(seconds_of(call))
    requests, base_requests = len(caches.block_table), len(base.block_table)
    used = read.numel() * context // (caches.block_table.shape[1] * shape.block_size)
    rates = [read.numel() / s for s in reads]
    fractions = [used / s / rate for s, rate in zip(calls, rates, strict=True)]
    speedups = [
        b / base_requests / (s / requests) for s, b in zip(calls, bases, strict=True)
    ]
    seconds = statistics.median(calls)
    return Decode(
        cache_dtype=name,
        context=context,
        requests=requests,
        million_token_heads_per_s=requests * context * shape.kv_heads / seconds / 1e6,
        times_bfloat16=statistics.median(speedups),
        gb_per_s=used / seconds / 1e9,
        read_gb_per_s=statistics.median(rates) / 1e9,
        bandwidth_fraction=statistics.median(fractions),
    )


def measure_prefill(
    name: str, shape: Shape, new: int, context: int, repetitions: int
) -> Prefill:
    """Counts the products of Q with K and of P with V that a causal mask leaves."""
    caches = Caches.fill(name, shape, context + new, 1)
    call = caches.attention(shape, new, context + new)
    call()
    seconds = statistics.median(seconds_of(call) for _ in range(repetitions))
    pairs = new * context + new * (new + 1) / 2
    flop = 4 * shape.head_size * shape.kv_heads * shape.group * pairs
    return Prefill(
        cache_dtype=name,
        new_tokens=new,
        context=context,
        gflop_per_s=flop / seconds / 1e9,
    )


def add_arguments(parser: FlexibleArgumentParser) -> None:
    add = parser.add_argument
    add("--formats", nargs="+", default=list(FORMATS), help="KV formats")
    add(
        "--contexts", nargs="+", type=at_least(1), default=list(CONTEXTS), help="tokens"
    )
    add("--num-kv-heads", type=at_least(1), default=8, help="KV heads")
    add("--group-size", type=at_least(1), default=4, help="query heads per KV head")
    add("--head-size", type=at_least(1), default=128, help="elements of a head")
    add("--block-size", type=at_least(1), default=64, help="tokens of a block")
    add(
        "--prefill-tokens",
        type=at_least(0),
        default=512,
        help="new tokens; 0: no prefill",
    )
    add(
        "--cache-mib",
        type=at_least(1),
        default=256,
        help="bytes of the decoded caches, MiB",
    )
    add("--repetitions", type=at_least(1), default=9, help="counted calls")
    add("--mla", action="store_true", help="one latent per token instead of K and V")
    add("--mla-heads", type=at_least(1), default=16, help="query heads of a latent")
    add("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    if not cpu_kernels.available():
        print(f"nothing to measure: {cpu_kernels.why_unavailable()}")
        return 1
    if args.mla:
        return latent_attention.run(args)
    shape = Shape(
        kv_heads=args.num_kv_heads,
        group=args.group_size,
        head_size=args.head_size,
        block_size=args.block_size,
    )
    torch.manual_seed(0)
    for name in args.formats:
        try_out(name, shape)
    decodes, prefills = [], []
    cases = [(name, context) for name in args.formats for context in args.contexts]
    size = args.cache_mib * MiB_bytes
    for name, context in tqdm(cases, desc="attention"):
        decodes.append(measure_decode(name, shape, context, size, args.repetitions))
        if args.prefill_tokens:
            new = args.prefill_tokens
            prefills.append(
                measure_prefill(name, shape, new, context, args.repetitions)
            )
    machine = {"isa": cpu_kernels.isa(), "threads": torch.get_num_threads()}
    if args.json:
        rows = {
            "machine": machine,
            "shape": asdict(shape),
            "decode": [asdict(row) for row in decodes],
            "prefill": [asdict(row) for row in prefills],
        }
        print(json.dumps(rows, indent=2))
    else:
        print(f"{machine['isa']}, {machine['threads']} threads, {shape}")
        print_table(decodes, prefills)
    return 0


def print_table(decodes: list[Decode], prefills: list[Prefill]) -> None:
    print(
        "\ndecode               context  M token-heads/s  x bf16    GB/s  of read GB/s"
    )
    for d in decodes:
        print(
            f"{d.cache_dtype:20}{d.context:8}{d.million_token_heads_per_s:17.1f}"
            f"{d.times_bfloat16:8.2f}{d.gb_per_s:8.1f}{d.bandwidth_fraction:5.0%} "
            f"{d.read_gb_per_s:7.1f}"
        )
    if prefills:
        print("\nprefill              context  new tokens  GFLOP/s")
    for p in prefills:
        print(f"{p.cache_dtype:20}{p.context:8}{p.new_tokens:12}{p.gflop_per_s:9.0f}")
