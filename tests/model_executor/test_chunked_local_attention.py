"""A batch is cut so that every chunk looks like a request of its own."""

import pytest
import torch

from vllm.model_executor.layers.attention.chunked_local_attention import (
    cut_at_chunks,
    in_chunks,
)
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.reference import ReferenceAttentionBackend


def batch(query_lens: list[int], seq_lens: list[int]) -> CommonAttentionMetadata:
    """Block b of request r has the id 100 * r + b."""
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    table = torch.arange(20)[None] + 100 * torch.arange(len(query_lens))[:, None]
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        num_reqs=len(query_lens),
        num_actual_tokens=sum(query_lens),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        block_table_tensor=table.to(torch.int32),
        slot_mapping=torch.arange(sum(query_lens)),
    )


def test_queries_of_several_chunks_become_several_requests() -> None:
    # Positions 6 to 17, 8, none, and 7; chunks of 8, blocks of 4.
    cut = cut_at_chunks(batch([12, 1, 0, 1], [18, 9, 5, 8]), 8, 4)
    assert cut.query_start_loc.tolist() == [0, 2, 10, 12, 13, 13, 14]
    assert cut.seq_lens.tolist() == [8, 8, 2, 1, 0, 8]
    assert cut.seq_lens_cpu.tolist() == cut.seq_lens.tolist()
    assert cut.block_table_tensor.tolist() == [
        [0, 1],
        [2, 3],
        [4, 5],
        [102, 103],
        [200, 201],
        [300, 301],
    ]
    assert (cut.num_reqs, cut.max_query_len, cut.max_seq_len) == (6, 8, 8)
    assert cut.num_actual_tokens == 14
    assert cut.slot_mapping.tolist() == list(range(14))


def test_chunks_that_start_inside_a_block_are_refused() -> None:
    with pytest.raises(ValueError, match="--block-size to a divisor"):
        cut_at_chunks(batch([3], [3]), 24, 16)


def test_one_wrapped_backend_for_each_backend_and_chunk() -> None:
    wrapped = in_chunks(CPUAttentionBackend, 32)
    assert wrapped is in_chunks(CPUAttentionBackend, 32)
    assert wrapped.get_name() == CPUAttentionBackend.get_name()
    others = [in_chunks(CPUAttentionBackend, 64), CPUAttentionBackend]
    others += [in_chunks(ReferenceAttentionBackend, 32)]
    names = {cls.full_cls_name() for cls in [wrapped, *others]}
    assert len(names) == 4  # layers of different chunks do not share metadata
