"""The collector of cyclic garbage, out of the way of work that makes none."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Collects nothing inside, and leaves the collector as it was found.

    For start-up: it makes millions of objects that live on, and the collector would
    look through all of them again and again. Serves as a decorator too.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
