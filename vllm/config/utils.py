"""The decorator that every config class wears."""

from functools import wraps
from typing import Any, TypeVar

from pydantic import ConfigDict, ValidationError
from pydantic.dataclasses import dataclass
from typing_extensions import dataclass_transform

from vllm.config.accepted import ACCEPTED
from vllm.logger import init_logger

T = TypeVar("T")

logger = init_logger(__name__)


@dataclass_transform(kw_only_default=True)
def config(cls: type[T] | None = None, **settings: Any) -> Any:
    """Makes a validated dataclass: unknown fields and wrong types are refused by name,
    with a ValueError of one line.

    Fields of `ACCEPTED` are kept as attributes, and it is said that they do nothing.
    """
    options = ConfigDict(extra="forbid", arbitrary_types_allowed=True, **settings)

    def wrap(target: type[T]) -> type[T]:
        made = _telling(dataclass(target, config=options, kw_only=False))
        accepted = ACCEPTED.get(target.__name__)
        return _accepting(made, accepted) if accepted else made

    return wrap if cls is None else wrap(cls)


def _telling(cls: Any) -> Any:
    init = cls.__init__

    @wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            init(self, *args, **kwargs)
        except ValidationError as error:
            message = "; ".join(_told(cls, item) for item in error.errors())
            raise ValueError(message) from None

    cls.__init__ = __init__
    return cls


def _told(cls: Any, item: Any) -> str:
    """One fault in words: the field, what was given and what is expected."""
    message = item["msg"]
    if item["type"] == "value_error":  # of ours: it names everything
        return message.removeprefix("Value error, ")
    where = ".".join(str(part) for part in item["loc"])
    if item["type"] == "unexpected_keyword_argument":
        return f"{cls.__name__} has no field {where}"
    expected = message.removeprefix("Input should be ")
    if expected == message:
        return f"{where}={item['input']!r}: {message}"
    if expected.startswith(("greater", "less")):
        expected = f"a number {expected}"
    return f"{where}={item['input']!r}: expected {expected}"


def _accepting(cls: Any, accepted: frozenset[str]) -> Any:
    init = cls.__init__

    @wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        extra = {name: kwargs.pop(name) for name in accepted & kwargs.keys()}
        init(self, *args, **kwargs)
        for name, value in extra.items():
            setattr(self, name, value)
        if extra:
            logger.warning_once(
                "%s: %s accepted for compatibility, without effect here",
                cls.__name__,
                ", ".join(sorted(extra)),
            )

    cls.__init__ = __init__
    return cls
