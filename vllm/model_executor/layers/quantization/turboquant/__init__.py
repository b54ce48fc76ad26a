"""TurboQuant's public names. The format itself is `vllm.v1.kv_formats.turboquant`."""

from vllm.model_executor.layers.quantization.turboquant.config import (
    TQ_PRESETS,
    TurboQuantConfig,
)

__all__ = ["TQ_PRESETS", "TurboQuantConfig"]
