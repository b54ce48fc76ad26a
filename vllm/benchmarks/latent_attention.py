"""`vllm bench attention --mla`: decode and cache writes over latents, per format.

One latent per token serves every query head, so decode is bound by arithmetic as soon
as there are many heads: rates are given beside those of the bfloat16 latent.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from tqdm.auto import tqdm

from vllm.utils.math_utils import cdiv
from vllm.utils.mem_constants import MiB_bytes
from vllm.v1.attention.ops import cpu_kernels, cpu_latent
from vllm.v1.kv_formats import KVFormat, all_formats, by_name

DTYPE = torch.bfloat16  # of queries and new latents
BASE = "bfloat16"
LORA, ROPE = 512, 64  # DeepSeek's latent


@dataclass(frozen=True, kw_only=True)
class Row:
    """Rates of one format; a token-head is one stored latent, whatever reads it."""

    cache_dtype: str
    state_bytes: int
    context: int
    requests: int
    million_token_heads_per_s: float
    gb_per_s: float
    gflop_per_s: float
    of_bfloat16: float  # token-heads/s
    million_writes_per_s: float


def latent_formats() -> list[str]:
    """Every format with a kernel, the base first; the same bytes only once."""
    names = [
        fmt.name
        for fmt in all_formats()
        if not fmt.alias_of and cpu_latent.serves(fmt, LORA + ROPE, LORA)
    ]
    return [BASE, *(name for name in names if name != BASE)]


def measure(
    name: str, context: int, heads: int, block_size: int, cache_bytes: int, repeat: int
) -> tuple[float, float, int]:
    """Seconds of a decode step and of a write of one page per request, and how many
    requests there are: `cache_bytes` of latents in all."""
    fmt, size = by_name(name), LORA + ROPE
    cell = fmt.layout(size, 0, DTYPE).nbytes
    requests = max(1, cache_bytes // (context * cell))
    width = cdiv(context, block_size)
    pages = torch.empty((width * requests, 1, block_size, cell), dtype=torch.uint8)
    cpu_kernels.advise_huge_pages(pages)
    latents = torch.randn(block_size, 1, size).to(DTYPE)
    cpu_latent.store_latents(pages[:1], torch.arange(block_size), latents, fmt)
    pages.copy_(pages[:1].expand_as(pages))
    table = torch.randperm(width * requests).int().view(requests, width)
    decode = decode_call(fmt, pages, table, context, heads)
    slots = (table[:, -1:].long() * block_size + torch.arange(block_size)).flatten()
    new = latents.repeat(requests, 1, 1)

    def write() -> None:
        cpu_latent.store_latents(pages, slots, new, fmt)

    return median_seconds(decode, repeat), median_seconds(write, repeat), requests


def decode_call(
    fmt: KVFormat, pages: torch.Tensor, table: torch.Tensor, context: int, heads: int
) -> Callable[[], None]:
    """One new token for each request of `context` latents."""
    requests = len(table)
    query = torch.randn(requests, heads, LORA + ROPE).to(DTYPE)
    out = torch.empty(requests, heads, LORA, dtype=DTYPE)
    starts = torch.arange(requests + 1).int()
    lengths = torch.full((requests,), context).int()

    def call() -> None:
        cpu_latent.latent_attention(
            out, query, pages, fmt, starts, lengths, table, (LORA + ROPE) ** -0.5
        )

    return call


def median_seconds(call: Callable[[], None], repeat: int) -> float:
    """After one call that does not count."""
    call()
    seconds = []
    for _ in range(repeat):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def rows(args: argparse.Namespace, heads: int) -> list[Row]:
    """Every format at every context."""
    found, base = [], {}
    size = args.cache_mib * MiB_bytes
    cases = [(context, name) for context in args.contexts for name in latent_formats()]
    for context, name in tqdm(cases, desc="latent attention"):
        seconds, writing, requests = measure(
            name, context, heads, args.block_size, size, args.repetitions
        )
        states = requests * context
        cell = by_name(name).layout(LORA + ROPE, 0, DTYPE).nbytes
        rate = states / seconds
        base.setdefault(context, rate)
        found.append(
            Row(
                cache_dtype=name,
                state_bytes=cell,
                context=context,
                requests=requests,
                million_token_heads_per_s=rate / 1e6,
                gb_per_s=rate * cell / 1e9,
                gflop_per_s=rate * heads * 2 * (2 * LORA + ROPE) / 1e9,
                of_bfloat16=rate / base[context],
                million_writes_per_s=requests * args.block_size / writing / 1e6,
            )
        )
    return found


def run(args: argparse.Namespace) -> int:
    heads = args.mla_heads
    found = rows(args, heads)
    machine = {"isa": cpu_kernels.isa(), "threads": torch.get_num_threads()}
    if args.json:
        table = {
            "machine": machine,
            "shape": {"heads": heads, "lora": LORA, "rope": ROPE},
            "latent_decode": [asdict(row) for row in found],
        }
        print(json.dumps(table, indent=2))
        return 0
    print(
        f"{machine['isa']}, {machine['threads']} threads, {heads} heads over a latent "
        f"of {LORA} + {ROPE}\n\n"
        f"{'format':22}{'bytes':>6}{'context':>9}{'M token-heads/s':>17}{'GB/s':>8}"
        f"{'GFLOP/s':>9}{'of bf16':>9}{'M writes/s':>12}"
    )
    for r in found:
        print(
            f"{r.cache_dtype:22}{r.state_bytes:6}{r.context:9}"
            f"{r.million_token_heads_per_s:17.2f}{r.gb_per_s:8.2f}{r.gflop_per_s:9.0f}"
            f"{r.of_bfloat16:9.2f}{r.million_writes_per_s:12.2f}"
        )
    return 0
