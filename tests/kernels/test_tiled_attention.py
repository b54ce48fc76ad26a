"""C++ kernels over tiles of 16 states: stores byte for byte, attention to tolerance."""

import pytest
import torch

from tests.kernels.cpu_attention_cases import DTYPES, Options, isas
from tests.kernels.packed_cases import SCALES, TILED, PackedBatch, fits
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.ops import cpu_kernels
from vllm.v1.kv_formats import by_id, by_name

BF16 = torch.bfloat16
pytestmark = pytest.mark.skipif(
    "avx512" not in isas(), reason="tiles are read on processors with AVX-512 and bf16"
)

PLAIN = Options()
FORMATS = pytest.mark.parametrize("format_id", TILED)
SIZES = ((32, 32), (64, 64), (72, 40), (80, 80), (96, 96), (128, 128), (192, 128))
LARGE = ((256, 256), (512, 512))
OPTIONS = {
    "window": Options(sliding_window=40),
    "window of one": Options(sliding_window=1),
    "soft cap and sinks": Options(soft_cap=2.0, sinks=torch.linspace(-3, 3, 6)),
    "both ways": Options(causal=False, sliding_window=20),
    "all": Options(sliding_window=90, soft_cap=4.0, sinks=torch.linspace(-1, 6, 6)),
}


@FORMATS
@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_equal_the_format(format_id: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    fmt = by_id(format_id)
    for sizes in SIZES:
        if not fits(fmt, *sizes):
            continue
        packing = fmt.packing(3, *sizes, BF16)
        shape = 4, packing.head_slots, 32, packing.state_bytes
        ours, theirs = (torch.full(shape, 0xA5, dtype=torch.uint8) for _ in range(2))
        slots = torch.randperm(4 * 32)[:60]
        key, value = (torch.randn(60, 3, n).to(dtype) for n in sizes)
        cpu_kernels.store(ours, slots, key, value, fmt, SCALES)
        fmt.store(theirs, slots, key, value, SCALES)
        differing = int((ours != theirs).sum())
        # See test_packed_cache_write for the roots of TurboQuant.
        assert differing <= 4 * fmt.mode.is_turboquant, f"{differing} bytes differ"


@FORMATS
@pytest.mark.parametrize("sizes", SIZES + LARGE)
def test_head_sizes(format_id: str, sizes: tuple[int, int]) -> None:
    fmt = by_id(format_id)
    if not fits(fmt, *sizes):
        pytest.skip(f"{format_id} holds no heads of {sizes}")
    key, value = sizes
    requests = ((1, 130), (22, 40), (1, 16))
    PackedBatch(
        fmt=fmt, dtype=BF16, head_size=key, head_size_v=value, requests=requests
    ).check(PLAIN)


@FORMATS
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(format_id: str, options: Options) -> None:
    PackedBatch(fmt=by_id(format_id), dtype=BF16).check(options)


@FORMATS
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 9, 16])
def test_query_heads_per_kv_head(format_id: str, group: int) -> None:
    PackedBatch(
        fmt=by_id(format_id), dtype=BF16, group=group, requests=((1, 70), (3, 9))
    ).check(PLAIN)


@FORMATS
@pytest.mark.parametrize("block_size", [16, 48, 64, 128])
def test_block_sizes(format_id: str, block_size: int) -> None:
    batch = PackedBatch(fmt=by_id(format_id), dtype=BF16, block_size=block_size)
    batch.check(Options(sliding_window=90))


@FORMATS
def test_a_token_has_the_same_bits_in_any_batch_and_chunk(format_id: str) -> None:
    batch = PackedBatch(
        fmt=by_id(format_id), dtype=BF16, requests=((150, 650),), group=7, kv_heads=1
    )
    together = batch.run(PLAIN)
    query = batch.query
    for begin, end in ((0, 1), (1, 4), (4, 40), (149, 150)):
        batch.query = query[begin:end]
        batch.query_start_loc = torch.tensor([0, end - begin], dtype=torch.int32)
        batch.seq_lens = torch.tensor([500 + end], dtype=torch.int32)
        assert torch.equal(batch.run(PLAIN), together[begin:end])


@FORMATS
def test_few_rows_have_the_bits_of_many(format_id: str) -> None:
    """Rows multiplied in registers and rows multiplied in blocks."""
    batch = PackedBatch(
        fmt=by_id(format_id), dtype=BF16, requests=((8, 300),), group=2, kv_heads=1
    )
    together = batch.run(Options(sliding_window=77))
    query = batch.query
    for token in range(8):
        batch.query = query[token : token + 1]
        batch.query_start_loc = torch.tensor([0, 1], dtype=torch.int32)
        batch.seq_lens = torch.tensor([293 + token], dtype=torch.int32)
        alone = batch.run(Options(sliding_window=77))
        assert torch.equal(alone, together[token : token + 1])


@FORMATS
def test_bits_do_not_depend_on_threads(format_id: str) -> None:
    batch = PackedBatch(
        fmt=by_id(format_id), dtype=BF16, requests=((1, 1500), (3, 700), (40, 300))
    )
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = batch.run(PLAIN)
        torch.set_num_threads(3)
        assert torch.equal(batch.run(PLAIN), alone)
    finally:
        torch.set_num_threads(before)


@FORMATS
@pytest.mark.parametrize("noise", [0x7F, 0xFF, 0x7C])
def test_freed_pages_and_unwritten_states_are_never_seen(
    format_id: str, noise: int
) -> None:
    """States before the window and behind the last one hold anything at all."""
    options = Options(sliding_window=33)
    requests = ((1, 150), (3, 90), (1, 17), (12, 70))
    batch = PackedBatch(fmt=by_id(format_id), dtype=BF16, requests=requests)
    expected = batch.run(options)
    fmt, sizes = batch.fmt, (64, 64)
    layout = fmt.layout(*sizes, BF16)
    for row, (new, length) in enumerate(batch.requests):
        oldest = max(length - new - 32, 0)
        first = oldest // batch.block_size
        batch.pages[batch.block_table[row, :first].long()] = noise
        unseen = [*range(first * batch.block_size, oldest)]
        whole = -(-length // batch.block_size) * batch.block_size
        for position in (*unseen, *range(length, whole)):
            spoil(layout, batch, row, position, noise)
        batch.block_table[row, :first] = -1
    out = batch.run(options)
    assert torch.isfinite(out).all()
    assert torch.equal(out, expected)


def spoil(layout, batch: PackedBatch, row: int, position: int, noise: int) -> None:
    block = int(batch.block_table[row, position // batch.block_size])
    tile, turn = divmod(position % batch.block_size, 16)
    for side, plane in layout.planes():
        for _, part in layout.parts(batch.pages, side, plane):
            lanes = part.shape[4]
            part[block, :, tile, turn // lanes, turn % lanes] = noise


def test_what_does_not_fit_is_refused() -> None:
    fmt = by_name("fp8", "tile16")
    with pytest.raises(ValueError, match="no kernel for this cache dtype and query"):
        PackedBatch(fmt=fmt, dtype=torch.float32).run(PLAIN)
    batch = PackedBatch(fmt=fmt, dtype=BF16, block_size=48)
    batch.pages = batch.pages[:, :, :24]
    with pytest.raises(ValueError, match="a multiple of 16 states that touch"):
        batch.run(PLAIN)
    odd = PackedBatch(fmt=fmt, dtype=BF16, head_size=36, head_size_v=36)
    with pytest.raises(ValueError, match="the kernels take multiples of 8"):
        odd.run(PLAIN)


def test_the_backend_publishes_tiles_for_bfloat16_only() -> None:
    for format_id in TILED:
        cells = by_id(format_id.replace("tile16", "cells"))
        assert CPUAttentionBackend.arranged(cells, BF16).format_id == format_id
        for dtype in (torch.float32, torch.float16, None):
            assert CPUAttentionBackend.arranged(cells, dtype) == cells
