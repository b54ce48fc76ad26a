"""Collects the changes of a batch, and holds the processors that hear of them."""

from collections.abc import Iterable, Iterator
from itertools import chain

from vllm.v1.sample.logits_processor.interface import (
    AddedRequest,
    BatchUpdate,
    LogitsProcessor,
    MovedRequest,
    RemovedRequest,
)


class BatchUpdateBuilder:
    """Records removals, additions and moves between two steps.

    Removed rows are handed out again lowest first (`peek_removed`, `pop_removed`). All
    removals of a step come before the first look at them; RuntimeError otherwise.
    """

    def __init__(self) -> None:
        self._removed: list[RemovedRequest] = []
        self._is_removed_sorted = False
        self.added: list[AddedRequest] = []
        self.moved: list[MovedRequest] = []
        self.batch_changed = False

    @property
    def removed(self) -> list[RemovedRequest]:
        """Free rows, highest first."""
        if not self._is_removed_sorted:
            self._removed.sort(reverse=True)
            self._is_removed_sorted = True
        return self._removed

    def removed_append(self, index: int) -> None:
        """Says that a row became free."""
        if self._is_removed_sorted:
            raise RuntimeError(
                f"row {index} is removed after free rows were handed out: remove all "
                "finished requests before new ones are added"
            )
        self._removed.append(index)
        self.batch_changed = True

    def has_removed(self) -> bool:
        return bool(self._removed)

    def peek_removed(self) -> int | None:
        """The lowest free row, None if there is none."""
        return self.removed[-1] if self._removed else None

    def pop_removed(self) -> int | None:
        """Takes the lowest free row."""
        return self.removed.pop() if self._removed else None

    def reset(self) -> bool:
        """Forgets everything; says whether there was anything."""
        changed = self.batch_changed
        self._removed = []
        self._is_removed_sorted = False
        self.added = []
        self.moved = []
        self.batch_changed = False
        return changed

    def get_and_reset(self, batch_size: int) -> BatchUpdate | None:
        """The changes so far, None if there were none; starts over."""
        update = None
        if self.batch_changed or self._removed or self.added or self.moved:
            update = BatchUpdate(
                batch_size=batch_size,
                removed=self.removed,
                added=self.added,
                moved=self.moved,
            )
        self.reset()
        return update


class LogitsProcessors:
    """Processors by kind: those that may change the most likely token come first."""

    def __init__(self, logitsprocs: Iterable[LogitsProcessor] | None = None) -> None:
        self.argmax_invariant: list[LogitsProcessor] = []
        self.non_argmax_invariant: list[LogitsProcessor] = []
        for processor in logitsprocs or ():
            invariant = processor.is_argmax_invariant()
            kind = self.argmax_invariant if invariant else self.non_argmax_invariant
            kind.append(processor)

    @property
    def all(self) -> Iterator[LogitsProcessor]:
        """Every processor."""
        return chain(self.argmax_invariant, self.non_argmax_invariant)

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Tells every processor what changed."""
        for processor in self.all:
            processor.update_state(batch_update)

    def edits_greedy(self) -> bool:
        """Whether some processor may now change what a greedy request gets."""
        return any(processor.is_active() for processor in self.non_argmax_invariant)
