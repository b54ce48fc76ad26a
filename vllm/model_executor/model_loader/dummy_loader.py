"""Fills a model with small random weights: for benchmarks, without any weight file."""

from collections.abc import Iterator

import torch

from vllm.config import ModelConfig
from vllm.model_executor.model_loader.base import (
    BaseModelLoader,
    Checkpoint,
    materialize,
)
from vllm.model_executor.models.utils import WeightInfo

_LIMIT = 1e-3  # weights are uniform in +-_LIMIT, so that activations stay finite


class _NoCheckpoint:
    gives_away = False

    def infos(self) -> list[WeightInfo]:
        return []

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(())


class DummyModelLoader(BaseModelLoader):
    """Reads the config only; the same seed gives the same weights."""

    def open(self, model_config: ModelConfig) -> Checkpoint:
        return _NoCheckpoint()

    def _fill_planned(
        self, model: torch.nn.Module, checkpoint: Checkpoint, device: torch.device
    ) -> None:
        materialize(model, device)
        generator = torch.Generator().manual_seed(1234)
        with torch.no_grad():
            for param in model.parameters():
                if param.dim() == 1:  # norms and biases
                    param.fill_(1.0)
                    continue
                values = torch.empty(param.shape, dtype=torch.float32)
                param.copy_(values.uniform_(-_LIMIT, _LIMIT, generator=generator))
