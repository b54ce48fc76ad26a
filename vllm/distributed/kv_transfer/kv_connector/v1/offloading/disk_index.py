"""Which blocks are on disk, least recently used first, within a limit of bytes."""

from collections import OrderedDict

from vllm.distributed.kv_transfer.kv_connector.v1.page_store import PageStore


class DiskIndex:
    """The files of a store, as one engine sees them. Reads the folder when made, so
    blocks of earlier runs are found."""

    def __init__(self, store: PageStore, max_bytes: int | None) -> None:
        self.store = store
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._files: OrderedDict[str, int] = OrderedDict()
        for block in sorted(store.blocks(), key=lambda block: block.used_at):
            self._files[block.key] = block.num_bytes
            self.num_bytes += block.num_bytes

    def __contains__(self, key: str) -> bool:
        return key in self._files

    def __len__(self) -> int:
        return len(self._files)

    def add(self, key: str, num_bytes: int) -> list[str]:
        """Notes a file that was written; removes old ones beyond the limit, and returns
        their keys."""
        self.forget(key)
        self._files[key] = num_bytes
        self.num_bytes += num_bytes
        removed = []
        while self.max_bytes is not None and self.num_bytes > self.max_bytes:
            oldest, size = self._files.popitem(last=False)
            self.num_bytes -= size
            self.store.remove(oldest)
            removed.append(oldest)
        return removed

    def use(self, key: str) -> None:
        """Makes a file the last to go, also for later runs."""
        if key in self._files:
            self._files.move_to_end(key)
            self.store.touch(key)

    def forget(self, key: str) -> None:
        """The file is gone."""
        self.num_bytes -= self._files.pop(key, 0)

    def clear(self) -> list[str]:
        """Removes every file; returns their keys."""
        keys = list(self._files)
        self.store.clear()
        self._files.clear()
        self.num_bytes = 0
        return keys
