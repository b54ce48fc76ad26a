"""What every layer with a KV cache of its own shares: name, scales, cache dtype.

Knows registration and per-tensor scales. Refuses to know what the layer computes and
what it stores.
"""

import math
import re

import torch
from torch import nn

from vllm.config import CacheConfig, VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.kv_formats import by_name

logger = init_logger(__name__)

SLIDING_WINDOW = "sliding_window"  # in kv_cache_dtype_skip_layers: every windowed layer

_LAYER_INDEX = re.compile(r"(?:^|\.)(\d+)(?=\.|$)")


class KVCacheLayer(nn.Module, AttentionLayerBase):
    """A layer that registers itself under `layer_name` and holds scales of K and V.

    A subclass sets `layer_name`, `impl`, `model_dtype` and `kv_cache_dtype`, then calls
    `_own_cache`.
    """

    layer_name: str
    model_dtype: torch.dtype
    kv_cache_dtype: str

    def _own_cache(self, vllm_config: VllmConfig) -> None:
        self._has_scales = False
        self.kv_cache: torch.Tensor = torch.empty(0, device="cpu")
        self._set_scale("k", 1.0)
        self._set_scale("v", 1.0)
        layers = vllm_config.compilation_config.static_forward_context
        if self.layer_name in layers:
            raise ValueError(
                f"duplicate layer name {self.layer_name!r}: every attention layer of a "
                "model needs a prefix of its own"
            )
        layers[self.layer_name] = self

    def load_kv_scale(self, which: str, value: torch.Tensor | float) -> None:
        """Takes the per-tensor scale of K ("k") or V ("v") from a checkpoint.

        Stored value * scale = original value. Raises ValueError unless it is one
        positive finite number.
        """
        values = torch.as_tensor(value, dtype=torch.float32, device="cpu").reshape(-1)
        scale = float(values[0]) if values.numel() == 1 else math.nan
        if not (math.isfinite(scale) and scale > 0):
            raise ValueError(
                f"layer {self.layer_name!r}: the checkpoint's {which}_scale is "
                f"{values.tolist()[:4]}, expected one positive finite number; remove "
                "it from the checkpoint or calibrate again"
            )
        self._set_scale(which, scale)
        self._has_scales = True

    def _set_scale(self, which: str, scale: float) -> None:
        setattr(self, f"_{which}_scale_float", scale)
        tensor = torch.tensor(scale, dtype=torch.float32, device="cpu")
        self.register_buffer(f"_{which}_scale", tensor, persistent=False)

    def process_weights_after_loading(self) -> None:
        """Lets the backend prepare what it derives from the layer."""
        if by_name(self.kv_cache_dtype).per_tensor_scales and not self._has_scales:
            logger.warning_once(
                "KV cache dtype %s: the checkpoint has no k_scale and v_scale, so 1.0 "
                "is used, and K and V beyond the range of the format are clamped",
                self.kv_cache_dtype,
            )
        self.impl.process_weights_after_loading(self.model_dtype)


def extract_layer_index(layer_name: str) -> int:
    """The one integer among the dotted parts: "model.layers.3.self_attn.attn" -> 3."""
    found = _LAYER_INDEX.findall(layer_name)
    if len(found) != 1:
        raise ValueError(
            f"layer name {layer_name!r} holds {len(found)} integers; expected exactly "
            "one, as in 'model.layers.3.self_attn.attn'"
        )
    return int(found[0])


def layer_cache_dtype(
    cache_config: CacheConfig, prefix: str, sliding_window: int | None = None
) -> str:
    """The cache dtype of one layer: "auto" when the skip list names it."""
    skip = cache_config.kv_cache_dtype_skip_layers
    if not skip:
        return cache_config.cache_dtype
    windowed = SLIDING_WINDOW in skip and sliding_window is not None
    if windowed or str(extract_layer_index(prefix)) in skip:
        return "auto"
    return cache_config.cache_dtype


def model_dtype_of(vllm_config: VllmConfig) -> torch.dtype:
    """The model's dtype; torch's default one where there is no model config."""
    model_config = vllm_config.model_config
    return torch.get_default_dtype() if model_config is None else model_config.dtype
