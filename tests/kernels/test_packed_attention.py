"""C++ attention over packed pages equals attention over what their formats decode."""

from collections.abc import Callable
from time import perf_counter

import pytest
import torch

from tests.kernels.cpu_attention_cases import Options, isas, needs_library, using_isa
from tests.kernels.packed_cases import FORMATS, PackedBatch, fits
from vllm.v1.attention.ops import cpu_cells, cpu_kernels
from vllm.v1.kv_formats import all_formats, by_name

__all__ = ["using_isa"]  # a fixture

pytestmark = needs_library

PLAIN = Options()
DTYPES = (torch.bfloat16, torch.float32)
HEAD_SIZES = (32, 64, 80, 96, 128, 192, 256, 512)
OPTIONS = {
    "window": Options(sliding_window=40),
    "window of one": Options(sliding_window=1),
    "soft cap and sinks": Options(soft_cap=2.0, sinks=torch.linspace(-3, 3, 6)),
    "both ways": Options(causal=False, sliding_window=20),
}

Choose = Callable[[str], str]


def test_every_packed_format_but_latents_has_a_kernel() -> None:
    served = {f.name for f in all_formats() if f.format_id in cpu_cells.NUMBERS}
    named = {f.name for f in all_formats() if not f.latent and f.name != "auto"}
    assert served == named


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("name", FORMATS)
def test_head_sizes(isa: str, name: str, using_isa: Choose) -> None:
    using_isa(isa)
    fmt = by_name(name)
    for size in HEAD_SIZES:
        assert fits(fmt, size, size)
        for dtype in DTYPES:
            PackedBatch(
                fmt=fmt,
                dtype=dtype,
                head_size=size,
                head_size_v=size,
                kv_heads=2,
                requests=((1, 70), (22, 40)),
            ).check(PLAIN)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("sizes", [(72, 40), (192, 128), (100, 36), (40, 200)])
def test_unlike_and_odd_head_sizes(name: str, sizes: tuple[int, int]) -> None:
    fmt = by_name(name)
    if not fits(fmt, *sizes):
        pytest.skip(f"{name} has no cells of {sizes}")
    key, value = sizes
    for dtype in DTYPES:
        PackedBatch(fmt=fmt, dtype=dtype, head_size=key, head_size_v=value).check(PLAIN)


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(isa: str, name: str, options: Options, using_isa: Choose) -> None:
    using_isa(isa)
    for dtype in (*DTYPES, torch.float16):
        PackedBatch(fmt=by_name(name), dtype=dtype).check(options)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("group", [1, 2, 4, 5, 7, 8, 16])
def test_query_heads_per_kv_head(name: str, group: int) -> None:
    for dtype in DTYPES:
        PackedBatch(
            fmt=by_name(name), dtype=dtype, group=group, requests=((1, 70), (3, 9))
        ).check(PLAIN)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("block_size", [4, 16, 48, 64])
def test_block_sizes(name: str, block_size: int) -> None:
    batch = PackedBatch(fmt=by_name(name), dtype=torch.bfloat16, block_size=block_size)
    batch.check(Options(sliding_window=90))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_a_token_has_the_same_bits_in_any_batch_and_chunk(
    name: str, dtype: torch.dtype
) -> None:
    batch = PackedBatch(
        fmt=by_name(name), dtype=dtype, requests=((150, 650),), group=7, kv_heads=1
    )
    together = batch.run(PLAIN)
    query = batch.query
    for begin, end in ((0, 1), (1, 4), (4, 40), (149, 150)):
        batch.query = query[begin:end]
        batch.query_start_loc = torch.tensor([0, end - begin], dtype=torch.int32)
        batch.seq_lens = torch.tensor([500 + end], dtype=torch.int32)
        assert torch.equal(batch.run(PLAIN), together[begin:end])


@pytest.mark.parametrize("name", FORMATS)
def test_freed_pages_and_unwritten_states_are_never_seen(name: str) -> None:
    options = Options(sliding_window=33)
    batch = PackedBatch(
        fmt=by_name(name), dtype=torch.bfloat16, requests=((1, 150), (3, 90))
    )
    expected = batch.run(options)
    for row, (new, length) in enumerate(batch.requests):
        first = (length - new - 32) // batch.block_size
        batch.pages[batch.block_table[row, :first].long()] = 0x7F
        batch.block_table[row, :first] = -1
    out = batch.run(options)
    assert torch.isfinite(out).all()
    assert torch.equal(out, expected)


def test_a_format_without_cells_is_refused() -> None:
    batch = PackedBatch(fmt=by_name("nvfp4"), dtype=torch.bfloat16)
    batch.fmt = by_name("nvfp4", "linear")
    with pytest.raises(ValueError, match="nvfp4:linear has no CPU kernel"):
        batch.run(PLAIN)


def test_torn_sides_are_refused() -> None:
    batch = PackedBatch(fmt=by_name("nvfp4"), dtype=torch.bfloat16)
    batch.pages = batch.pages.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match="expected dense head slots"):
        batch.run(PLAIN)


def test_a_call_costs_little_python() -> None:
    """Bounded loosely: the machine may be busy."""
    batch = PackedBatch(
        fmt=by_name("fp8"), dtype=torch.bfloat16, requests=((1, 1),), kv_heads=1
    )
    seconds = min(_seconds(batch) for _ in range(200))
    assert seconds < 100e-6
    assert cpu_kernels.isa()


def _seconds(batch: PackedBatch) -> float:
    start = perf_counter()
    batch.run(PLAIN)
    return perf_counter() - start
