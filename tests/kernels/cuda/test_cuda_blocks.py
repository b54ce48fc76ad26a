"""Copies and zeroing of whole blocks touch every byte of the views and no other."""

import pytest
import torch

from vllm.v1.attention.ops import blocks
from vllm.v1.attention.ops.cuda_kernels import BlockMover, block_runs

pytestmark = pytest.mark.usefixtures("emulated")

BLOCKS = 6


def strided(
    shape: tuple[int, ...], order: tuple[int, ...], pad: int, start: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """A uint8 view [B, H, N, C] whose axes lie in `order`, `pad` bytes after each
    block, and the memory under it."""
    strides, step = [0] * len(shape), 1
    for axis in reversed(order):
        if axis == 0:
            step += pad
        strides[axis] = step
        step *= shape[axis]
    memory = torch.randint(1, 255, (step + start + 64,), dtype=torch.uint8)
    return memory.as_strided(shape, strides, start), memory


CACHES = {
    "dense": ((BLOCKS, 2, 16, 64), (0, 1, 2, 3), 0, 0),
    "states before heads": ((BLOCKS, 2, 16, 64), (0, 2, 1, 3), 0, 0),
    "padded": ((BLOCKS, 2, 16, 72), (0, 1, 2, 3), 40, 0),
    "heads outside blocks": ((BLOCKS, 3, 8, 16), (1, 0, 2, 3), 0, 0),
    "odd bytes": ((BLOCKS, 1, 5, 13), (0, 1, 2, 3), 3, 1),
    "states outside blocks": ((BLOCKS, 2, 3, 16), (2, 0, 1, 3), 0, 0),
    "all axes apart": ((BLOCKS, 2, 3, 4), (2, 1, 0, 3), 4, 0),
}


@pytest.mark.parametrize("case", CACHES)
def test_zeroing_touches_the_view_and_nothing_else(case: str) -> None:
    view, memory = strided(*CACHES[case])
    wanted = memory.clone()
    expected = wanted.as_strided(view.shape, view.stride(), view.storage_offset())
    ids = torch.tensor([4, 1])
    expected[ids] = 0
    BlockMover([view]).zero(ids)
    assert torch.equal(memory, wanted)


@pytest.mark.parametrize("case", CACHES)
def test_copies_equal_torchs(case: str) -> None:
    view, memory = strided(*CACHES[case])
    wanted = memory.clone()
    expected = wanted.as_strided(view.shape, view.stride(), view.storage_offset())
    expected[[0, 5]] = expected[[3, 2]]
    BlockMover([view]).copy(torch.tensor([[3, 0], [2, 5]]))
    assert torch.equal(memory, wanted)


def test_caches_of_unlike_sizes_move_in_one_call() -> None:
    views = [strided(*CACHES[case]) for case in ("dense", "padded", "odd bytes")]
    wanted = [memory.clone() for _, memory in views]
    for (view, _), copy in zip(views, wanted, strict=True):
        copy.as_strided(view.shape, view.stride(), view.storage_offset())[2] = 0
    BlockMover([view for view, _ in views]).zero(torch.tensor([2]))
    for (_, memory), copy in zip(views, wanted, strict=True):
        assert torch.equal(memory, copy)


def test_a_block_that_lies_together_is_one_run() -> None:
    view, _ = strided(*CACHES["dense"])
    ((_, block_stride, count, _, size),) = block_runs(view)
    assert (block_stride, count, size) == (2048, 1, 2048)
    typed = view.view(torch.bfloat16)
    assert block_runs(typed) == block_runs(view)


def test_pairs_have_two_columns() -> None:
    view, _ = strided(*CACHES["dense"])
    with pytest.raises(ValueError, match=r"expected \[n, 2\]"):
        BlockMover([view]).copy(torch.tensor([1, 2]))


@pytest.mark.parametrize("copies", [[(3, 0), (2, 5)], [(3, 0), (0, 5)], []])
def test_a_gpu_copies_any_pairs_as_if_sources_were_read_first(
    monkeypatch: pytest.MonkeyPatch, copies: list[tuple[int, int]]
) -> None:
    """By the kernel, unless a block is both a source and a target."""
    monkeypatch.setattr(blocks, "_on_gpu", lambda cache: True)
    calls: list[torch.Tensor] = []
    kernel = BlockMover.copy
    monkeypatch.setattr(
        BlockMover, "copy", lambda self, pairs: calls.append(kernel(self, pairs))
    )
    view, _ = strided(*CACHES["padded"])
    wanted = view.clone()
    before = [view[source].clone() for source, _ in copies]
    for (_, target), read in zip(copies, before, strict=True):
        wanted[target] = read
    blocks.BlockCopier([view]).copy(copies)
    assert torch.equal(view, wanted)
    assert len(calls) == (copies == [(3, 0), (2, 5)])
