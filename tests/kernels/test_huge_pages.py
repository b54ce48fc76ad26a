"""Memory for weights: aligned, apart, and gone with the weights."""

import gc
import weakref

import torch

from vllm.utils.huge_pages import HUGE_PAGE, HugePages


def test_what_is_given_out_lies_apart_and_on_whole_lines() -> None:
    advised = []
    pages = HugePages(lambda memory: bool(advised.append(memory.numel())))
    given = [pages.empty((n, 3), torch.float32) for n in (1, 5, 100_000, 2_500_000)]
    for i, tensor in enumerate(given):
        assert tensor.shape[1] == 3 and tensor.data_ptr() % 64 == 0
        tensor.fill_(i)
    assert given[0].data_ptr() % HUGE_PAGE == 0
    for i, tensor in enumerate(given):
        assert (tensor == i).all()
    assert len(advised) == 2, "the large one has pages of its own"


def test_memory_goes_with_what_lies_in_it() -> None:
    pages = HugePages(lambda memory: True)
    first, second = pages.empty((8,), torch.int32), pages.empty((8,), torch.int32)
    chunk = weakref.ref(first._chunk)
    assert first._chunk is second._chunk
    del first
    gc.collect()
    assert chunk() is not None
    del second
    gc.collect()
    assert chunk() is None
    assert pages.empty((8,), torch.int32).data_ptr() % HUGE_PAGE == 0
