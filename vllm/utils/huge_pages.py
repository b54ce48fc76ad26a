"""Memory for weights that lie side by side on huge pages.

A weight of less than a huge page gets none of its own, and is read a third slower for
it. Knows memory; refuses to know what is kept there.
"""

import weakref
from collections.abc import Callable

import torch

from vllm.utils.math_utils import round_up

HUGE_PAGE = 2 << 20
_CHUNK = 32 << 20
LARGE = _CHUNK // 2  # bytes above which memory lies alone
_LINE = 64

Advise = Callable[[torch.Tensor], bool]


class _Chunk:
    """Memory that is given out from its start; alive as long as what was given out."""

    def __init__(self, advise: Advise) -> None:
        self.memory = torch.empty(_CHUNK + HUGE_PAGE, dtype=torch.uint8)
        address = self.memory.data_ptr()
        self.used = round_up(address, HUGE_PAGE) - address
        self.end = self.used + _CHUNK
        advise(self.memory)

    def take(self, size: int) -> torch.Tensor | None:
        if self.used + size > self.end:
            return None
        taken = self.memory[self.used : self.used + size]
        self.used += round_up(size, _LINE)
        return taken


class HugePages:
    """Gives out uninitialised memory on huge pages that `advise` asks for."""

    def __init__(self, advise: Advise) -> None:
        self._advise = advise
        # Not kept alive from here: memory goes with the weights that lie in it.
        self._current: weakref.ref[_Chunk] | None = None

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Like `torch.empty` on the host."""
        count = torch.Size(shape).numel()
        size = count * dtype.itemsize
        if size > LARGE:
            whole = torch.empty(shape, dtype=dtype)
            self._advise(whole)
            return whole
        chunk = None if self._current is None else self._current()
        taken = None if chunk is None else chunk.take(size)
        if chunk is None or taken is None:
            chunk = _Chunk(self._advise)
            self._current = weakref.ref(chunk)
            taken = chunk.take(size)
        assert taken is not None
        given = taken.view(dtype).view(shape)
        given._chunk = chunk  # type: ignore[attr-defined]
        return given
