"""Llama and the many models with its architecture (SmolLM2 among them)."""

from typing import Any

from vllm.model_executor.models.decoder import (
    DecoderFacts,
    DenseForCausalLM,
    layer_windows,
)


class LlamaForCausalLM(DenseForCausalLM):
    """Optional biases, the same on all four attention projections."""

    @classmethod
    def facts(cls, config: Any) -> DecoderFacts:
        bias = bool(getattr(config, "attention_bias", False))
        return DecoderFacts(
            windows=layer_windows(config),
            qkv_bias=bias,
            o_bias=bias,
            mlp_bias=bool(getattr(config, "mlp_bias", False)),
        )
