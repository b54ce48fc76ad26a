"""Places of pages that cannot be used are refused, with the way out, before weights are
read; what is asked then is what the worker finds later."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kv_transfer.engines import example, offloading, run
from tests.tiny_model import tiny_model  # noqa: F401
from vllm import LLM
from vllm.distributed.kv_transfer.kv_connector.v1.page_store import PageStore
from vllm.model_executor.model_loader.base import BaseModelLoader


def multi(child: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [child]},
    }


# Every way to a folder: (what asks for it, the setting that names it).
FOLDERS: dict[str, tuple[Callable[[Path], dict[str, Any]], str]] = {
    "example": (example, "shared_storage_path"),
    "offloading": (lambda folder: offloading(disk_path=str(folder)), "disk_path"),
    "child": (lambda folder: multi(example(folder)), "shared_storage_path"),
}
every_folder = pytest.mark.parametrize("name", FOLDERS)


@pytest.fixture
def refused(
    tiny_model: str,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., str]:
    """Starts an engine that is refused before it reads weights; the message."""

    def read(*_: Any) -> None:
        raise AssertionError("weights are read")

    def start(transfer: dict[str, Any], **more: Any) -> str:
        with monkeypatch.context() as patch, pytest.raises(ValueError) as caught:
            patch.setattr(BaseModelLoader, "_fill_planned", read)
            args = {"kv_cache_memory_bytes": "8MiB", **more}
            LLM(tiny_model, kv_transfer_config=transfer, **args)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    return start


@every_folder
@pytest.mark.parametrize("path", ["/proc/x", "{tmp}/file", "{tmp}/file/below"])
def test_a_folder_that_cannot_be_made_is_named(
    name: str, path: str, refused: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    transfer, setting = FOLDERS[name]
    folder = path.format(tmp=tmp_path)
    words = refused(transfer(Path(folder)))
    assert f"{setting}: KV pages cannot be stored in {folder}" in words
    assert "expected a folder" in words and "choose another" in words


@every_folder
@pytest.mark.parametrize("sizes", [{}, {"num_gpu_blocks_override": 64}])
def test_a_folder_that_cannot_be_written_is_named(
    name: str,
    sizes: dict[str, int],
    refused: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def denied(*_: Any) -> None:  # permissions would not stop root
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "write_text", denied)
    transfer, setting = FOLDERS[name]
    words = refused(transfer(tmp_path), **sizes)
    assert f"{setting}: KV pages cannot be stored in {tmp_path}" in words
    assert "Permission denied" in words


def _damaged(manifest: Path) -> None:
    manifest.write_text(manifest.read_text()[:40])


def _binary(manifest: Path) -> None:
    manifest.write_bytes(b"\xff\xfe")


def _empty(manifest: Path) -> None:
    manifest.write_text('{"layers": []}')


def _of_others(manifest: Path) -> None:
    found = json.loads(manifest.read_text())
    found["layers"][0]["block_size"] += 1
    manifest.write_text(json.dumps(found))


@every_folder
@pytest.mark.parametrize("damage", [_damaged, _binary, _empty, _of_others])
def test_a_store_of_other_pages_tells_the_way_out(
    name: str,
    damage: Callable[[Path], None],
    refused: Callable[..., str],
    tiny_model: str,  # noqa: F811
    tmp_path: Path,
) -> None:
    transfer, setting = FOLDERS[name]
    LLM(
        tiny_model,
        kv_cache_memory_bytes="8MiB",
        kv_transfer_config=transfer(tmp_path),
    )
    (manifest,) = tmp_path.glob("*/fingerprint.json")
    damage(manifest)
    words = refused(transfer(tmp_path))
    assert f"remove the folder {manifest.parent}" in words
    assert f"store KV pages in another one ({setting})" in words


def test_a_store_is_opened_alike_before_and_after_weights(
    tiny_model: str,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[tuple[Path, Any]] = []
    opens = PageStore.open

    def noted(self: PageStore, fingerprint: Any) -> None:
        opened.append((self.folder, fingerprint))
        opens(self, fingerprint)

    monkeypatch.setattr(PageStore, "open", noted)
    run(tiny_model, [[2, 3]], example(tmp_path))
    assert len(opened) == 2 and opened[0] == opened[1]
