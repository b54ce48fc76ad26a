"""Batches over packed pages for the Triton kernels, on a GPU or interpreted."""

from dataclasses import dataclass, replace

import torch

from tests.kernels.cpu_attention_cases import Options
from tests.kernels.packed_cases import SCALES, PackedBatch
from tests.v1.kv_formats.helpers import make_pages
from vllm.v1.attention.ops.triton_batch import Masks, Requests
from vllm.v1.attention.ops.triton_paged import dot_dtype, paged_attention, serves
from vllm.v1.kv_formats import all_formats, by_name

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMATS = [
    fmt.name
    for fmt in all_formats()
    if serves(fmt) and fmt.resolve(torch.bfloat16) is fmt and not fmt.alias_of
]
# Of the largest output: products are in the queries' type, and so is the output.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
# (new tokens, sequence length): one per request, then prompts, whole and continued.
# Lengths end in the middle of blocks and tiles, and on their edges.
DECODE = ((1, 70), (1, 16), (1, 1), (1, 35))
MIXED = ((1, 40), (9, 41), (5, 5), (1, 64))
OPTIONS = {
    "plain": Options(),
    "window": Options(sliding_window=19),
    "cap": Options(soft_cap=4.0),
    "all": Options(sliding_window=33, soft_cap=2.0),
    "not causal": Options(causal=False),
    "not causal, window": Options(causal=False, sliding_window=7),
}


def with_sinks(options: Options, heads: int) -> Options:
    return replace(options, sinks=torch.linspace(-2, 3, heads))


@dataclass(frozen=True, kw_only=True)
class Case:
    """One launch: a format, shapes, and what is asked for."""

    name: str
    size: int = 64
    size_v: int | None = None
    page: int = 16
    group: int = 3
    dtype: torch.dtype = torch.bfloat16
    decode: bool = False
    options: str = "plain"
    sinks: bool = False
    splits: int = 1
    order: str = "LBHNC"

    def batch(self) -> PackedBatch:
        batch = PackedBatch(
            fmt=by_name(self.name),
            dtype=self.dtype,
            head_size=self.size,
            head_size_v=self.size if self.size_v is None else self.size_v,
            kv_heads=2,
            group=self.group,
            block_size=self.page,
            requests=DECODE if self.decode else MIXED,
        )
        blocks, slots, states, cell = batch.pages.shape
        _, pages = make_pages(self.order, blocks, slots, states, cell)
        batch.pages = pages.copy_(batch.pages)
        return batch

    def check(self) -> None:
        """The kernel's output is the format's own, within the type's rounding."""
        batch, options = self.batch(), OPTIONS[self.options]
        if self.sinks:
            options = with_sinks(options, batch.query.shape[1])
        expected = batch.expected(options)
        out = attend(batch, options, self.splits)
        error = (out.double() - expected).abs().max() / expected.abs().max()
        tolerance = TOLERANCE[dot_dtype(batch.fmt, self.dtype)]
        assert error <= max(tolerance, TOLERANCE[self.dtype]), f"{error:.2e}"


def requests_of(batch: PackedBatch) -> Requests:
    return Requests(
        query_start_loc=batch.query_start_loc.to(DEVICE),
        seq_lens=batch.seq_lens.to(DEVICE),
        block_table=batch.block_table.to(DEVICE),
        max_query_len=max(n for n, _ in batch.requests),
        max_seq_len=max(n for _, n in batch.requests),
    )


def masks_of(options: Options) -> Masks:
    return Masks(
        causal=options.causal,
        sliding_window=options.sliding_window if options.sliding_window > 0 else None,
        soft_cap=options.soft_cap,
        sinks=None if options.sinks is None else options.sinks.to(DEVICE),
    )


def on_device(pages: torch.Tensor) -> torch.Tensor:
    """Pages with the same strides where the kernels run."""
    moved = torch.empty_strided(
        pages.shape, pages.stride(), dtype=pages.dtype, device=DEVICE
    )
    return moved.copy_(pages)


def attend(
    batch: PackedBatch, options: Options, splits: int | None = None
) -> torch.Tensor:
    """The kernel's output on the host; NaN where it wrote nothing."""
    shape = (*batch.query.shape[:2], batch.head_size_v)
    out = torch.full(shape, float("nan"), dtype=batch.dtype, device=DEVICE)
    paged_attention(
        out,
        batch.query.to(DEVICE),
        on_device(batch.pages),
        batch.fmt,
        requests_of(batch),
        batch.head_size**-0.5,
        masks_of(options),
        SCALES,
        splits,
    )
    return out.cpu()
