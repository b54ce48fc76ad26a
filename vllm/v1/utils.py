"""Small helpers of the engine's data structures. Knows nothing about requests."""

from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar, overload

import numpy as np
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


class CpuGpuBuffer:
    """A zeroed buffer on the host (`cpu`, and `np` over the same memory) with a twin on
    the device (`gpu`): the same tensor where the device is the CPU."""

    def __init__(
        self,
        *size: int,
        dtype: torch.dtype,
        device: torch.device,
        pin_memory: bool = False,
        with_numpy: bool = True,
    ) -> None:
        self.cpu = torch.zeros(*size, dtype=dtype, device="cpu", pin_memory=pin_memory)
        self._is_host = torch.device(device).type == "cpu"
        self.gpu = (
            self.cpu if self._is_host else torch.zeros_like(self.cpu, device=device)
        )
        # The view that was asked for last: one decode step is as long as the next.
        self._num_viewed: int | None = None
        self._view = self.cpu
        self.np: np.ndarray
        if with_numpy:
            self.np = self.cpu.numpy()

    def copy_to_gpu(self, n: int | None = None) -> torch.Tensor:
        """The first `n` rows (all by default) on the device, as on the host now."""
        if self._is_host:
            if n != self._num_viewed:
                self._num_viewed, self._view = n, self.cpu[:n]
            return self._view
        target = self.gpu[:n]
        return target.copy_(self.cpu[:n], non_blocking=True)

    def copy_to_cpu(self, n: int | None = None) -> torch.Tensor:
        """The first `n` rows on the host, as on the device; the caller synchronises."""
        if self._is_host:
            return self.copy_to_gpu(n)
        target = self.cpu[:n]
        return target.copy_(self.gpu[:n], non_blocking=True)
