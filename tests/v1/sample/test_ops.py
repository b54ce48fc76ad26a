"""Row-wise operations agree with naive references, and rows do not see each other."""

import numpy as np
import pytest
import torch

from tests.v1.sample.naive import kept_tokens, penalised
from vllm.v1.sample.ops.bad_words import apply_bad_words
from vllm.v1.sample.ops.logprobs import (
    compute_logprobs,
    gather_logprobs,
    replace_logprob_tokens,
)
from vllm.v1.sample.ops.penalties import apply_all_penalties
from vllm.v1.sample.ops.topk_topp import draw, greedy_argmax, keep_top_k_top_p_

INF = float("inf")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_takes_the_first_of_the_largest_and_leaves_logits_alone(dtype):
    logits = torch.randn(7, 301).to(dtype)
    logits[3, [20, 200]] = 9.0
    logits[4] = 0.0
    before = logits.clone()
    got = greedy_argmax(logits)
    want = [max(range(301), key=row.__getitem__) for row in logits.tolist()]
    assert got.tolist() == want and got.dtype == torch.int64
    assert torch.equal(before, logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "row",
    [
        [-1.0, -2.0, -0.5, -0.5],
        [-0.0, -1.0, 0.0, -INF],
        [-INF, -3.0, INF, 1e30],
        [-INF, -INF, -INF, -7.0],
        [1e-7, 2e-7, -5.0, 0.0],
    ],
)
def test_greedy_orders_both_signs(dtype: torch.dtype, row: list[float]) -> None:
    logits = torch.tensor([[5.0, -1.0, 3.0, 4.0], row]).to(dtype)
    want = [max(range(4), key=values.__getitem__) for values in logits.tolist()]
    assert greedy_argmax(logits).tolist() == want


def test_greedy_of_nan_is_a_valid_token():
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.randn(3, 50, dtype=dtype)
        logits[1] = float("nan")
        assert ((greedy_argmax(logits) >= 0) & (greedy_argmax(logits) < 50)).all()


def test_top_k_and_top_p_keep_exactly_the_naive_set():
    torch.manual_seed(0)
    vocab = 3000
    ks = [0, 1, 5, 2999, 0, 40, 7, 0, 1200]
    ps = [1.0, 1.0, 0.3, 0.99, 0.9, 0.5, 1.0, 0.001, 0.97]
    scales = [1.0, 2.0, 3.0, 0.1, 0.05, 4.0, 1.0, 1.0, 0.3]
    logits = torch.randn(len(ks), vocab) * torch.tensor(scales).unsqueeze(1)
    probs = logits.softmax(-1)
    top_k = torch.tensor([k or vocab for k in ks], dtype=torch.int32)
    keep_top_k_top_p_(probs, top_k, torch.tensor(ps))
    for row, k, p, left in zip(logits.tolist(), ks, ps, probs, strict=True):
        want = kept_tokens(row, k, p, 0.0)
        got = set(left.nonzero().squeeze(1).tolist())
        # float32 and float64 sums may disagree about the last token only.
        assert len(want ^ got) <= (1 if p < 1.0 else 0), (k, p)


def test_cuts_of_a_row_do_not_depend_on_other_rows():
    torch.manual_seed(1)
    logits = torch.randn(12, 5000).bfloat16().float()  # with many ties
    ks = torch.randint(1, 3000, (12,), dtype=torch.int32)
    ps = torch.rand(12) * 0.99 + 0.01
    ks[::3], ps[::4] = 5000, 1.0
    together = keep_top_k_top_p_(logits.softmax(-1), ks, ps)
    for i in range(12):
        one = slice(i, i + 1)
        alone = keep_top_k_top_p_(logits[one].softmax(-1), ks[one], ps[one])
        assert torch.equal(together[i], alone[0])


@pytest.mark.parametrize("vocab", [5, 128, 1000])
def test_draws_follow_the_distribution_and_never_take_probability_zero(vocab):
    torch.manual_seed(2)
    probs = torch.rand(1, vocab)
    probs[0, :: 3 if vocab > 5 else 5] = 0.0
    wanted = (probs[0] / probs.sum()).numpy()
    num = 40_000
    drawn = draw(probs.expand(num, -1).contiguous(), {}).numpy()
    counts = np.bincount(drawn, minlength=vocab)
    assert counts[wanted == 0].sum() == 0
    error = np.abs(counts / num - wanted)
    assert (error < 6 * np.sqrt(wanted / num) + 1e-9).all()


def test_draw_takes_the_last_weighted_token_when_the_target_is_the_end(monkeypatch):
    probs = torch.rand(4, 700)
    probs[:, 333:] = 0.0
    almost_one = 1.0 - 2**-53
    monkeypatch.setattr(
        torch, "rand", lambda *s, **k: torch.full(s, almost_one, dtype=k["dtype"])
    )
    assert draw(probs, {}).tolist() == [332] * 4


def test_draw_of_nan_is_a_valid_token():
    probs = torch.full((2, 200), float("nan"))
    drawn = draw(probs, {})
    assert ((drawn >= 0) & (drawn < 200)).all()


def test_seeded_draws_do_not_depend_on_the_batch():
    def generator():
        return torch.Generator().manual_seed(7)

    torch.manual_seed(3)
    probs = torch.rand(9, 333)
    own = generator()
    alone = [draw(probs[4:5], {0: own}).item() for _ in range(5)]
    own = generator()
    together = [draw(probs, {4: own, 2: generator()})[4].item() for _ in range(5)]
    assert alone == together


def test_penalties_equal_the_naive_ones():
    generator = np.random.default_rng(0)
    vocab, rows = 97, 6
    logits = torch.randn(rows, vocab)
    prompts = [generator.integers(0, vocab, n).tolist() for n in (0, 1, 30, 5, 200, 3)]
    outputs = [generator.integers(0, vocab, n).tolist() for n in (0, 9, 0, 50, 300, 4)]
    presence = [0.0, 0.5, -1.0, 2.0, 0.3, 0.0]
    frequency = [0.0, 0.1, 0.0, -0.5, 0.2, 0.0]
    repetition = [1.0, 1.3, 2.0, 1.0, 0.7, 1.0]
    padded = torch.full((rows, 200), vocab, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        padded[row, : len(prompt)] = torch.tensor(prompt, dtype=torch.int64)
    want = [
        penalised(*row)
        for row in zip(
            logits.tolist(),
            prompts,
            outputs,
            presence,
            frequency,
            repetition,
            strict=True,
        )
    ]
    got = apply_all_penalties(
        logits.clone(),
        padded,
        torch.tensor(presence),
        torch.tensor(frequency),
        torch.tensor(repetition),
        [[*output, -1] for output in outputs],  # -1 is a placeholder
    )
    torch.testing.assert_close(got, torch.tensor(want), rtol=1e-5, atol=1e-5)
    assert torch.equal(got[0], logits[0]) and torch.equal(got[5], logits[5])


def test_bad_words_forbid_the_last_token_after_their_beginning():
    logits = torch.zeros(3, 10)
    words = {0: [[4], [1, 2, 3]], 2: [[5, 6]]}
    apply_bad_words(logits, words, [[9, 1, 2], [5], [6, 5]])
    assert (logits == -INF).nonzero().tolist() == [[0, 3], [0, 4], [2, 6]]
    logits = torch.zeros(1, 10)
    apply_bad_words(logits, {0: [[1, 2, 3]]}, [[2]])
    assert not logits.isinf().any()


def test_logprobs_give_the_token_the_best_and_a_rank():
    logits = torch.randn(4, 50)
    logits[2, 7] = logits[2].max() + 1
    token_ids = torch.tensor([3, 4, 7, 49])
    logprobs = compute_logprobs(logits)
    got = gather_logprobs(logprobs, 5, token_ids)
    for row in range(4):
        values = logprobs[row].tolist()
        order = sorted(range(50), key=lambda t: -values[t])
        token = token_ids[row].item()
        assert got.logprob_token_ids[row].tolist() == [token, *order[:5]]
        assert got.selected_token_ranks[row] == order.index(token) + 1
        ids = got.logprob_token_ids[row].tolist()
        assert got.logprobs[row].tolist() == [values[t] for t in ids]


def test_the_best_token_has_rank_one_even_in_a_tie():
    logprobs = compute_logprobs(torch.zeros(1, 8))
    assert gather_logprobs(logprobs, 1, torch.tensor([5])).selected_token_ranks == 1


def test_wanted_tokens_replace_the_best_ones():
    logprobs = compute_logprobs(torch.randn(3, 20))
    tensors = gather_logprobs(logprobs, 2, torch.tensor([1, 2, 3]))
    got = replace_logprob_tokens(tensors, logprobs, {1: [10, 11, 12], 2: [0]})
    assert got.logprob_token_ids[1].tolist() == [2, 10, 11, 12]
    assert got.logprob_token_ids[2].tolist() == [3, 0, 3, 3]
    assert torch.equal(got.logprobs[1], logprobs[1, [2, 10, 11, 12]])
    assert torch.equal(got.logprobs[0, :3], tensors.logprobs[0])
