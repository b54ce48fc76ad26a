"""C++ writes of packed states equal the torch formats', byte for byte.

TurboQuant alone may differ. torch's square root is not always the nearest float: a
key's norm may round to the neighbouring float16, and a coordinate within 1e-6 of a
boundary may take the neighbouring code. And a smallest value of 0 has either sign.
"""

from collections.abc import Callable

import pytest
import torch

from tests.kernels.cpu_attention_cases import DTYPES, isas, needs_library, using_isa
from tests.kernels.packed_cases import FORMATS, SCALES, fits
from vllm.v1.attention.ops import cpu_kernels
from vllm.v1.kv_formats import KVFormat, KVScales, by_name
from vllm.v1.kv_formats.base import UNIT_SCALES

__all__ = ["using_isa"]  # a fixture

pytestmark = needs_library

BLOCKS, STATES, HEADS = 6, 16, 3
SIZES = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (72, 40), (256, 256))
Choose = Callable[[str], str]


def pages_of(fmt: KVFormat, sizes: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    packing = fmt.packing(HEADS, *sizes, dtype)
    shape = BLOCKS, packing.head_slots, STATES, packing.state_bytes
    return torch.full(shape, 0xA5, dtype=torch.uint8)


def check(
    fmt: KVFormat, key: torch.Tensor, value: torch.Tensor, scales: KVScales = SCALES
) -> None:
    """Both ways write the same bytes, and touch no others."""
    sizes = key.shape[-1], value.shape[-1]
    ours, theirs = (pages_of(fmt, sizes, key.dtype) for _ in range(2))
    slots = torch.randperm(BLOCKS * STATES)[: len(key)]
    cpu_kernels.store(ours, slots, key, value, fmt, scales)
    fmt.store(theirs, slots, key, value, scales)
    if torch.equal(ours, theirs):
        return
    assert fmt.mode.is_turboquant, f"{int((ours != theirs).sum())} bytes differ"
    assert_equal_but_for_roots(fmt, ours, theirs, sizes)


def assert_equal_but_for_roots(
    fmt: KVFormat, ours: torch.Tensor, theirs: torch.Tensor, sizes: tuple[int, int]
) -> None:
    layout = fmt.layout(*sizes)
    mine = layout.unpack(ours.flatten(1, 2), 0, 0)
    other = layout.unpack(theirs.flatten(1, 2), 0, 0)
    for name in mine:
        equal = (mine[name] == other[name]) | (mine[name] != mine[name])
        assert int((~equal).sum()) <= 2 * name.startswith("k_"), name
    if not fmt.key_fp8:
        norms = mine["k_norm"].float(), other["k_norm"].float()
        torch.testing.assert_close(*norms, rtol=2e-3, atol=1e-7)


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_equal_the_format(
    isa: str, name: str, dtype: torch.dtype, using_isa: Choose
) -> None:
    using_isa(isa)
    torch.manual_seed(0)
    fmt = by_name(name)
    for sizes in SIZES:
        if not fits(fmt, *sizes):
            continue
        for magnitude in (1.0, 1e-3, 300.0):
            key, value = (torch.randn(60, HEADS, n) * magnitude for n in sizes)
            check(fmt, key.to(dtype), value.to(dtype))


INF, NAN = float("inf"), float("nan")
SPECIAL = {
    "zeros": (0.0,),
    "minus zero": (-0.0, 0.0),
    "one value": (0.37,),
    "one side": (1.0, 2.0, 3.5),
    "NaN": (NAN, 1.0, -2.0),
    "infinities": (INF, -INF, 1.0, 0.5),
    "huge": (3e38, -1e38, 65504.0, 70000.0, 2.0**60),
    "tiny": (1e-30, -1e-38, 2.0**-24, 1e-7),
    "ties": (0.5, 1.5, 2.5, -0.5, -2.5, 6.0, 0.25, 0.75, 5.0),
    "limits": (448.0, 449.0, 464.0, 57344.0, 61440.0, 2.0**-9, 2.0**-10, 2.0**-17),
}


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("values", SPECIAL.values(), ids=SPECIAL)
def test_special_values(
    isa: str, name: str, values: tuple[float, ...], using_isa: Choose
) -> None:
    using_isa(isa)
    row = torch.tensor(values).repeat(64 // len(values) + 1)[:64]
    for dtype in DTYPES:
        key = row.to(dtype).expand(4, HEADS, 64).contiguous()
        for scales in (UNIT_SCALES, SCALES):
            check(by_name(name), key, key.flip(-1), scales)


@pytest.mark.parametrize("name", FORMATS)
def test_strides_of_rows_are_free_and_bad_slots_are_skipped(name: str) -> None:
    torch.manual_seed(0)
    fmt = by_name(name)
    wide = torch.randn(7, 3 * HEADS * 64).to(torch.bfloat16)
    key = wide[:, : HEADS * 64].view(7, HEADS, 64)
    value = wide[:, 2 * HEADS * 64 :].view(7, HEADS, 64)
    slots = torch.tensor([5, -1, 2**40, BLOCKS * STATES, 0, 17])
    ours, theirs = (pages_of(fmt, (64, 64), key.dtype) for _ in range(2))
    cpu_kernels.store(ours, slots, key, value, fmt)
    kept = torch.tensor([0, 4, 5])
    fmt.store(theirs, slots[kept], key[kept].contiguous(), value[kept].contiguous())
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", FORMATS)
def test_many_tokens_are_stored_by_several_threads(name: str) -> None:
    torch.manual_seed(0)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        key, value = (torch.randn(90, HEADS, 128) for _ in range(2))
        check(by_name(name), key, value)
    finally:
        torch.set_num_threads(before)
