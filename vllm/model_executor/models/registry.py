"""Maps an architecture's name to its model class, imported when it is asked for."""

from typing import Any

from torch import nn

from vllm.transformers_utils.architectures import (
    ARCHITECTURES,
    pick_architecture,
    supported_architectures,
)
from vllm.utils.import_utils import resolve


class _ModelRegistry:
    """Public as `ModelRegistry`: what can be served, built in or plugged in."""

    def get_supported_archs(self) -> list[str]:
        """Every architecture name, sorted."""
        return supported_architectures()

    def register_model(self, model_arch: str, model_cls: type[nn.Module] | str) -> None:
        """Adds or replaces an architecture.

        `model_cls` is a class or "module:Class", which is imported only when a model
        of this architecture is loaded. Raises ValueError for anything else.
        """
        if isinstance(model_cls, str):
            module, colon, name = model_cls.partition(":")
            if not (module and colon and name):
                raise ValueError(
                    f"cannot register {model_arch!r}: {model_cls!r} is no "
                    "'module:Class'"
                )
        elif not (isinstance(model_cls, type) and issubclass(model_cls, nn.Module)):
            raise ValueError(
                f"cannot register {model_arch!r}: {model_cls!r} is neither a subclass "
                "of torch.nn.Module nor a string 'module:Class'"
            )
        ARCHITECTURES[model_arch] = model_cls

    def resolve_model_cls(
        self, architectures: list[str] | str, where: str = "the model's config"
    ) -> tuple[type[nn.Module], str]:
        """(class, name) of the first architecture that can be served.

        Raises ValueError listing what is supported when there is none.
        """
        names = [architectures] if isinstance(architectures, str) else architectures
        name = pick_architecture(names, where)
        target: Any = ARCHITECTURES[name]
        return (resolve(target) if isinstance(target, str) else target), name


ModelRegistry = _ModelRegistry()
