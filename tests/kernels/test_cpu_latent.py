"""Latent attention and latent writes in C++ equal the torch formats, on every
instruction set."""

import pytest
import torch

from tests.kernels.cpu_attention_cases import isas, needs_library, using_isa
from tests.kernels.test_cpu_attention import Choose
from tests.v1.attention.paged_batch import UNUSED_BLOCK, naive_attention
from vllm.v1.attention.ops import cpu_latent
from vllm.v1.kv_formats import KVFormat, KVScales, all_formats, by_name

__all__ = ["using_isa"]  # a fixture

pytestmark = needs_library

LORA, ROPE, HEADS, STATES = 512, 64, 16, 16
SIZE = LORA + ROPE
NAMES = [f.name for f in all_formats() if f.latent_capable and not f.alias_of]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NAN_ROW = 11
# Decode over several chunks, a tail, one token, and a tile of prefill.
REQUESTS = ((1, 700), (5, 70), (1, 1), (33, 33))


class Latents:
    """Requests' latents, written by the torch format into pages full of noise."""

    def __init__(
        self, fmt: KVFormat, dtype: torch.dtype, size: int = SIZE, heads: int = HEADS
    ) -> None:
        self.fmt, self.dtype, self.size = fmt.resolve(dtype), dtype, size
        generator = torch.Generator().manual_seed(11)
        widths = [-(-c // STATES) for _, c in REQUESTS]
        cell = self.fmt.layout(size, 0, dtype).nbytes
        shape = (sum(widths) + 2, 1, STATES, cell)
        self.pages = torch.randint(
            0, 256, shape, generator=generator, dtype=torch.uint8
        )
        order = torch.randperm(shape[0], generator=generator).int()
        self.table = torch.full((len(widths), max(widths)), UNUSED_BLOCK).int()
        self.stored = []
        for row, (_, context) in enumerate(REQUESTS):
            self.table[row, : widths[row]] = order[: widths[row]]
            order = order[widths[row] :]
            latents = torch.randn(context, 1, size, generator=generator).to(dtype)
            at = torch.arange(context)
            slots = self.table[row].long()[at // STATES] * STATES + at % STATES
            self.fmt.store(self.pages, slots, latents, None)
            blocks = self.table[row, : widths[row]]
            key, _ = self.fmt.load(self.pages, blocks, context, size, 0, torch.float32)
            self.stored.append(key)
        tokens = [n for n, _ in REQUESTS]
        self.starts = torch.tensor([0, *tokens]).cumsum(0).int()
        self.lengths = torch.tensor([c for _, c in REQUESTS]).int()
        self.query = torch.randn(sum(tokens), heads, size, generator=generator)
        self.query = self.query.to(dtype)

    def attend(self, lora: int = LORA, **how: float) -> torch.Tensor:
        out = self.query.new_full((*self.query.shape[:2], lora), torch.nan)
        cpu_latent.latent_attention(
            out,
            self.query,
            self.pages,
            self.fmt,
            self.starts,
            self.lengths,
            self.table,
            0.06,
            **how,
        )
        return out

    def expected(self, lora: int = LORA, **how: float) -> torch.Tensor:
        return torch.cat(
            [
                naive_attention(
                    self.query[self.starts[row] : self.starts[row + 1]],
                    key,
                    key[..., :lora],
                    first_position=context - new,
                    scale=0.06,
                    **how,
                )
                for row, (key, (new, context)) in enumerate(
                    zip(self.stored, REQUESTS, strict=True)
                )
            ]
        )


def worst(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_reads_what_the_format_stores(
    isa: str, name: str, dtype: torch.dtype, using_isa: Choose
) -> None:
    using_isa(isa)
    batch = Latents(by_name(name), dtype)
    tolerance = 5e-6 if dtype is torch.float32 else 8e-3
    assert worst(batch.attend(), batch.expected()) < tolerance


@pytest.mark.parametrize("heads", [1, 5, 8, 61, 128])
@pytest.mark.parametrize("name", ["bfloat16", "fp8_ds_mla"])
def test_any_number_of_heads_shares_a_latent(heads: int, name: str) -> None:
    batch = Latents(by_name(name), torch.float32, heads=heads)
    assert worst(batch.attend(), batch.expected()) < 5e-6


@pytest.mark.parametrize("window", [1, 30, 600])
def test_windows(window: int) -> None:
    batch = Latents(by_name("int8_per_token_head"), torch.float32)
    found = batch.attend(sliding_window=window)
    assert worst(found, batch.expected(sliding_window=window)) < 5e-6


def test_another_latent() -> None:
    batch = Latents(by_name("int4_per_token_head"), torch.float32, size=288)
    assert worst(batch.attend(256), batch.expected(256)) < 5e-6


def hard_latents(dtype: torch.dtype, size: int = SIZE) -> torch.Tensor:
    """[T, 1, size]: normal, huge, tiny, constant, one-sided, zero and non-finite."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(64, 1, size, generator=generator)
    limit = torch.finfo(dtype).max
    x[1] *= 1e-6
    x[2] *= 3e4
    x[3] = 0.0
    x[4] = 1.5
    x[5] = x[5].abs()
    x[6] = -x[6].abs()
    x[7, 0, ::7] = -0.0
    x[8, 0, ::5] = limit
    x[9, 0, ::50] = torch.inf
    x[10, 0, 3::50] = -torch.inf
    x[NAN_ROW, 0, 5::50] = torch.nan
    x[12] *= 448 / x[12].abs().max()
    x[13] = (torch.arange(size) % 33 - 16).float() / 4  # many ties
    x[14] *= torch.finfo(torch.float32).tiny
    return x.to(dtype)


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_written_bytes_are_the_formats(
    isa: str, name: str, dtype: torch.dtype, using_isa: Choose
) -> None:
    using_isa(isa)
    fmt = by_name(name).resolve(dtype)
    latents = hard_latents(dtype)
    scales = [1.0, 0.37] if name.startswith("fp8_e") else [1.0]
    generator = torch.Generator().manual_seed(4)
    slots = torch.randperm(6 * STATES, generator=generator)[: len(latents)]
    slots[[20, 40]] = -1
    for scale in scales:
        cell = fmt.layout(SIZE, 0, dtype).nbytes
        ours = torch.full((6, 1, STATES, cell), 0xA5, dtype=torch.uint8)
        theirs = ours.clone()
        cpu_latent.store_latents(ours, slots, latents, fmt, scale)
        fmt.store(theirs, slots, latents, None, KVScales(k=scale))
        nan = int(slots[NAN_ROW])
        assert_same_numbers(fmt, ours, theirs, nan)
        ours.flatten(0, 2)[nan] = theirs.flatten(0, 2)[nan]
        wrong = (ours != theirs).flatten(0, 2).any(-1)
        assert not wrong.any(), f"slots {wrong.nonzero().flatten().tolist()} differ"


def assert_same_numbers(
    fmt: KVFormat, ours: torch.Tensor, theirs: torch.Tensor, slot: int
) -> None:
    """A NaN may have any bits."""
    found, wanted = (
        fmt.load(p, torch.arange(6), 6 * STATES, SIZE, 0, torch.float32)[0][slot]
        for p in (ours, theirs)
    )
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


def test_writes_take_strided_latents_and_padding() -> None:
    fmt = by_name("fp8_ds_mla")
    wide = torch.randn(9, 1, SIZE + 64)
    pages = torch.zeros((1, 1, STATES, 656), dtype=torch.uint8)
    cpu_latent.store_latents(pages, torch.tensor([3, 1]), wide[..., :SIZE], fmt)
    expected = torch.zeros_like(pages)
    fmt.store(expected, torch.tensor([3, 1]), wide[:2, :, :SIZE], None)
    assert torch.equal(pages, expected)
    with pytest.raises(ValueError, match="expected at least 9"):
        cpu_latent.store_latents(pages, torch.arange(9), wide[:5, :, :SIZE], fmt)


def test_what_no_kernel_takes_is_refused() -> None:
    fmt = by_name("auto")
    assert not cpu_latent.serves(fmt, SIZE, LORA)  # its type is not known
    assert not cpu_latent.serves(by_name("bfloat16"), 48, 32)
    assert not cpu_latent.serves(by_name("nvfp4"), SIZE, LORA)
    # 320 = 5 x 64 is rotated in blocks of 64, which 288 values would cut.
    assert not cpu_latent.serves(by_name("int4_per_token_head"), 320, 288)
    batch = Latents(by_name("bfloat16"), torch.bfloat16)
    with pytest.raises(ValueError, match=r"no kernel.*500 values.*torch reference"):
        batch.attend(500)
    batch.fmt = by_name("fp8_ds_mla")
    with pytest.raises(ValueError, match=r"cells of 1152 bytes.*fp8_ds_mla.*656"):
        batch.attend()
    batch.fmt = by_name("bfloat16")
    batch.table[0, 3] = UNUSED_BLOCK
    with pytest.raises(ValueError, match=r"request 0.*outside the cache"):
        batch.attend()
