"""Stored blocks: whole or absent, never wrong."""

import json
from pathlib import Path

import pytest
import torch

from tests.kv_transfer.test_pages import print_of
from vllm.distributed.kv_transfer.kv_connector.utils import FingerprintMismatch
from vllm.distributed.kv_transfer.kv_connector.v1.page_store import PageStore
from vllm.v1.kv_formats import by_name

KEY = "ab" * 32 + "-0"
PAGES = torch.arange(4096).to(torch.uint8)


@pytest.fixture
def store(tmp_path: Path) -> PageStore:
    found = PageStore(tmp_path / "store")
    found.open(print_of(by_name("bfloat16")))
    return found


def file_of(store: PageStore) -> Path:
    (path,) = store.folder.glob("*/*.safetensors")
    return path


def test_another_process_reads_what_was_written(store: PageStore) -> None:
    assert not store.has(KEY) and not store.verify(KEY) and store.read(KEY) is None
    store.write(KEY, PAGES)
    other = PageStore(store.folder)
    other.open(print_of(by_name("bfloat16")))
    assert other.has(KEY) and other.verify(KEY) and torch.equal(other.read(KEY), PAGES)
    (block,) = other.blocks()
    assert block.key == KEY and block.num_bytes > PAGES.numel() and block.used_at > 0
    other.clear()
    assert not store.has(KEY) and not store.verify(KEY)


def _flip(blob: bytearray, at: int) -> bytes:
    blob[at] ^= 0x10
    return bytes(blob)


DAMAGE = {
    "truncated": lambda blob: blob[: len(blob) // 2],
    "one byte short": lambda blob: blob[:-1],
    "header only": lambda blob: blob[:16],
    "empty": lambda blob: b"",
    "zeroed": lambda blob: bytes(len(blob)),
    "tail zeroed": lambda blob: blob[:-64] + bytes(64),
    "longer": lambda blob: blob + b"x",
    **{
        f"bit flipped at {place}/40": lambda blob, place=place: _flip(
            bytearray(blob), len(blob) * place // 40
        )
        for place in range(40)
    },
    **{
        f"bit flipped in byte {at} of the header": lambda blob, at=at: _flip(
            bytearray(blob), at
        )
        for at in range(0, 120, 3)
    },
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_block_is_a_miss_and_is_counted(
    store: PageStore, damage: str
) -> None:
    store.write(KEY, PAGES)
    assert store.verify(KEY)
    path = file_of(store)
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    other = PageStore(store.folder)
    if (found := other.read(KEY)) is not None:
        # A bit of the header that says nothing, such as padding, does no harm.
        assert torch.equal(found, PAGES)
        return
    assert not other.has(KEY) and not other.verify(KEY) and not store.verify(KEY)
    assert other.take_num_damaged() == 1 and other.take_num_damaged() == 0
    store.write(KEY, PAGES)
    assert other.verify(KEY)


def test_a_block_under_another_name_is_damaged(store: PageStore) -> None:
    store.write(KEY, PAGES)
    stranger = "ab" * 31 + "cd-0"
    file_of(store).rename(store._path(stranger))
    assert store.read(stranger) is None and store.num_damaged == 1


def test_engines_of_unlike_pages_do_not_share_a_store(store: PageStore) -> None:
    store.open(print_of(by_name("bfloat16")))
    with pytest.raises(FingerprintMismatch, match=r"format_id bfloat16:cells.*float16"):
        store.open(print_of(by_name("float16")))
    manifest = store.folder / "fingerprint.json"
    for text in ("", "{}", json.dumps({"layers": [1]})):
        manifest.write_text(text)
        with pytest.raises(ValueError, match="cannot be read"):
            store.open(print_of(by_name("bfloat16")))


def test_a_write_that_fails_leaves_nothing(
    store: PageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(self: Path, data: bytes) -> int:
        self.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", no_space)
    with pytest.raises(OSError):
        store.write(KEY, PAGES)
    assert not store.has(KEY) and not list(store.folder.glob("*/*"))
