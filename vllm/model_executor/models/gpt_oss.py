"""gpt-oss: a sink per head, every other layer windowed, experts with biases."""

import re
from typing import Any

from torch import nn

from vllm.model_executor.layers.activation import ClampedSwigluAndMul
from vllm.model_executor.layers.fused_moe import Routing, StackedMoE
from vllm.model_executor.models.decoder import (
    DecoderFacts,
    DecoderModel,
    DenseForCausalLM,
    layer_windows,
)
from vllm.model_executor.models.mixtral import SparseMoE, router

_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.(gate_up|down)_proj(_bias)?")
_STACKS = {"gate_up": "w13", "down": "w2"}
# What the first checkpoints were trained with; their configs do not say so.
_ALPHA, _LIMIT = 1.702, 7.0


class GptOssModel(DecoderModel):
    """Every layer has experts, stored together."""

    def make_mlp(
        self, config: Any, facts: DecoderFacts, index: int, prefix: str
    ) -> nn.Module:
        count = config.num_local_experts
        experts = StackedMoE(
            count,
            config.hidden_size,
            config.intermediate_size,
            prefix=f"{prefix}.experts",
            interleaved=True,
            has_bias=True,
            act_fn=ClampedSwigluAndMul(
                getattr(config, "swiglu_alpha", _ALPHA),
                getattr(config, "swiglu_limit", _LIMIT),
            ),
        )
        routing = Routing(top_k=config.num_experts_per_tok, renormalize=True)
        return SparseMoE(router(config, count, prefix, bias=True), routing, experts)


class GptOssForCausalLM(DenseForCausalLM):
    """From unquantised checkpoints (not the MXFP4 ones)."""

    model_cls = GptOssModel

    @classmethod
    def facts(cls, config: Any) -> DecoderFacts:
        bias = bool(getattr(config, "attention_bias", True))
        return DecoderFacts(
            windows=layer_windows(config), qkv_bias=bias, o_bias=bias, sinks=True
        )

    def parameter_name(self, name: str) -> str:
        stack = _EXPERTS.fullmatch(name)
        if stack is not None:
            kind = "bias" if stack[3] else "weight"
            return f"{stack[1]}.{_STACKS[stack[2]]}_{kind}"
        return name.replace(".mlp.router.", ".mlp.gate.")
