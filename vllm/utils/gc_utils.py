"""The collector of cyclic garbage, out of the way of work that makes none."""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_holders = 0
_was_enabled = False


@contextmanager
def collector_paused() -> Iterator[None]:
    """Collects nothing while any thread is inside, and then leaves the collector as the
    first of them found it.

    For start-up: it makes millions of objects that live on, and the collector would
    look through all of them again and again. Serves as a decorator too.
    """
    global _holders, _was_enabled
    with _lock:
        if _holders == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _holders += 1
    try:
        yield
    finally:
        with _lock:
            _holders -= 1
            if _holders == 0 and _was_enabled:
                _count_as_old()
                gc.enable()


def _count_as_old() -> None:
    """Moves what was made to the oldest generation, where it would end up after the
    collector had looked through it as young and as middle-aged."""
    # Objects that somebody froze would thaw.
    if gc.get_freeze_count() == 0:
        gc.freeze()
        gc.unfreeze()
