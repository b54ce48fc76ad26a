"""Splitting batches, sharing contexts between ranks, cutting local chunks."""

from types import SimpleNamespace

import pytest
import torch

from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.utils import (
    PerLayerParameters,
    get_dcp_local_seq_lens,
    get_kv_cache_layout,
    get_per_layer_parameters,
    infer_global_hyperparameters,
    make_local_attention_virtual_batches,
    reorder_batch_to_split_decodes_and_prefills,
    set_kv_cache_layout,
    split_decodes_and_prefills,
)


def batch(query_lens, contexts=None, is_prefilling=None, width=8):
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    contexts = contexts or query_lens
    rows = len(query_lens)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(contexts, dtype=torch.int32),
        num_reqs=rows,
        num_actual_tokens=int(starts[-1]),
        max_query_len=max(query_lens),
        max_seq_len=max(contexts),
        block_table_tensor=torch.arange(rows * width).int().view(rows, width),
        slot_mapping=torch.arange(int(starts[-1])),
        is_prefilling=is_prefilling,
    )


@pytest.mark.parametrize(
    ("query_lens", "threshold", "split"),
    [
        ([1, 1, 1], 1, (3, 0, 3, 0)),
        ([4, 7], 1, (0, 2, 0, 11)),
        ([1, 1, 5, 3], 1, (2, 2, 2, 8)),
        ([2, 1, 5], 2, (2, 1, 3, 5)),
        ([1, 5, 1], 1, (1, 2, 1, 6)),  # all after a prefill are prefills
    ],
)
def test_decodes_end_where_the_first_long_request_begins(query_lens, threshold, split):
    assert split_decodes_and_prefills(batch(query_lens), threshold) == split


def test_uniform_decodes_all_have_the_first_length():
    mixed = batch([2, 2, 1, 5])
    assert split_decodes_and_prefills(mixed, 2) == (3, 1, 5, 5)
    assert split_decodes_and_prefills(mixed, 2, require_uniform=True) == (2, 2, 4, 6)


def test_short_pieces_of_a_prompt_may_count_as_prefills():
    flags = torch.tensor([False, True, True])
    common = batch([1, 1, 4], is_prefilling=flags)
    assert split_decodes_and_prefills(common) == (2, 1, 2, 4)
    asked = split_decodes_and_prefills(common, treat_short_extends_as_decodes=False)
    assert asked == (1, 2, 1, 5)


@pytest.mark.parametrize("seed", range(5))
def test_reordering_puts_decodes_first_and_keeps_every_request(seed):
    generator = torch.Generator().manual_seed(seed)
    count = 9
    scheduled = torch.randint(1, 4, (count,), generator=generator).tolist()
    computed = torch.randint(0, 2, (count,), generator=generator).tolist()
    names = [f"r{i}" for i in range(count)]
    tokens = dict(zip(names, scheduled, strict=True))
    input_batch = SimpleNamespace(req_ids=list(names), num_computed_tokens_cpu=computed)

    def swap(i, j):
        for column in (input_batch.req_ids, input_batch.num_computed_tokens_cpu):
            column[i], column[j] = column[j], column[i]

    input_batch.swap_states = swap
    output = SimpleNamespace(num_scheduled_tokens=tokens)
    reorder_batch_to_split_decodes_and_prefills(input_batch, output)
    ranks = [
        0 if tokens[name] == 1 else 2 - done
        for name, done in zip(input_batch.req_ids, computed, strict=True)
    ]
    assert ranks == sorted(ranks)
    assert sorted(input_batch.req_ids) == names
    assert not reorder_batch_to_split_decodes_and_prefills(input_batch, output)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("run", [1, 4])
def test_ranks_share_every_token_once(size, run):
    lengths = torch.arange(0, 40)
    shares = get_dcp_local_seq_lens(lengths, size, None, run)
    assert shares.shape == (40, size)
    assert torch.equal(shares.sum(1), lengths)
    for length in (0, 1, 7, 39):
        owners = [token // run % size for token in range(length)]
        for rank in range(size):
            assert shares[length, rank] == owners.count(rank)
            alone = get_dcp_local_seq_lens(lengths, size, rank, run)
            assert alone[length] == shares[length, rank]


def test_local_chunks_see_their_own_tokens_only():
    common = batch([6, 1, 3], contexts=[10, 9, 3])
    virtual, make_table = make_local_attention_virtual_batches(4, common, 2)
    # request 0: positions 4..9 -> chunks 1 (4 tokens) and 2 (2); request 1: position 8
    assert virtual.query_start_loc_cpu.tolist() == [0, 4, 6, 7, 10]
    assert virtual.seq_lens_cpu.tolist() == [4, 2, 1, 3]
    assert virtual.num_reqs == 4 and virtual.max_query_len == 4
    assert virtual.block_table_tensor.tolist() == [[2, 3], [4, 5], [12, 13], [16, 17]]
    assert torch.equal(
        make_table(common.block_table_tensor), virtual.block_table_tensor
    )
    assert virtual.num_actual_tokens == common.num_actual_tokens


@pytest.mark.parametrize("block_size", [0, 3])
def test_local_chunks_are_whole_blocks(block_size):
    with pytest.raises(ValueError, match="chunks of 4 tokens are not whole blocks"):
        make_local_attention_virtual_batches(4, batch([4]), block_size)


def test_a_layout_override_beats_the_environment(monkeypatch):
    monkeypatch.delenv("VLLM_KV_CACHE_LAYOUT", raising=False)
    assert get_kv_cache_layout() == "NHD"
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "HND")
    assert get_kv_cache_layout() == "HND"
    set_kv_cache_layout("NHD")
    assert get_kv_cache_layout() == "NHD"
    set_kv_cache_layout(None)
    assert get_kv_cache_layout() == "HND"
    with pytest.raises(ValueError, match="HNDD"):
        set_kv_cache_layout("HNDD")


class Impl:
    scale, soft_cap, sinks = 0.5, 0.0, None

    def __init__(self, window):
        self.sliding_window = window


def test_parameters_of_a_group_are_compared():
    layers = {"a": SimpleNamespace(impl=Impl(None)), "b": SimpleNamespace(impl=Impl(8))}
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=layers)
    )
    found = get_per_layer_parameters(config, ["a", "b"], Impl)
    assert found["a"] == PerLayerParameters(-1, None, 0.5)
    assert found["b"].window_left == 7
    shared = infer_global_hyperparameters(found)
    assert not shared.has_same_window_lefts and not shared.has_same_all_params
    assert infer_global_hyperparameters({"a": found["a"]}).has_same_all_params
    with pytest.raises(ValueError, match="Layer a runs Impl"):
        get_per_layer_parameters(config, ["a"], str)


def test_metadata_counts_are_consistent():
    common = batch([3, 1], contexts=[8, 5])
    assert common.batch_size() == 2
    assert common.naive_query_lens().tolist() == [3, 1]
    assert common.num_computed_tokens_cpu.tolist() == [5, 4]
    assert common.compute_num_computed_tokens().tolist() == [5, 4]
    assert common.token_to_req_indices().tolist() == [0, 0, 0, 1]
    with pytest.raises(TypeError, match="seq_len, slots"):
        common.replace(slots=None, seq_len=9)
    longer = common.replace(seq_lens=torch.tensor([9, 6]))
    assert longer.slot_mapping is common.slot_mapping
    assert longer.compute_num_computed_tokens().tolist() == [6, 5]
