"""Reads the weights of a Hugging Face folder, one tensor at a time."""

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open

from vllm.config import ModelConfig
from vllm.model_executor.model_loader.base import BaseModelLoader
from vllm.model_executor.model_loader.weight_utils import read_header, weight_files
from vllm.model_executor.models.utils import WeightInfo


class SafetensorsCheckpoint:
    """Files whose headers agree with their lengths; data is mapped when asked for."""

    gives_away = False

    def __init__(self, files: list[Path]) -> None:
        self._infos = [
            WeightInfo(name=tensor.name, shape=tensor.shape, file=str(file))
            for file in files
            for tensor in read_header(file)
        ]

    def infos(self) -> list[WeightInfo]:
        return self._infos

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        by_file: dict[str, list[str]] = {}
        for info in self._infos:
            by_file.setdefault(info.file, []).append(info.name)
        for file, names in by_file.items():
            with safe_open(file, framework="pt", device="cpu") as opened:
                for name in names:
                    yield name, opened.get_tensor(name)


class SafetensorsModelLoader(BaseModelLoader):
    """model.safetensors, or the shards that an index lists."""

    def open(self, model_config: ModelConfig) -> SafetensorsCheckpoint:
        source = model_config.source
        return SafetensorsCheckpoint(weight_files(source.path, source.name))
