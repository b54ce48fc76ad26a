"""The sampler applies each setting to its own row, and only to that row."""

import math

import pytest
import torch

from tests.v1.sample.naive import kept_tokens, metadata, softmax
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import (
    BatchUpdate,
    LogitsProcessors,
    MinPLogitsProcessor,
)
from vllm.v1.sample.sampler import Sampler

CPU = torch.device("cpu")
VOCAB = 600


def sampled(logits, meta, mode="raw_logprobs"):
    return Sampler(mode)(logits, meta)


def random_metadata(rows, **changes):
    defaults = {
        "all_greedy": False,
        "all_random": True,
        "temperature": torch.ones(rows),
    }
    return metadata(rows, VOCAB, **{**defaults, **changes})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_fast_path_does_not_write_logits(dtype):
    logits = torch.randn(5, VOCAB).to(dtype)
    before = logits.clone()
    out = sampled(logits, metadata(5, VOCAB, max_num_logprobs=2))
    assert torch.equal(logits, before)
    assert out.sampled_token_ids.shape == (5, 1)
    want = torch.log_softmax(before.float(), -1)
    got = out.logprobs_tensors
    assert torch.equal(got.logprobs, want.gather(1, got.logprob_token_ids.long()))
    assert (got.selected_token_ranks == 1).all()


def test_mixed_rows_are_greedy_where_temperature_is_zero():
    torch.manual_seed(0)
    logits = torch.randn(6, VOCAB)
    best = logits.argmax(-1)
    temperature = torch.tensor([0.0, 1.0, 0.0, 5.0, 0.0, 0.3])
    meta = random_metadata(6, all_random=False, temperature=temperature)
    seen = [sampled(logits.clone(), meta).sampled_token_ids[:, 0] for _ in range(30)]
    for row in (0, 2, 4):
        assert all(tokens[row] == best[row] for tokens in seen)
    for row in (1, 3):
        assert len({tokens[row].item() for tokens in seen}) > 1


def test_every_draw_lies_in_the_naive_candidate_set():
    torch.manual_seed(1)
    ks = [1, 5, 0, 0, 30, 0]
    ps = [1.0, 0.6, 0.4, 1.0, 0.9, 0.99]
    mins = [0.0, 0.0, 0.0, 0.3, 0.05, 0.0]
    temperatures = [1.0, 0.7, 1.0, 2.0, 0.5, 1.5]
    rows = len(ks)
    logits = torch.randn(rows, VOCAB) * 2
    processor = MinPLogitsProcessor(None, CPU, False)
    added = [(i, SamplingParams(min_p=p), None, []) for i, p in enumerate(mins)]
    processor.update_state(BatchUpdate(rows, [], added, []))
    meta = random_metadata(
        rows,
        temperature=torch.tensor(temperatures),
        top_k=torch.tensor([k or VOCAB for k in ks], dtype=torch.int32),
        top_p=torch.tensor(ps),
        logitsprocs=LogitsProcessors([processor]),
    )
    allowed = [
        kept_tokens((logits[i] / temperatures[i]).tolist(), ks[i], ps[i], mins[i])
        for i in range(rows)
    ]
    seen = [set() for _ in range(rows)]
    for _ in range(200):
        tokens = sampled(logits.clone(), meta).sampled_token_ids[:, 0].tolist()
        for row, token in enumerate(tokens):
            seen[row].add(token)
    for row in range(rows):
        assert seen[row] <= allowed[row], row


def test_temperature_scales_the_distribution():
    torch.manual_seed(2)
    row, temperature, num = torch.tensor([1.0, 0.0, -1.0, 2.0]), 0.7, 20_000
    meta = metadata(
        num,
        4,
        all_greedy=False,
        all_random=True,
        temperature=torch.full((num,), temperature),
    )
    tokens = sampled(row.expand(num, -1).clone(), meta).sampled_token_ids[:, 0]
    shares = tokens.bincount(minlength=4) / num
    want = torch.tensor(softmax((row / temperature).tolist()))
    assert (shares - want).abs().max() < 0.02


def test_seeded_rows_do_not_depend_on_the_batch():
    torch.manual_seed(3)
    logits = torch.randn(8, VOCAB)

    def run(rows, seeded_row):
        generator = torch.Generator().manual_seed(11)
        meta = random_metadata(
            len(rows),
            temperature=torch.tensor([0.0 if r == 0 else 0.9 for r in rows]),
            all_random=False,
            top_p=torch.tensor([0.95 if r == 5 else 1.0 for r in rows]),
            top_k=torch.tensor([50 if r == 5 else VOCAB for r in rows]),
            generators={seeded_row: generator},
        )
        steps = [
            sampled(logits[rows].clone(), meta).sampled_token_ids[seeded_row].item()
            for _ in range(6)
        ]
        return steps

    assert run([5], 0) == run([0, 1, 5, 7], 2) == run([5, 0, 0, 0, 3, 2], 0)


def test_disallowed_tokens_and_bad_words_are_never_sampled():
    logits = torch.zeros(2, 8)
    logits[0, 6], logits[1, 2] = 5.0, 5.0
    forbidden = torch.zeros(2, 8, dtype=torch.bool)
    forbidden[0] = True
    forbidden[0, 1] = False
    meta = metadata(
        2, 8, allowed_token_ids_mask=forbidden, bad_words_token_ids={1: [[2]]}
    )
    tokens = sampled(logits, meta).sampled_token_ids[:, 0].tolist()
    assert tokens[0] == 1 and tokens[1] != 2


def test_penalties_change_a_greedy_choice():
    logits = torch.zeros(2, 8)
    logits[:, 3] = 1.0
    meta = metadata(
        2,
        8,
        no_penalties=False,
        frequency_penalties=torch.tensor([2.0, 0.0]),
        output_token_ids=[[3], [3]],
    )
    tokens = sampled(logits, meta).sampled_token_ids[:, 0].tolist()
    assert tokens[0] != 3 and tokens[1] == 3


def test_logprob_modes_report_the_raw_or_the_processed_distribution():
    logits = torch.randn(1, 8)
    forbidden = torch.zeros(1, 8, dtype=torch.bool)
    forbidden[0, logits.argmax()] = True
    for mode in (
        "raw_logprobs",
        "raw_logits",
        "processed_logprobs",
        "processed_logits",
    ):
        meta = metadata(1, 8, max_num_logprobs=8, allowed_token_ids_mask=forbidden)
        got = sampled(logits.clone(), meta, mode).logprobs_tensors
        base = logits.clone()
        if mode.startswith("processed"):
            base[forbidden] = -math.inf
        want = base.log_softmax(-1) if mode.endswith("logprobs") else base
        ids = got.logprob_token_ids.long()
        torch.testing.assert_close(got.logprobs, want.gather(1, ids))


def test_random_steps_survive_nan_logits():
    logits = torch.full((2, VOCAB), float("nan"))
    tokens = sampled(logits, random_metadata(2)).sampled_token_ids
    assert ((tokens >= 0) & (tokens < VOCAB)).all()
