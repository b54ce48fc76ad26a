"""The variants of paged attention that are compiled ahead of time, to be checked.

Every format of the kernel, in prefill and decode, with windows, soft caps and sinks on
some. They are made from calls, as launches are.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from vllm.v1.attention.ops.triton_batch import PLAIN_MASKS, Masks, Requests
from vllm.v1.attention.ops.triton_call import Call
from vllm.v1.attention.ops.triton_paged import attention_calls, serves
from vllm.v1.attention.ops.triton_variants import KernelVariant
from vllm.v1.kv_formats import KVFormat, all_formats

_KV_HEADS, _GROUP, _PAGE, _SPLITS = 2, 4, 16, 8


def formats() -> Iterator[KVFormat]:
    """Formats that the kernel reads, each set of bytes once."""
    for fmt in all_formats():
        named = fmt.resolve(torch.bfloat16) is fmt and not fmt.alias_of
        if serves(fmt) and named:
            yield fmt


def variants() -> Iterator[KernelVariant]:
    """See `triton_variants.SOURCES`. Of prefill the largest head, whose sums take the
    most registers; smaller ones take fewer."""
    masks = Masks(sliding_window=1024, soft_cap=30.0, sinks=torch.zeros(8))
    for fmt in formats():
        for decode, size, dtype, asked in (
            (True, 128, torch.bfloat16, PLAIN_MASKS),
            (False, 256, torch.bfloat16, masks),
        ):
            kind = "decode" if decode else "prefill"
            call = _calls(fmt, dtype, size, decode, asked)[0]
            yield call.variant(f"attention {kind} {fmt.name}: {size}")
    for fmt in formats():
        if fmt.storage_dtype(torch.float32) is torch.float32:
            merge = _calls(fmt, torch.float32, 512, True, PLAIN_MASKS)[1]
            yield merge.variant("attention merge: 512")


def _calls(
    fmt: KVFormat, dtype: torch.dtype, size: int, decode: bool, masks: Masks
) -> list[Call]:
    """Of decode: the kernel that writes partial sums and the one that joins them."""
    query = torch.zeros(2, _KV_HEADS * _GROUP, size, dtype=dtype)
    nbytes = fmt.layout(size, size, dtype).nbytes
    pages = torch.zeros(2, _KV_HEADS, _PAGE, nbytes, dtype=torch.uint8)
    requests = Requests(
        query_start_loc=torch.zeros(3, dtype=torch.int32),
        seq_lens=torch.zeros(2, dtype=torch.int32),
        block_table=torch.zeros(2, 1, dtype=torch.int32),
        max_query_len=1 if decode else 2,
        max_seq_len=2,
    )
    splits = _SPLITS if decode else 1
    return attention_calls(
        query, query, pages, fmt, requests, 1.0, masks, num_splits=splits
    )
