"""Builds a model and fills it with weights."""

from collections.abc import Callable
from typing import Any

from torch import nn

from vllm.config import LoadConfig, ModelConfig, VllmConfig
from vllm.model_executor.model_loader.base import BaseModelLoader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.model_executor.model_loader.gguf_loader import GGUFModelLoader
from vllm.model_executor.model_loader.safetensors_loader import SafetensorsModelLoader

__all__ = ["LOADERS", "BaseModelLoader", "get_model", "get_model_loader"]

# load_format -> loader; "auto" takes the one of the model's source.
LOADERS: dict[str, type[BaseModelLoader]] = {
    "safetensors": SafetensorsModelLoader,
    "gguf": GGUFModelLoader,
    "dummy": DummyModelLoader,
}


def get_model_loader(
    load_config: LoadConfig, model_config: ModelConfig
) -> BaseModelLoader:
    """The loader for a load format; ValueError when the source holds another kind."""
    kind = "gguf" if model_config.source.kind == "gguf" else "safetensors"
    wanted = load_config.load_format
    name = kind if wanted == "auto" else wanted
    if name not in LOADERS:
        raise ValueError(
            f"unknown load_format {wanted!r}: expected auto, {', '.join(LOADERS)}"
        )
    if name not in (kind, "dummy"):
        raise ValueError(
            f"load_format {wanted!r} does not fit model {model_config.model!r}, which "
            f"is stored as {kind}: pass --load-format auto"
        )
    return LOADERS[name](load_config)


def get_model(
    *,
    vllm_config: VllmConfig,
    model_config: ModelConfig | None = None,
    load_config: LoadConfig | None = None,
    prefix: str = "",
    on_built: Callable[[], None] | None = None,
    **_: Any,
) -> nn.Module:
    """The model of `vllm_config` on its device, filled and in eval mode.

    Its attention layers are registered in the config's static_forward_context, and
    `on_built` is called once they are: before any weight is read. Raises ValueError,
    before any weight is allocated, when the files do not fit the model.
    """
    model_config = model_config or vllm_config.model_config
    loader = get_model_loader(load_config or vllm_config.load_config, model_config)
    return loader.load_model(vllm_config, model_config, prefix, on_built)
