"""Routing and experts against the same rules written token by token."""

import math

import pytest
import torch

from vllm.model_executor.layers.fused_moe import (
    FusedMoE,
    Routing,
    fused_topk,
    grouped_topk,
)

EXPERTS, HIDDEN, SIZE = 12, 16, 24


def logits(tokens: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, EXPERTS, generator=generator)


def chosen(weights: torch.Tensor, experts: torch.Tensor) -> list[dict[int, float]]:
    return [
        dict(zip(ids, row, strict=True))
        for ids, row in zip(experts.tolist(), weights.tolist(), strict=True)
    ]


def route_one(row: list[float], routing: Routing, bias: list[float] | None) -> dict:
    """One token's experts and weights, by the definition."""
    if routing.scoring == "softmax":
        total = sum(math.exp(x) for x in row)
        scores = [math.exp(x) / total for x in row]
    else:
        scores = [1 / (1 + math.exp(-x)) for x in row]
    choice = [s + b for s, b in zip(scores, bias or [0.0] * len(row), strict=True)]
    allowed = range(len(row))
    if routing.num_groups:
        size = len(row) // routing.num_groups
        groups = [range(g * size, (g + 1) * size) for g in range(routing.num_groups)]

        def worth(group: range) -> float:
            best = sorted((choice[e] for e in group), reverse=True)
            return sum(best[: routing.scores_per_group])

        kept = sorted(groups, key=worth, reverse=True)[: routing.topk_groups]
        allowed = [e for group in kept for e in group]
    best = sorted(allowed, key=lambda e: choice[e], reverse=True)[: routing.top_k]
    total = sum(scores[e] for e in best) if routing.renormalize else 1.0
    return {e: scores[e] / total * routing.scale for e in best}


ROUTINGS = {
    "softmax": Routing(top_k=3),
    "softmax-normalised": Routing(top_k=3, renormalize=True, scale=1.5),
    "groups": Routing(top_k=3, num_groups=4, topk_groups=2, scale=2.0),
    "sigmoid-groups": Routing(
        top_k=4,
        scoring="sigmoid",
        num_groups=4,
        topk_groups=2,
        scores_per_group=2,
        renormalize=True,
        scale=2.5,
    ),
}


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("biased", [False, True])
def test_routing_follows_its_definition(name: str, biased: bool) -> None:
    routing, rows = ROUTINGS[name], logits(20)
    bias = torch.randn(EXPERTS, generator=torch.Generator().manual_seed(1)) * 0.3
    given = bias if biased else None
    found = chosen(*routing.select(rows, given))
    for row, experts in zip(rows.tolist(), found, strict=True):
        expected = route_one(row, routing, bias.tolist() if biased else None)
        assert experts.keys() == expected.keys()
        for expert, weight in expected.items():
            assert experts[expert] == pytest.approx(weight, rel=1e-5)


def test_public_functions_are_the_same_rules() -> None:
    rows, bias = logits(9), torch.linspace(-1, 1, EXPERTS)
    assert chosen(*fused_topk(rows, 3)) == chosen(*ROUTINGS["softmax"].select(rows))
    found = grouped_topk(rows, 4, True, 4, 2, "sigmoid", 2.5, bias)
    assert chosen(*found) == chosen(*ROUTINGS["sigmoid-groups"].select(rows, bias))


def test_an_unknown_score_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'tanh'.*softmax, sigmoid"):
        Routing(top_k=1, scoring="tanh")


def experts_with(dtype: torch.dtype) -> FusedMoE:
    torch.manual_seed(3)
    moe = FusedMoE(EXPERTS, HIDDEN, SIZE, params_dtype=dtype, prefix="moe")
    for param in moe.parameters():
        torch.nn.init.normal_(param, std=0.3)
    return moe


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 17])
def test_experts_equal_a_sum_over_tokens(dtype: torch.dtype, tokens: int) -> None:
    moe = experts_with(dtype)
    w13, w2 = (param.detach().double() for param in moe.parameters())
    x = torch.randn(tokens, HIDDEN).to(dtype)
    weights, experts = Routing(top_k=3).select(logits(tokens))
    moe.process_weights_after_loading()
    with torch.inference_mode():
        found = moe(x, weights, experts)
    assert found.dtype == dtype and found.shape == (tokens, HIDDEN)
    for t in range(tokens):
        expected = torch.zeros(HIDDEN, dtype=torch.double)
        for weight, expert in zip(weights[t], experts[t], strict=True):
            gate, up = (w13[expert] @ x[t].double()).chunk(2)
            hidden = torch.nn.functional.silu(gate) * up
            expected += weight * (w2[expert] @ hidden)
        tolerance = 1e-5 if dtype is torch.float32 else 3e-2
        torch.testing.assert_close(
            found[t].double(), expected, rtol=tolerance, atol=tolerance
        )


def test_bf16_experts_are_kept_once() -> None:
    moe = experts_with(torch.bfloat16)
    moe.process_weights_after_loading()
    moe.process_weights_after_loading()
    held = (moe.w13_weight, moe.packed_experts, moe._packed or None)
    assert sum(weights is not None for weights in held) == 1


def test_checkpoint_tensors_fill_every_row_once() -> None:
    moe = experts_with(torch.float32)
    for name, param in moe.named_parameters():
        param.data.fill_(torch.nan)
        for number, (shard, shape) in enumerate(moe.checkpoint_pieces(name).items()):
            before = param.isnan().sum()
            moe.weight_loader(param, torch.full(shape, float(number)), shard)
            assert before - param.isnan().sum() == math.prod(shape)
        assert not param.isnan().any()
    with pytest.raises(ValueError, match=r"'moe', expert 2, w2.*\(3, 4\)"):
        moe.weight_loader(moe.w2_weight, torch.zeros(3, 4), (2, "w2"))
