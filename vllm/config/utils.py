"""The decorator that every config class wears."""

from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass
from typing_extensions import dataclass_transform

T = TypeVar("T")


@dataclass_transform(kw_only_default=True)
def config(cls: type[T] | None = None, **settings: Any) -> Any:
    """Makes a validated dataclass: unknown fields and wrong types are refused."""
    options = ConfigDict(extra="forbid", arbitrary_types_allowed=True, **settings)

    def wrap(target: type[T]) -> type[T]:
        return dataclass(target, config=options, kw_only=False)

    return wrap if cls is None else wrap(cls)


def warn_unused(
    owner: str, logger_warning: Callable[..., None], names: list[str]
) -> None:
    """Says once which accepted fields have no part of the engine behind them."""
    if names:
        logger_warning(
            "%s: %s accepted for compatibility, without effect here",
            owner,
            ", ".join(sorted(names)),
        )
