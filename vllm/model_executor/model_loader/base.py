"""The order of loading: check files, build, check names and shapes, allocate, fill.

Knows no file format; a loader opens one as a `Checkpoint`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import nn
from tqdm.auto import tqdm

from vllm.config import LoadConfig, ModelConfig, VllmConfig, set_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.panel_weight import count_holder, room_for
from vllm.model_executor.models.registry import ModelRegistry
from vllm.model_executor.models.utils import WeightInfo, WeightPlan

logger = init_logger(__name__)


class Checkpoint(Protocol):
    """An opened checkpoint whose headers have been checked."""

    # Nobody else has a large tensor, which lies in memory from `room_for`: a model may
    # keep it.
    gives_away: bool

    def infos(self) -> list[WeightInfo]:
        """Every tensor's name and shape; reads no data."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor by name, one at a time, on the CPU."""


class BaseModelLoader(ABC):
    """Loads one kind of checkpoint."""

    def __init__(self, load_config: LoadConfig) -> None:
        self.load_config = load_config

    @abstractmethod
    def open(self, model_config: ModelConfig) -> Checkpoint:
        """Opens the model's files and checks what can be checked without reading data.

        Raises ValueError naming the file.
        """

    def load_model(
        self,
        vllm_config: VllmConfig,
        model_config: ModelConfig,
        prefix: str = "",
        on_built: Callable[[], None] | None = None,
    ) -> nn.Module:
        """Builds and fills the model; see `get_model`."""
        started = perf_counter()
        checkpoint = self.open(model_config)
        device = vllm_config.device_config.device
        model_cls, name = ModelRegistry.resolve_model_cls(model_config.architectures)
        planned = hasattr(model_cls, "plan_weights")
        with (
            set_current_vllm_config(vllm_config),
            default_dtype(model_config.dtype),
            torch.device("meta" if planned else device),
        ):
            model = model_cls(vllm_config=vllm_config, prefix=prefix)
        if on_built is not None:
            on_built()
        if planned:
            self._fill_planned(model, checkpoint, device)
        else:
            model.load_weights(self._progress(checkpoint))
        process_weights_after_loading(model)
        logger.info(
            "Loaded %s in %.2f s (%s)",
            name,
            perf_counter() - started,
            model_config.dtype,
        )
        return model.eval()

    def _fill_planned(
        self, model: Any, checkpoint: Checkpoint, device: torch.device
    ) -> None:
        targets = model.plan_weights(checkpoint.infos())
        materialize(model, device)
        plan = WeightPlan(model, targets)
        with torch.no_grad():
            for name, tensor in self._progress(checkpoint):
                plan.place(name, tensor, keep=checkpoint.gives_away)

    def _progress(self, checkpoint: Checkpoint) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(
            tqdm(
                checkpoint.tensors(),
                total=len(checkpoint.infos()),
                desc="Loading weights",
                unit="tensor",
                mininterval=1.0,
                disable=not self.load_config.use_tqdm_on_load,
            )
        )


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """New floating-point tensors have `dtype` inside."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def materialize(model: nn.Module, device: torch.device | str) -> None:
    """Gives every parameter on the meta device memory on `device`, uninitialised.

    Parameters that modules share stay shared. Buffers are moved as they are.
    """
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # by id; keeps both alive
    rooms: list[torch.Tensor] = []  # kept, so that weights lie side by side
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is None or not param.is_meta:
                continue
            if id(param) not in made:
                rooms.append(_room(param, device))
                fresh = nn.Parameter(rooms[-1], requires_grad=False)
                fresh.__dict__.update(param.__dict__)
                made[id(param)] = (param, fresh)
            module._parameters[name] = made[id(param)][1]
            count_holder(made[id(param)][1])
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


def _room(param: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Uninitialised memory for a parameter."""
    if torch.device(device).type == "cpu":
        return room_for(param.shape, param.dtype)
    # Not empty_like: on the meta device it imports sympy, half a second.
    return torch.empty(param.shape, dtype=param.dtype, device=device)


def process_weights_after_loading(model: nn.Module) -> None:
    """Lets every layer prepare what it computes from its weights (prepacking)."""
    with torch.no_grad():
        for module in model.modules():
            prepare = getattr(module, "process_weights_after_loading", None)
            if prepare is not None and module is not model:
                prepare()
