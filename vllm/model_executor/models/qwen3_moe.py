"""Qwen3 with experts in the layers that the config names; attention is Qwen3's."""

from typing import Any

from torch import nn

from vllm.model_executor.layers.fused_moe import FusedMoE, Routing
from vllm.model_executor.models.decoder import DecoderFacts, DecoderModel, GatedMLP
from vllm.model_executor.models.mixtral import SparseMoE, router
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM


class Qwen3MoeModel(DecoderModel):
    """Every `decoder_sparse_step`-th layer has experts, unless `mlp_only_layers` names
    it."""

    def make_mlp(
        self, config: Any, facts: DecoderFacts, index: int, prefix: str
    ) -> nn.Module:
        count = config.num_experts
        dense = (index + 1) % config.decoder_sparse_step != 0
        if dense or count == 0 or index in config.mlp_only_layers:
            return GatedMLP(config, facts, prefix)
        experts = FusedMoE(
            count,
            config.hidden_size,
            config.moe_intermediate_size,
            config.hidden_act,
            prefix=f"{prefix}.experts",
        )
        routing = Routing(
            top_k=config.num_experts_per_tok, renormalize=config.norm_topk_prob
        )
        return SparseMoE(router(config, count, prefix), routing, experts)


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    """Qwen3's facts hold."""

    model_cls = Qwen3MoeModel
