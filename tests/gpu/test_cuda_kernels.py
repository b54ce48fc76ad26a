"""On a GPU the CUDA kernels write, copy and zero the bytes that the formats define."""

import pytest
import torch

from tests.kernels.cuda.test_cuda_blocks import CACHES, strided
from tests.kernels.cuda.test_cuda_stores import SPECIAL, blank, latent_pages
from vllm.v1.attention.ops import cuda_kernels
from vllm.v1.kv_formats import KVFormat, KVScales, by_name

pytestmark = pytest.mark.usefixtures("cuda_library")

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SCALES = KVScales(k=0.75, v=1.25)
TOKENS = 300


def rows_of(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Ordinary numbers of many sizes, and in every seventh row special ones."""
    x = torch.randn(shape) * torch.logspace(-3, 3, shape[0]).view(-1, 1, 1)
    special = torch.tensor([value for case in SPECIAL.values() for value in case])
    special = special[special.isfinite()]
    chosen = torch.randint(len(special), x[::7].shape)
    x[::7] = special[chosen]
    return x.to(dtype)


def check(fmt: KVFormat, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    different = int((ours.cpu() != theirs).sum())
    assert not different, f"{fmt.format_id}: {different} of {theirs.numel()} bytes"


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_4over6"])
@pytest.mark.parametrize("arrangement", ["cells", "linear"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nvfp4(
    device: torch.device, name: str, arrangement: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    fmt = by_name(name).arranged(arrangement)
    for heads, size in ((8, 128), (2, 64), (1, 256), (3, 96)):
        theirs = blank(fmt, heads, size, states=64)
        slots = torch.randperm(5 * 64)[:TOKENS]
        slots[::11] = -1
        key, value = (rows_of((TOKENS, heads, size), dtype) for _ in range(2))
        ours = theirs.to(device)
        on_device = (x.to(device) for x in (slots, key, value))
        cuda_kernels.nvfp4_store(ours, *on_device, fmt, SCALES)
        fmt.store(theirs, slots, key, value, SCALES)
        check(fmt, ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fp8_ds_mla(device: torch.device, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    fmt, theirs = by_name("fp8_ds_mla"), latent_pages(64)
    slots = torch.randperm(5 * 64)[:TOKENS]
    key = rows_of((TOKENS, 1, 576), dtype)
    ours = theirs.to(device)
    latent, rope = key[..., :512].to(device), key[..., 512:].to(device)
    cuda_kernels.ds_mla_store(ours, slots.to(device), latent, rope)
    fmt.store(theirs, slots, key, None)
    check(fmt, ours, theirs)


@pytest.mark.parametrize("case", CACHES)
def test_blocks(device: torch.device, case: str) -> None:
    view, memory = strided(*CACHES[case])
    on_device = memory.to(device)
    twin = on_device.as_strided(view.shape, view.stride(), view.storage_offset())
    mover = cuda_kernels.BlockMover([twin])
    mover.copy(torch.tensor([[3, 0], [2, 5]], device=device))
    mover.zero(torch.tensor([4], device=device))
    view[[0, 5]] = view[[3, 2]]
    view[4] = 0
    assert torch.equal(on_device.cpu(), memory)
