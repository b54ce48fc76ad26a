"""Mixtral: Mistral's attention, and a mixture of experts in every layer."""

import re
from typing import Any

import torch
from torch import nn

from vllm.model_executor.layers.fused_moe import FusedMoE, Routing
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.models.decoder import (
    DecoderFacts,
    DecoderModel,
    DenseForCausalLM,
    layer_windows,
)

_EXPERT = re.compile(r"(.*)\.block_sparse_moe\.experts\.(\d+)\.(w[123])\.weight")
_MATRICES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


class SparseMoE(nn.Module):
    """x [T, hidden] -> the weighted sum of the experts that the gate chooses."""

    def __init__(self, gate: nn.Module, routing: Routing, experts: FusedMoE) -> None:
        super().__init__()
        self.gate = gate
        self.routing = routing
        self.experts = experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(x, *self.routing.select(self.gate(x)))


def router(
    config: Any, num_experts: int, prefix: str, bias: bool = False
) -> ReplicatedLinear:
    """x [T, hidden] -> router logits [T, experts] in the model's dtype."""
    return ReplicatedLinear(
        config.hidden_size,
        num_experts,
        bias=bias,
        prefix=f"{prefix}.gate",
        return_bias=False,
    )


class MixtralModel(DecoderModel):
    """Every layer has experts."""

    def make_mlp(
        self, config: Any, facts: DecoderFacts, index: int, prefix: str
    ) -> nn.Module:
        count = config.num_local_experts
        experts = FusedMoE(
            count,
            config.hidden_size,
            config.intermediate_size,
            config.hidden_act,
            prefix=f"{prefix}.experts",
        )
        routing = Routing(top_k=config.num_experts_per_tok, renormalize=True)
        return SparseMoE(router(config, count, prefix), routing, experts)


class MixtralForCausalLM(DenseForCausalLM):
    """Experts are stored one by one, as w1, w2 and w3."""

    model_cls = MixtralModel

    @classmethod
    def facts(cls, config: Any) -> DecoderFacts:
        return DecoderFacts(windows=layer_windows(config))

    def parameter_name(self, name: str) -> str:
        expert = _EXPERT.fullmatch(name)
        if expert is not None:
            layer, number, matrix = expert.groups()
            return f"{layer}.mlp.experts.{number}.{_MATRICES[matrix]}.weight"
        return name.replace(".block_sparse_moe.", ".mlp.")
