"""Small helpers of the engine's data structures. Knows nothing about requests."""

from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar, overload

import torch

T = TypeVar("T")


class ConstantList(Sequence[T], Generic[T]):
    """A read-only view of a list: it follows the list, and refuses to change it.

    Every changing call raises TypeError.
    """

    __slots__ = ("_x",)

    def __init__(self, x: list[T]) -> None:
        self._x = x

    def _refuse(self, *_: Any, **__: Any) -> None:
        raise TypeError("this list is read-only: change it through its owner")

    append = extend = insert = pop = remove = clear = _refuse
    __setitem__ = __delitem__ = _refuse

    def index(self, item: T, start: int = 0, stop: int | None = None) -> int:
        return self._x.index(item, start, len(self._x) if stop is None else stop)

    @overload
    def __getitem__(self, item: int) -> T: ...

    @overload
    def __getitem__(self, item: slice) -> list[T]: ...

    def __getitem__(self, item: int | slice) -> T | list[T]:
        return self._x[item]

    def __iter__(self) -> Iterator[T]:
        return iter(self._x)

    def __contains__(self, item: object) -> bool:
        return item in self._x

    def __len__(self) -> int:
        return len(self._x)

    def __repr__(self) -> str:
        return f"ConstantList({self._x})"

    def copy(self) -> list[T]:
        """A list of one's own."""
        return self._x.copy()


def tensor_data(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor, in row-major order; no copy when it is contiguous on the
    host."""
    flat = tensor.flatten().contiguous().cpu()
    return flat.view(torch.uint8).numpy().data
