"""Threads for an event loop's work that takes a while, and for which no exit waits.

Python's own executors join their threads when a process ends, so that one which never
ends keeps the process alive. Knows threads and futures. Refuses to know the work.
"""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class DaemonPool:
    """At most `size` daemon threads, begun when there is work that none is free for."""

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"a pool of {size} threads: expected at least 1")
        self.size = size
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads = self._unfinished = 0

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        """What `work(*args)` returns or raises, from one of the threads. A caller that
        is cancelled leaves the work to its thread; work still queued is dropped."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def job() -> None:
            if future.cancelled():
                return
            try:
                result, error = work(*args), None
            except BaseException as raised:
                result, error = None, raised

            def settle() -> None:
                if future.done():
                    return
                if error is None:
                    future.set_result(result)  # type: ignore[arg-type]
                else:
                    future.set_exception(error)

            with suppress(RuntimeError):  # the loop has ended without the result
                loop.call_soon_threadsafe(settle)

        self._begin(job)
        return await future

    def _begin(self, job: Callable[[], None]) -> None:
        with self._lock:
            self._unfinished += 1
            if is_new := self._threads < min(self._unfinished, self.size):
                self._threads += 1
        self._jobs.put(job)
        if is_new:
            threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            self._jobs.get()()
            with self._lock:
                self._unfinished -= 1
