"""Logits processors: the interface for plugins, the built-in ones, how they load."""

import inspect
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

import torch

from vllm import envs
from vllm.logger import init_logger
from vllm.sampling_params import SamplingParams
from vllm.utils.import_utils import resolve_setting
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
    process_dict_updates,
)
from vllm.v1.sample.logits_processor.interface import (
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
)
from vllm.v1.sample.logits_processor.state import BatchUpdateBuilder, LogitsProcessors
from vllm.v1.sample.logits_processor.structured import StructuredOutputLogitsProcessor

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

LOGITSPROCS_GROUP = "vllm.logits_processors"
BUILTIN_LOGITS_PROCESSORS: tuple[type[LogitsProcessor], ...] = (
    MinTokensLogitsProcessor,
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    StructuredOutputLogitsProcessor,
)

__all__ = [
    "BUILTIN_LOGITS_PROCESSORS",
    "LOGITSPROCS_GROUP",
    "BatchUpdate",
    "BatchUpdateBuilder",
    "LogitBiasLogitsProcessor",
    "LogitsProcessor",
    "LogitsProcessors",
    "MinPLogitsProcessor",
    "MinTokensLogitsProcessor",
    "MoveDirectionality",
    "StructuredOutputLogitsProcessor",
    "build_logitsprocs",
    "load_custom_logitsprocs",
    "process_dict_updates",
    "validate_logits_processors_parameters",
]


def _checked_class(found: object, origin: str) -> type[LogitsProcessor]:
    if not (inspect.isclass(found) and issubclass(found, LogitsProcessor)):
        raise ValueError(
            f"{origin} is {found!r}: expected a subclass of "
            f"{LogitsProcessor.__module__}.LogitsProcessor"
        )
    return found


def _installed_logitsprocs() -> list[type[LogitsProcessor]]:
    """Classes of the entry-point group; a failing one is logged and skipped."""
    allowed = envs.VLLM_PLUGINS
    classes = []
    for entry in entry_points(group=LOGITSPROCS_GROUP):
        if allowed is not None and entry.name not in allowed:
            continue
        try:
            classes.append(_checked_class(entry.load(), f"entry point {entry.name!r}"))
        except Exception:
            logger.exception("logits processor %r failed to load: skipped", entry.name)
    return classes


def load_custom_logitsprocs(
    logits_processors: Sequence[str | type[LogitsProcessor]] | None,
) -> list[type[LogitsProcessor]]:
    """Installed classes, then those given: a class, "module:Name" or "module.Name".

    Raises ValueError for anything that is not a LogitsProcessor.
    """
    classes = _installed_logitsprocs()
    for given in logits_processors or ():
        if isinstance(given, str):
            found = resolve_setting("logits processor", given)
            classes.append(_checked_class(found, f"logits processor {given!r}"))
        else:
            classes.append(_checked_class(given, "a logits processor"))
    return classes


def build_logitsprocs(
    vllm_config: "VllmConfig",
    device: torch.device,
    is_pin_memory: bool = False,
    is_pooling_model: bool = False,
    custom_logitsprocs: Sequence[str | type[LogitsProcessor]] = (),
) -> LogitsProcessors:
    """The built-in processors and the custom ones, constructed."""
    if is_pooling_model:
        return LogitsProcessors()
    classes = [*BUILTIN_LOGITS_PROCESSORS, *load_custom_logitsprocs(custom_logitsprocs)]
    return LogitsProcessors(cls(vllm_config, device, is_pin_memory) for cls in classes)


def validate_logits_processors_parameters(
    logits_processors: Sequence[str | type[LogitsProcessor]] | None,
    sampling_params: SamplingParams,
) -> None:
    """Lets every custom processor refuse a request; ValueError if one does."""
    for cls in load_custom_logitsprocs(logits_processors):
        cls.validate_params(sampling_params)
