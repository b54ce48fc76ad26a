"""Copies and zeroing of whole blocks touch every byte of the views and no other."""

import pytest
import torch

from tests.kernels.cuda.test_cuda_blocks import CACHES, strided
from vllm.v1.attention.ops import blocks
from vllm.v1.attention.ops.triton_blocks import BlockMover

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MOVERS = [BlockMover, blocks.TorchBlocks]


def cache(case: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A view of blocks on the kernels' device, and the memory under it."""
    view, memory = strided(*CACHES[case])
    memory = memory.to(DEVICE)
    return memory.as_strided(view.shape, view.stride(), view.storage_offset()), memory


def copied(view: torch.Tensor, memory: torch.Tensor) -> tuple[torch.Tensor, ...]:
    twin = memory.clone()
    return twin.as_strided(view.shape, view.stride(), view.storage_offset()), twin


@pytest.mark.parametrize("mover", MOVERS)
@pytest.mark.parametrize("case", CACHES)
def test_zeroing_touches_the_view_and_nothing_else(case: str, mover) -> None:
    view, memory = cache(case)
    wanted_view, wanted = copied(view, memory)
    ids = torch.tensor([4, 1], device=DEVICE)
    wanted_view[ids] = 0
    mover([view]).zero(ids)
    assert torch.equal(memory, wanted)


@pytest.mark.parametrize("mover", MOVERS)
@pytest.mark.parametrize("case", CACHES)
def test_copies_equal_torchs(case: str, mover) -> None:
    view, memory = cache(case)
    wanted_view, wanted = copied(view, memory)
    wanted_view[[0, 5]] = wanted_view[[3, 2]]
    mover([view]).copy(torch.tensor([[3, 0], [2, 5]], device=DEVICE))
    assert torch.equal(memory, wanted)


@pytest.mark.parametrize("mover", MOVERS)
def test_caches_of_unlike_sizes_move_in_one_call(mover) -> None:
    caches = [cache(case) for case in ("dense", "padded", "odd bytes")]
    twins = [copied(view, memory) for view, memory in caches]
    for view, _ in twins:
        view[2] = 0
    mover([view for view, _ in caches]).zero(torch.tensor([2], device=DEVICE))
    for (_, memory), (_, wanted) in zip(caches, twins, strict=True):
        assert torch.equal(memory, wanted)


@pytest.mark.parametrize("mover", MOVERS)
def test_no_blocks_are_no_work(mover) -> None:
    view, memory = cache("dense")
    before = memory.clone()
    mover([view]).zero(torch.zeros(0, dtype=torch.int64, device=DEVICE))
    assert torch.equal(memory, before)


def test_pairs_have_two_columns() -> None:
    view, _ = cache("dense")
    with pytest.raises(ValueError, match=r"expected \[n, 2\]"):
        BlockMover([view]).copy(torch.tensor([1, 2], device=DEVICE))


@pytest.mark.parametrize("case", CACHES)
def test_a_gpu_zeroes_with_triton_what_torch_zeroes(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.tensor([0, 3], device=DEVICE)
    view, memory = cache(case)
    twin_view, twin = copied(view, memory)
    blocks.TorchBlocks([twin_view]).zero(ids)
    monkeypatch.setattr(blocks, "_on_gpu", lambda cache: True)
    monkeypatch.setattr(blocks.cuda_kernels, "why_unavailable", lambda: "not built")
    zeroer = blocks.block_zeroer([view])
    assert isinstance(zeroer, BlockMover)
    zeroer.zero(ids)
    assert torch.equal(memory, twin)


def test_the_host_zeroes_with_torch() -> None:
    zeroer = blocks.block_zeroer([torch.zeros(2, 4, dtype=torch.uint8)])
    assert isinstance(zeroer, blocks.TorchBlocks)
