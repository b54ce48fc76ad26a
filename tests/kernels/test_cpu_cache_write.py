"""Dense cells written in C++ are what the torch format writes, bit by bit."""

import pytest
import torch

from tests.kernels.cpu_attention_cases import DTYPES, isas, needs_library, using_isa
from tests.kernels.test_cpu_attention import Choose
from vllm.v1.attention.ops import cpu_kernels
from vllm.v1.kv_formats import by_name

__all__ = ["using_isa"]  # a fixture

pytestmark = needs_library

NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
BLOCKS, STATES = 5, 16


def empty_pages(heads: int, cell: int) -> torch.Tensor:
    return torch.full((BLOCKS, heads, STATES, cell), 0xA5, dtype=torch.uint8)


def written(
    key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages from the kernel and from the format."""
    cell = (key.shape[2] + value.shape[2]) * dtype.itemsize
    ours, theirs = (empty_pages(key.shape[1], cell) for _ in range(2))
    cpu_kernels.store_dense(ours, slots, key, value, dtype)
    inside = (slots >= 0) & (slots < BLOCKS * STATES)
    tokens = len(slots)
    by_name(NAMES[dtype]).store(
        theirs, slots[inside], key[:tokens][inside], value[:tokens][inside]
    )
    return ours, theirs


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("cache_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(64, 64), (80, 80), (192, 128), (33, 7), (128, 0)])
def test_cells_equal_the_format(
    isa: str,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    sizes: tuple[int, int],
    using_isa: Choose,
) -> None:
    using_isa(isa)
    torch.manual_seed(0)
    key, value = (torch.randn(20, 3, size).to(dtype) for size in sizes)
    slots = torch.randperm(BLOCKS * STATES)[:20]
    ours, theirs = written(key, value, slots, cache_dtype)
    assert torch.equal(ours, theirs)


SPECIAL = (
    *(0.0, -0.0, 1.0, -1.0, float("inf"), float("-inf"), float("nan")),
    *(65504.0, 65519.0, 65520.0, 65536.0, -70000.0, 3.3895e38, 3.4e38, -3.4e38),
    *(2.0**-14, 2.0**-15, 2.0**-24, 2.0**-25, 1.5 * 2.0**-25, 2.0**-126, 2.0**-130),
    *(1.0009765625, 1.00048828125, 1.00146484375, 1.00390625, 1.01171875, 6.1e-5),
)


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("cache_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values_round_and_saturate_like_torch(
    isa: str, dtype: torch.dtype, cache_dtype: torch.dtype, using_isa: Choose
) -> None:
    using_isa(isa)
    key = torch.tensor(SPECIAL).view(1, 1, -1).to(dtype)
    ours, theirs = written(key, -key, torch.tensor([3]), cache_dtype)
    ours, theirs = (p[0, 0, 3].clone().view(cache_dtype) for p in (ours, theirs))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(ours.signbit(), theirs.signbit()) or ours.isnan().any()


@pytest.mark.parametrize("isa", [name for name in isas() if name != "none"])
def test_every_half_and_bfloat_survives_the_way_through_float32(
    isa: str, using_isa: Choose
) -> None:
    using_isa(isa)
    for dtype in (torch.float16, torch.bfloat16):
        bits = torch.arange(-32768, 32768).to(torch.int16).view(dtype).view(16, 8, 512)
        wide = torch.empty(1, 8, 16, 2048, dtype=torch.uint8)
        none = bits[..., :0]
        cpu_kernels.store_dense(wide, torch.arange(16), bits, none, torch.float32)
        floats = wide[0].view(torch.float32).transpose(0, 1)
        expected = bits.float()
        limit = torch.finfo(dtype).max
        torch.testing.assert_close(floats, expected, rtol=0, atol=0, equal_nan=True)
        back = torch.empty(1, 8, 16, 1024, dtype=torch.uint8)
        cpu_kernels.store_dense(
            back, torch.arange(16), floats, floats[..., :0].contiguous(), dtype
        )
        stored = back[0].view(dtype).transpose(0, 1)
        assert torch.equal(stored.isnan(), bits.isnan())
        number = ~bits.isnan()
        assert torch.equal(stored[number], bits.clamp(-limit, limit)[number])


def test_slots_outside_the_cache_are_skipped() -> None:
    key, value = torch.randn(6, 2, 32), torch.randn(6, 2, 32)
    slots = torch.tensor([-1, 7, BLOCKS * STATES, -(2**40), 2**40, 0])
    ours, theirs = written(key, value, slots, torch.float32)
    assert torch.equal(ours, theirs)
    touched = (ours != 0xA5).flatten(3).any(-1).any(1)  # [blocks, states]
    assert touched.nonzero().tolist() == [[0, 0], [0, 7]]


def test_padding_of_keys_past_the_slots_is_ignored() -> None:
    key, value = torch.randn(8, 2, 32), torch.randn(8, 2, 32)
    ours, theirs = written(key, value, torch.tensor([3, 40]), torch.bfloat16)
    assert torch.equal(ours, theirs)


def test_strides_of_pages_and_rows_are_free() -> None:
    torch.manual_seed(0)
    slots = torch.randperm(BLOCKS * STATES)[:9]
    rows = torch.randn(9, 3 * 2 * 64).to(torch.bfloat16)
    key, value = rows[:, 128:256].view(9, 2, 64), rows[:, 256:].view(9, 2, 64)
    plain = empty_pages(2, 256)
    cpu_kernels.store_dense(plain, slots, key, value)
    strided = torch.full((BLOCKS, STATES, 2, 320), 0xA5, dtype=torch.uint8)
    strided = strided.transpose(1, 2)[..., :256]
    cpu_kernels.store_dense(strided, slots, key, value)
    assert torch.equal(strided, plain)
    assert torch.equal(plain, written(key, value, slots, torch.bfloat16)[1])


def test_many_tokens_are_stored_by_several_threads() -> None:
    before = torch.get_num_threads()
    pages = torch.zeros(64, 4, 16, 512, dtype=torch.uint8)
    key, value = torch.randn(1024, 4, 64), torch.randn(1024, 4, 64)
    try:
        torch.set_num_threads(3)
        cpu_kernels.store_dense(pages, torch.arange(1024), key, value)
    finally:
        torch.set_num_threads(before)
    stored = pages.view(torch.float32).transpose(1, 2).reshape(1024, 4, 128)
    assert torch.equal(stored, torch.cat((key, value), -1))


def test_no_tokens_write_nothing() -> None:
    none = torch.empty(0, 2, 32)
    ours, theirs = written(none, none, torch.empty(0).long(), torch.float32)
    assert torch.equal(ours, theirs)


KEY = torch.zeros(4, 2, 32)
PAGES = torch.zeros(BLOCKS, 2, STATES, 256, dtype=torch.uint8)
SLOTS = torch.arange(4)
WRONG = {
    "slot_mapping is torch.int32": (PAGES, SLOTS.int(), KEY, KEY),
    "slot_mapping has 4 slots": (PAGES, SLOTS, KEY[:3], KEY),
    "key is torch.float32 but value is": (PAGES, SLOTS, KEY, KEY.half()),
    "key has 2 heads, value 1": (PAGES, SLOTS, KEY, KEY[:, :1]),
    "key has shape": (PAGES, SLOTS, KEY.transpose(1, 2), KEY),
    "expected a contiguous vector": (PAGES, torch.arange(8)[::2], KEY, KEY),
    "cells of 256 bytes do not hold": (PAGES, SLOTS, KEY, KEY[..., :16]),
    "cache dtype torch.int8": (PAGES, SLOTS, KEY, KEY, torch.int8),
    "pages have shape": (PAGES.transpose(2, 3), SLOTS, KEY, KEY),
}


@pytest.mark.parametrize("message", WRONG)
def test_arguments_that_do_not_fit_are_refused(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cpu_kernels.store_dense(*WRONG[message])
