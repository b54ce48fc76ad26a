"""What the CUDA kernels write, computed on the host by the functions that they call for
each work item: byte for byte what the formats write, and nothing else."""

import pytest
import torch

from vllm.v1.attention.ops import cuda_kernels
from vllm.v1.kv_formats import KVFormat, KVScales, by_name

pytestmark = pytest.mark.usefixtures("emulated")

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NAMES = ("nvfp4", "nvfp4_4over6")
ARRANGEMENTS = ("cells", "linear")
SIZES = (16, 64, 80, 96, 128, 256)
BLOCKS, STATES = 5, 16
SCALES = KVScales(k=0.75, v=1.25)
INF, NAN = float("inf"), float("nan")
SPECIAL = {
    "zeros": (0.0,),
    "minus zero": (-0.0, 0.0),
    "NaN": (NAN, 1.0, -2.0),
    "infinities": (INF, -INF, 1.0, 0.5),
    "huge": (3e38, -1e38, 65504.0, 2.0**60),
    "tiny": (1e-30, -1e-38, 2.0**-24, 1e-7),
    "ties": (0.5, 1.5, 2.5, -0.5, -2.5, 6.0, 0.25, 0.75, 5.0),
}


def blank(fmt: KVFormat, heads: int, size: int, states: int = STATES) -> torch.Tensor:
    packing = fmt.packing(heads, size, size)
    shape = BLOCKS, packing.head_slots, states, packing.state_bytes
    return torch.full(shape, 0xA5, dtype=torch.uint8)


def check_nvfp4(
    fmt: KVFormat, key: torch.Tensor, value: torch.Tensor, states: int = STATES
) -> None:
    ours, theirs = (blank(fmt, *key.shape[1:], states) for _ in range(2))
    slots = torch.randperm(BLOCKS * states)[: len(key)]
    slots[::7] = -1
    slots[3] = BLOCKS * states  # past the cache: skipped, as -1 is
    cuda_kernels.nvfp4_store(ours, slots, key, value, fmt, SCALES)
    slots[3] = -1
    fmt.store(theirs, slots, key, value, SCALES)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nvfp4_bytes_equal_the_formats(
    name: str, arrangement: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    fmt = by_name(name).arranged(arrangement)
    for heads, size in zip((3, 1, 2, 8, 2, 1), SIZES, strict=True):
        for magnitude in (1.0, 1e-3, 300.0):
            rows = torch.randn(2, 40, heads, size) * magnitude
            check_nvfp4(fmt, *rows.to(dtype))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", SPECIAL)
def test_nvfp4_bytes_of_special_numbers(
    name: str, dtype: torch.dtype, case: str
) -> None:
    torch.manual_seed(0)
    values = torch.tensor(SPECIAL[case])
    x = values[torch.randint(len(values), (2, 10, 2, 64))].to(dtype)
    check_nvfp4(by_name(name), *x)


@pytest.mark.parametrize("states", [8, 16, 64])
def test_nvfp4_blocks_of_other_sizes(states: int) -> None:
    torch.manual_seed(0)
    check_nvfp4(by_name("nvfp4"), *torch.randn(2, 25, 3, 64), states)


def test_rows_may_be_parts_of_a_wider_tensor() -> None:
    """Keys and values as slices of one projection: neither dense nor aligned."""
    torch.manual_seed(0)
    fused = torch.randn(30, 3, 2 * 64 + 3).to(torch.bfloat16)
    check_nvfp4(by_name("nvfp4"), fused[..., 1:65], fused[..., 66:130])


def latent_pages(states: int = STATES) -> torch.Tensor:
    width = by_name("fp8_ds_mla").layout(576, 0).nbytes
    return torch.full((BLOCKS, 1, states, width), 0xA5, dtype=torch.uint8)


def check_ds_mla(key: torch.Tensor) -> None:
    fmt = by_name("fp8_ds_mla")
    ours, theirs = latent_pages(), latent_pages()
    slots = torch.randperm(BLOCKS * STATES)[: len(key)]
    slots[::5] = -1
    cuda_kernels.ds_mla_store(ours, slots, key[..., :512], key[..., 512:])
    fmt.store(theirs, slots, key, None)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("magnitude", [1.0, 1e-3, 300.0, 1e-30])
def test_ds_mla_records_equal_the_formats(dtype: torch.dtype, magnitude: float) -> None:
    torch.manual_seed(0)
    check_ds_mla((torch.randn(40, 1, 576) * magnitude).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", SPECIAL)
def test_ds_mla_records_of_special_numbers(dtype: torch.dtype, case: str) -> None:
    torch.manual_seed(0)
    values = torch.tensor(SPECIAL[case])
    key = values[torch.randint(len(values), (20, 1, 576))].to(dtype)
    key[..., 512:].nan_to_num_(nan=1.0, posinf=INF, neginf=-INF)  # payloads differ
    check_ds_mla(key)


REFUSED = {
    "another format": ("fp8_e4m3", {}, "expected one of nvfp4"),
    "too few tokens": ("nvfp4", {"tokens": 2}, "only 2 tokens"),
    "other heads": ("nvfp4", {"heads": 3}, "need 6 head slots"),
    "integers": ("nvfp4", {"dtype": torch.int32}, "expected float32"),
    "short slots": ("nvfp4", {"slots": torch.int32}, "vector of int64"),
    "small blocks": ("nvfp4", {"states": 2}, "multiples of 8 and 4"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_before_a_launch(case: str) -> None:
    name, changes, words = REFUSED[case]
    fmt = by_name(name)
    pages = blank(by_name("nvfp4"), 2, 64, changes.get("states", STATES))
    shape = changes.get("tokens", 4), changes.get("heads", 2), 64
    rows = torch.ones(shape).to(changes.get("dtype", torch.float32))
    slots = torch.arange(4).to(changes.get("slots", torch.int64))
    before = pages.clone()
    with pytest.raises(ValueError, match=words):
        cuda_kernels.nvfp4_store(pages, slots, rows, rows, fmt)
    assert torch.equal(pages, before)
