"""The variants of paged attention that are compiled ahead of time, to be checked.

Every format of the kernel at the head sizes of models, in prefill and decode, with
windows, soft caps and sinks on some. They are made from calls, as launches are.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from vllm.v1.attention.ops.triton_batch import PLAIN_MASKS, Masks, Requests
from vllm.v1.attention.ops.triton_paged import attention_calls, serves
from vllm.v1.attention.ops.triton_variants import KernelVariant
from vllm.v1.kv_formats import KVFormat, all_formats

_KV_HEADS, _PAGE, _SPLITS = 2, 16, 8
# Head size -> query heads per KV head.
_SHAPES = {64: 3, 80: 1, 128: 4, 256: 8}


def formats() -> Iterator[KVFormat]:
    """Formats that the kernel reads, each set of bytes once."""
    for fmt in all_formats():
        named = fmt.resolve(torch.bfloat16) is fmt and not fmt.alias_of
        if serves(fmt) and named:
            yield fmt


def variants() -> Iterator[KernelVariant]:
    """See `triton_variants.SOURCES`."""
    for fmt in formats():
        for size in _SHAPES:
            yield from _variants(fmt, torch.bfloat16, size, decode=True)
            yield from _variants(fmt, torch.bfloat16, size, decode=False)
        masks = Masks(sliding_window=1024, soft_cap=30.0, sinks=torch.zeros(8))
        yield from _variants(fmt, torch.float16, 128, decode=False, masks=masks)
        yield from _variants(fmt, torch.float32, 128, decode=True, masks=masks)


def _variants(
    fmt: KVFormat,
    dtype: torch.dtype,
    size: int,
    decode: bool,
    masks: Masks = PLAIN_MASKS,
) -> Iterator[KernelVariant]:
    """Of decode: the kernel that writes partial sums and the one that joins them."""
    heads = _KV_HEADS * _SHAPES[size]
    query = torch.zeros(2, heads, size, dtype=dtype)
    nbytes = fmt.layout(size, size, dtype).nbytes
    pages = torch.zeros(2, _KV_HEADS, _PAGE, nbytes, dtype=torch.uint8)
    requests = Requests(
        query_start_loc=torch.zeros(3, dtype=torch.int32),
        seq_lens=torch.zeros(2, dtype=torch.int32),
        block_table=torch.zeros(2, 1, dtype=torch.int32),
        max_query_len=1 if decode else 2,
        max_seq_len=2,
    )
    calls = attention_calls(
        query, query, pages, fmt, requests, 1.0, masks, num_splits=8 if decode else 1
    )
    kind = "decode" if decode else "prefill"
    special = "" if masks is PLAIN_MASKS else " window cap sinks"
    types = str(dtype).removeprefix("torch.")
    yield calls[0].variant(f"attention {kind} {fmt.name} {types} {size}{special}")
    if len(calls) > 1 and fmt.resolve(dtype).storage_dtype(dtype) is dtype:
        yield calls[1].variant(f"attention merge {types} {size}{special}")
