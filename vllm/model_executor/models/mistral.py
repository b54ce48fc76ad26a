"""Mistral: Llama's layers without biases, every one of them with the window."""

from typing import Any

from vllm.model_executor.models.decoder import (
    DecoderFacts,
    DenseForCausalLM,
    layer_windows,
)


class MistralForCausalLM(DenseForCausalLM):
    """`sliding_window` of the config holds for all layers unless it is null."""

    @classmethod
    def facts(cls, config: Any) -> DecoderFacts:
        return DecoderFacts(windows=layer_windows(config))
