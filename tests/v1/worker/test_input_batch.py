"""The persistent batch equals a naive one after any series of changes."""

import random

import numpy as np
import pytest
import torch

from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import build_logitsprocs
from vllm.v1.sample.logits_processor.builtin import (
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

CPU = torch.device("cpu")
VOCAB = 100
MAX_REQS = 8
MAX_LEN = 64


def new_batch(logitsprocs=None):
    return InputBatch(
        max_num_reqs=MAX_REQS,
        max_model_len=MAX_LEN,
        max_num_batched_tokens=256,
        device=CPU,
        vocab_size=VOCAB,
        block_sizes=[4, 8],
        kernel_block_sizes=[4, 4],
        max_num_blocks_per_req=[16, 8],
        logitsprocs=logitsprocs,
    )


def random_params(rng: random.Random) -> SamplingParams:
    params = SamplingParams(
        temperature=rng.choice([0.0, 0.5, 1.0]),
        top_p=rng.choice([1.0, 0.9]),
        top_k=rng.choice([0, 5, 100]),
        min_p=rng.choice([0.0, 0.1]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.5]),
        presence_penalty=rng.choice([0.0, 0.0, -0.5]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.1]),
        seed=rng.choice([None, 4]),
        logprobs=rng.choice([None, None, 2, 5, -1]),
        allowed_token_ids=rng.choice([None, None, [1, 2, 3]]),
        min_tokens=rng.choice([0, 3]),
        stop_token_ids=[7],
    )
    params._bad_words_token_ids = rng.choice([None, [[5, 6]]])
    return params


def random_request(rng: random.Random, number: int) -> CachedRequestState:
    params = random_params(rng)
    seeded = params.seed is not None and params.temperature > 0
    return CachedRequestState(
        req_id=f"r{number}",
        prompt_token_ids=[rng.randrange(VOCAB) for _ in range(rng.randrange(1, 20))],
        mm_features=[],
        sampling_params=params,
        generator=torch.Generator().manual_seed(params.seed) if seeded else None,
        block_ids=tuple(
            [rng.randrange(1, 50) for _ in range(rng.randrange(1, 6))] for _ in range(2)
        ),
        num_computed_tokens=rng.randrange(5),
        output_token_ids=[rng.randrange(VOCAB) for _ in range(rng.randrange(6))],
    )


def check_rows(batch: InputBatch, live: dict[str, CachedRequestState]) -> None:
    assert batch.num_reqs == len(live) == len(batch.req_ids)
    assert set(batch.req_ids) == set(live)
    for row, req_id in enumerate(batch.req_ids):
        state = live[req_id]
        assert batch.req_id_to_index[req_id] == row
        tokens = [*state.prompt_token_ids, *state.output_token_ids]
        assert batch.token_ids_cpu[row, : len(tokens)].tolist() == tokens
        assert batch.num_tokens_no_spec[row] == len(tokens)
        assert batch.num_prompt_tokens[row] == len(state.prompt_token_ids)
        assert batch.num_computed_tokens_cpu[row] == state.num_computed_tokens
        for table, ids in zip(
            batch.block_table.block_tables, state.block_ids, strict=True
        ):
            kernel = table.map_to_kernel_blocks(
                np.array(ids, dtype=np.int32), table.blocks_per_kv_block
            )
            count = table.num_blocks_per_row[row]
            assert table.get_numpy_array()[row, :count].tolist() == kernel.tolist()


def check_metadata(batch: InputBatch, live: dict[str, CachedRequestState]) -> None:
    got = batch.sampling_metadata
    states = [live[req_id] for req_id in batch.req_ids]
    params = [state.sampling_params for state in states]
    assert got.all_greedy == all(p.temperature == 0 for p in params)
    assert got.all_random == all(p.temperature > 0 for p in params)
    wanted = {
        "temperature": [p.temperature for p in params],
        "top_p": [p.top_p for p in params],
        "top_k": [p.top_k or VOCAB for p in params],
        "frequency_penalties": [p.frequency_penalty for p in params],
        "presence_penalties": [p.presence_penalty for p in params],
        "repetition_penalties": [p.repetition_penalty for p in params],
    }
    needed = {
        "temperature": not got.all_greedy,
        "top_p": any(p.top_p < 1 for p in params),
        "top_k": any(0 < p.top_k < VOCAB for p in params),
    }
    for name, values in wanted.items():
        if needed.get(name, True):
            tensor = getattr(got, name)
            assert tensor.tolist() == pytest.approx(values)
        else:
            assert getattr(got, name) is None
    assert got.generators == {
        row: s.generator for row, s in enumerate(states) if s.generator is not None
    }
    numbers = [VOCAB if p.logprobs == -1 else p.logprobs for p in params]
    assert got.max_num_logprobs == max(
        (n for n in numbers if n is not None), default=None
    )
    assert got.bad_words_token_ids == {
        row: p.bad_words_token_ids
        for row, p in enumerate(params)
        if p.bad_words_token_ids
    }
    for row, state in enumerate(states):
        assert got.output_token_ids[row] is state.output_token_ids
    if any(p.allowed_token_ids for p in params):
        for row, p in enumerate(params):
            allowed = set(p.allowed_token_ids or range(VOCAB))
            mask = got.allowed_token_ids_mask[row].tolist()
            assert mask == [token not in allowed for token in range(VOCAB)]
    else:
        assert got.allowed_token_ids_mask is None
    if not got.no_penalties:
        for row, state in enumerate(states):
            prompt = state.prompt_token_ids
            padded = got.prompt_token_ids[row].tolist()
            assert padded[: len(prompt)] == prompt
            assert set(padded[len(prompt) :]) <= {VOCAB}


@pytest.mark.parametrize("seed", range(6))
def test_random_changes_keep_the_batch_consistent(seed):
    rng = random.Random(seed)
    batch = new_batch(build_logitsprocs(None, CPU))
    live: dict[str, CachedRequestState] = {}
    number = 0
    for _ in range(80):
        for req_id in [r for r in live if rng.random() < 0.3]:
            assert batch.remove_request(req_id) is not None
            del live[req_id]
        while len(live) < MAX_REQS and rng.random() < 0.5:
            state = random_request(rng, number)
            number += 1
            batch.add_request(state)
            live[state.req_id] = state
        batch.condense()
        if len(live) > 1 and rng.random() < 0.4:
            batch.swap_states(*rng.sample(range(len(live)), 2))
        batch.refresh_metadata()
        check_rows(batch, live)
        check_metadata(batch, live)
        states = {type(p): p.states for p in batch.logitsprocs.all}
        min_p = states[MinPLogitsProcessor]
        min_tokens = states[MinTokensLogitsProcessor]
        for row, req_id in enumerate(batch.req_ids):
            params = live[req_id].sampling_params
            assert min_p.get(row, 0.0) == params.min_p
            short = len(live[req_id].output_token_ids) < params.min_tokens
            assert (row in min_tokens) == short
        assert max([-1, *min_p, *min_tokens]) < len(live)


def test_metadata_is_built_only_when_the_batch_changes():
    batch = new_batch()
    batch.add_request(random_request(random.Random(0), 0))
    batch.refresh_metadata()
    metadata = batch.sampling_metadata
    batch.append_sampled(np.array([0]), np.array([42]))
    batch.refresh_metadata()
    assert batch.sampling_metadata is metadata
    batch.remove_request("r0")
    batch.condense()
    batch.refresh_metadata()
    assert batch.sampling_metadata is not metadata


def test_sampled_tokens_stop_at_the_maximum_length():
    batch = new_batch()
    rng = random.Random(1)
    for number in range(2):
        batch.add_request(random_request(rng, number))
    batch.num_tokens_no_spec[1] = MAX_LEN
    lengths = batch.num_tokens_no_spec[:2].copy()
    batch.append_sampled(np.array([0, 1]), np.array([5, 6]))
    assert batch.num_tokens_no_spec[0] == lengths[0] + 1
    assert batch.token_ids_cpu[0, lengths[0]] == 5
    assert batch.num_tokens_no_spec[1] == MAX_LEN


def test_a_full_batch_refuses_a_request():
    batch = new_batch()
    rng = random.Random(2)
    for number in range(MAX_REQS):
        batch.add_request(random_request(rng, number))
    with pytest.raises(ValueError, match="max_num_seqs = 8"):
        batch.add_request(random_request(rng, MAX_REQS))


def test_removing_an_unknown_request_does_nothing():
    assert new_batch().remove_request("nobody") is None
