"""Blocks as files: one safetensors file for each, checksummed, in one folder.

Knows names, bytes and damage. Knows nothing of requests. A file that is damaged in any
way is as good as no file, and is removed.
"""

import json
import os
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from vllm.distributed.kv_transfer.kv_connector.fingerprint import (
    FingerprintMismatch,
    LayoutFingerprint,
)
from vllm.logger import init_logger

logger = init_logger(__name__)

_MANIFEST = "fingerprint.json"
_SUFFIX = ".safetensors"
_TENSOR = "pages"
_CHECKSUM = "crc32"


@dataclass(frozen=True, kw_only=True)
class StoredBlock:
    """A file of the store: its key, its size and when it was last used."""

    key: str
    num_bytes: int
    used_at: float


def _checksum(key: str, pages: torch.Tensor) -> str:
    """Of the bytes and of the key: a block under another's name is damaged too."""
    return f"{zlib.crc32(pages.numpy(), zlib.crc32(key.encode())):08x}"


class PageStore:
    """Blocks by key in a folder that any number of engines may share. `setting` names
    what the user chose it by."""

    def __init__(self, folder: str | Path, setting: str = "folder") -> None:
        self.folder = Path(folder)
        self.setting = setting
        self.num_damaged = 0
        # Files that were read whole and found good: key -> (mtime in ns, size).
        self._verified: dict[str, tuple[int, int]] = {}

    def open(self, fingerprint: LayoutFingerprint) -> None:
        """Makes the folder, or checks that it holds pages of the same layout.

        ValueError for a folder that cannot be used; FingerprintMismatch, which is one,
        names what differs.
        """
        try:
            self._open(fingerprint)
        except OSError as error:
            raise ValueError(
                f"{self.setting}: KV pages cannot be stored in {self.folder} "
                f"({error}): expected a folder that can be made and written; choose "
                "another, or change its permissions"
            ) from error

    def _open(self, fingerprint: LayoutFingerprint) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        manifest = self.folder / _MANIFEST
        own = self.folder / f"{_MANIFEST}.{os.getpid()}"
        own.write_text(json.dumps(fingerprint.to_dict(), indent=1))
        try:
            os.link(own, manifest)  # fails where there is one, also in a race
        except FileExistsError:
            self._check(manifest, fingerprint)
        finally:
            own.unlink()

    def _check(self, manifest: Path, fingerprint: LayoutFingerprint) -> None:
        try:
            stored = LayoutFingerprint.from_dict(json.loads(manifest.read_text()))
        except ValueError as error:
            raise ValueError(
                f"{manifest} cannot be read ({error}): {self._way_out()}"
            ) from error
        try:
            fingerprint.check_same(stored, f"the store in {self.folder}")
        except FingerprintMismatch as error:
            raise FingerprintMismatch(f"{error}; {self._way_out()}") from error

    def _way_out(self) -> str:
        return (
            f"remove the folder {self.folder}, or store KV pages in another one "
            f"({self.setting})"
        )

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}{_SUFFIX}"

    def has(self, key: str) -> bool:
        """Says whether there is a file; it may be damaged."""
        return self._path(key).exists()

    def verify(self, key: str) -> bool:
        """Says whether a block is there and undamaged. Reads it, once."""
        try:
            found = self._path(key).stat()
        except FileNotFoundError:
            return False
        state = (found.st_mtime_ns, found.st_size)
        if self._verified.get(key) == state:
            return True
        if self.read(key) is None:
            return False
        self._verified[key] = state
        return True

    def read(self, key: str) -> torch.Tensor | None:
        """The bytes of a block, uint8 [block_bytes]; None when there is none or it is
        damaged."""
        path = self._path(key)
        if not path.exists():
            return None
        try:
            with safe_open(path, framework="pt") as file:
                pages = file.get_tensor(_TENSOR)
                expected = (file.metadata() or {}).get(_CHECKSUM)
            if pages.dtype == torch.uint8 and _checksum(key, pages) == expected:
                return pages
            reason = "its checksum is wrong"
        except (SafetensorError, OSError, ValueError) as error:
            reason = str(error)
        self._drop_damaged(path, reason)
        return None

    def _drop_damaged(self, path: Path, reason: str) -> None:
        self.num_damaged += 1
        path.unlink(missing_ok=True)
        logger.warning("stored KV block %s is damaged (%s): removed", path, reason)

    def write(self, key: str, pages: torch.Tensor) -> None:
        """Stores uint8 [block_bytes], at once or not at all. OSError when it cannot."""
        path = self._path(key)
        path.parent.mkdir(exist_ok=True)
        blob = save({_TENSOR: pages}, {_CHECKSUM: _checksum(key, pages)})
        unfinished = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            unfinished.write_bytes(blob)
            unfinished.replace(path)
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise

    def touch(self, key: str) -> None:
        """Notes that a block was used just now; nothing happens when it is gone."""
        with suppress(FileNotFoundError):
            os.utime(self._path(key))

    def remove(self, key: str) -> None:
        self._path(key).unlink(missing_ok=True)

    def take_num_damaged(self) -> int:
        """Damaged files since the last call."""
        taken, self.num_damaged = self.num_damaged, 0
        return taken

    def blocks(self) -> Iterator[StoredBlock]:
        """Every file, in no order."""
        for path in self.folder.glob(f"*/*{_SUFFIX}"):
            found = path.stat()
            yield StoredBlock(
                key=path.name.removesuffix(_SUFFIX),
                num_bytes=found.st_size,
                used_at=found.st_mtime,
            )

    def clear(self) -> None:
        """Removes every block."""
        for block in list(self.blocks()):
            self.remove(block.key)
        self._verified.clear()
