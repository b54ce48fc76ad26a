"""Qwen2: biases on Q, K and V only; a window on the layers that the config names."""

from typing import Any

from vllm.model_executor.models.decoder import (
    DecoderFacts,
    DenseForCausalLM,
    layer_windows,
)


class Qwen2ForCausalLM(DenseForCausalLM):
    """The config resolves use_sliding_window and max_window_layers to `layer_types`."""

    @classmethod
    def facts(cls, config: Any) -> DecoderFacts:
        return DecoderFacts(windows=layer_windows(config), qkv_bias=True)
