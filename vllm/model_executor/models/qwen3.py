"""Qwen3: a norm on every query and key head before rotation, no biases by default."""

from typing import Any

from vllm.model_executor.models.decoder import (
    DecoderFacts,
    DenseForCausalLM,
    layer_windows,
)


class Qwen3ForCausalLM(DenseForCausalLM):
    """`attention_bias` adds biases to all four attention projections."""

    @classmethod
    def facts(cls, config: Any) -> DecoderFacts:
        bias = bool(getattr(config, "attention_bias", False))
        return DecoderFacts(
            windows=layer_windows(config), qkv_bias=bias, o_bias=bias, qk_norm=True
        )
