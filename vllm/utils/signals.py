"""What SIGINT and SIGTERM do to a process that has something to put away first.

Knows signals and exceptions. Refuses to know what is put away.
"""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

# A signal that follows another so soon is the same wish, said twice: what is put away
# because of the first one is not torn.
_SAME_WISH_S = 2.0
_ENDING = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """SIGINT has come. Python ends by that signal, whatever status it is told, once a
    plain KeyboardInterrupt has crossed an `exec`, such as those of named tuples."""


class Terminated(SystemExit):
    """SIGTERM has come."""


@contextmanager
def signals_as_exceptions() -> Iterator[None]:
    """Has SIGINT raise Interrupted and SIGTERM raise Terminated in the main thread,
    also where asyncio would let the first of them wait.

    Changes nothing in other threads.
    """
    last = float("-inf")

    def end(number: int, _: FrameType | None) -> None:
        nonlocal last
        before, last = last, time.monotonic()
        if last - before > _SAME_WISH_S:
            if number == signal.SIGINT:
                raise Interrupted
            raise Terminated(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.signal(number, end) for number in _ENDING}
    try:
        yield
    finally:
        # What a server has put in their place stays: it ends by itself.
        ours = {n: h for n, h in handlers.items() if signal.getsignal(n) is end}
        _restore(ours)


@contextmanager
def termination_as_exception() -> Iterator[None]:
    """Has SIGTERM raise Terminated where it would end the process on the spot; a
    program's own handler stays."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def end(number: int, _: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise Terminated(128 + number)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def signals_held_back() -> Iterator[None]:
    """Lets signals wait for the end of the block. A process that is started in it never
    sees a SIGINT, unless it unblocks that one."""
    noted: list[int] = []
    handlers: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in _ENDING:
            # Other threads may take a signal that is blocked in this one.
            handlers[number] = signal.signal(number, lambda n, _: noted.append(n))
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        _restore(handlers)
        for number in dict.fromkeys(noted):
            signal.raise_signal(number)


def ignore_interrupts() -> None:
    """SIGINT has no meaning for this process, from its birth on."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _restore(handlers: dict[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        # None stands for a handler that Python did not install and cannot name.
        signal.signal(number, signal.SIG_DFL if handler is None else handler)
