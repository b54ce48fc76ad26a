"""The variants of latent attention that are compiled ahead of time, to be checked.

DeepSeek's sizes: a latent of 512 elements and a rotary part of 64. They are made from
calls, as launches are.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from vllm.v1.attention.ops.triton_batch import Requests
from vllm.v1.attention.ops.triton_call import Call
from vllm.v1.attention.ops.triton_latent_calls import (
    latent_attention,
    serves,
    sparse_attention,
)
from vllm.v1.attention.ops.triton_variants import KernelVariant
from vllm.v1.kv_formats import KVFormat, all_formats

_LORA, _ROPE = 512, 64
_HEADS, _PAGE, _SPLITS = 16, 64, 8


def formats() -> Iterator[KVFormat]:
    """Formats whose latents the kernels read, each set of bytes once."""
    for fmt in all_formats():
        named = fmt.resolve(torch.bfloat16) is fmt and not fmt.alias_of
        if named and serves(fmt, _LORA + _ROPE, _LORA):
            yield fmt


def variants() -> Iterator[KernelVariant]:
    """See `triton_variants.SOURCES`."""
    for fmt in formats():
        yield _call(fmt, sparse=False).variant(f"latents {fmt.name}: {_LORA}+{_ROPE}")
        if fmt.latent or fmt.storage_dtype(torch.bfloat16) is torch.bfloat16:
            call = _call(fmt, sparse=True)
            yield call.variant(f"selected latents {fmt.name}: {_LORA}+{_ROPE}")


def _call(fmt: KVFormat, sparse: bool) -> Call:
    query = torch.zeros(2, _HEADS, _LORA + _ROPE, dtype=torch.bfloat16)
    out = torch.zeros(2, _HEADS, _LORA, dtype=torch.bfloat16)
    nbytes = fmt.layout(_LORA + _ROPE, 0).nbytes
    pages = torch.zeros(2, 1, _PAGE, nbytes, dtype=torch.uint8)
    requests = Requests(
        query_start_loc=torch.zeros(3, dtype=torch.int32),
        seq_lens=torch.zeros(2, dtype=torch.int32),
        block_table=torch.zeros(2, 1, dtype=torch.int32),
        max_query_len=1,
        max_seq_len=2,
    )
    if sparse:
        chosen = torch.zeros(2, _PAGE, dtype=torch.int32)
        launch = sparse_attention(
            out, query, pages, fmt, requests, chosen, 1.0, num_splits=_SPLITS
        )
    else:
        launch = latent_attention(
            out, query, pages, fmt, requests, 1.0, num_splits=_SPLITS
        )
    return launch.calls[0]
