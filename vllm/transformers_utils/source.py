"""Knows where a model's files lie: packaged demo, folder, GGUF file or hub name.

Refuses to know what is inside them, and imports no torch.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vllm.transformers_utils.packaged import (
    PACKAGED_MODELS,
    PackagedModel,
    packaged_file,
)
from vllm.utils.import_utils import resolve

__all__ = [
    "PACKAGED_MODELS",
    "ModelSource",
    "PackagedModel",
    "recommended_sampling",
    "resolve_model",
]

GGUF_MAGIC = b"GGUF"

# What a serving engine reads of a hub repository; other weight formats stay there.
HUB_FILES = (
    "*.json",
    "*.safetensors",
    "*.jinja",
    "*.model",
    "*.tiktoken",
    "tokenizer*",
    "*.txt",
    "*.py",
)

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """Where the model lies: `path` is a folder for "hf", one file for "gguf"."""

    kind: Literal["hf", "gguf"]
    path: str
    name: str  # as the user typed it


def resolve_model(name: str, revision: str | None = None) -> ModelSource:
    """Finds the files of `name`: an alias, a local folder or .gguf file, a hub name.

    `revision` is a branch, tag or commit and matters to hub names only. A hub name is
    downloaded (or found in the local hub cache). Raises ValueError in one line that
    names the value, what was expected and the way out.
    """
    name = os.fspath(name)
    if not name:
        raise ValueError(f"model '' is an empty name: expected {_expected()}")
    packaged = PACKAGED_MODELS.get(name.lower())
    if packaged is not None:
        return ModelSource(kind="gguf", path=packaged_file(name, packaged), name=name)
    path = Path(name).expanduser()
    if path.is_dir():
        return _from_folder(path, name)
    if path.is_file():
        return _from_file(path, name)
    if not _looks_like_hub_name(name):
        raise ValueError(
            f"model {name!r} not found: there is no such file or folder; expected "
            f"{_expected()}"
        )
    return ModelSource(kind="hf", path=_download(name, revision), name=name)


def recommended_sampling(source: ModelSource) -> dict[str, float]:
    """Sampling defaults of a packaged model, whose weight file states none."""
    packaged = PACKAGED_MODELS.get(source.name.lower())
    return dict(packaged.sampling) if packaged is not None else {}


def _expected() -> str:
    aliases = ", ".join(sorted(PACKAGED_MODELS))
    return (
        "a folder with config.json and *.safetensors, a .gguf file, a Hugging Face "
        f"name like 'org/model', or a demo alias ({aliases})"
    )


def _from_folder(path: Path, name: str) -> ModelSource:
    """A Hugging Face folder, or a folder that holds exactly one GGUF file."""
    if (path / "config.json").is_file():
        return ModelSource(kind="hf", path=str(path), name=name)
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return ModelSource(kind="gguf", path=str(files[0]), name=name)
    if files:
        raise ValueError(
            f"folder {name!r} holds {len(files)} .gguf files and no config.json: pass "
            f"the path of one of them, for example {str(files[0])!r}"
        )
    raise ValueError(
        f"folder {name!r} holds neither config.json nor a .gguf file; expected "
        f"{_expected()}"
    )


def _from_file(path: Path, name: str) -> ModelSource:
    with open(path, "rb") as file:
        magic = file.read(len(GGUF_MAGIC))
    if magic == GGUF_MAGIC:
        return ModelSource(kind="gguf", path=str(path), name=name)
    if path.suffix == ".gguf":
        raise ValueError(
            f"file {name!r} is no GGUF file: it starts with {magic!r}, expected "
            f"{GGUF_MAGIC!r}; download it again"
        )
    raise ValueError(
        f"model {name!r} is a file but no GGUF file; pass the folder that holds "
        "config.json and the weights, or a .gguf file"
    )


def _looks_like_hub_name(name: str) -> bool:
    return _HUB_NAME.fullmatch(name) is not None and not name.endswith(".gguf")


def _download(name: str, revision: str | None) -> str:
    """Returns the local snapshot folder of a hub repository."""
    snapshot_download: Any = resolve("huggingface_hub:snapshot_download")
    try:
        return str(
            snapshot_download(name, revision=revision, allow_patterns=list(HUB_FILES))
        )
    except Exception as error:  # dozens of client errors; all mean "not available"
        reason = str(error).strip().splitlines() or [type(error).__name__]
        at = f" at revision {revision!r}" if revision else ""
        raise ValueError(
            f"model {name!r}{at} is no local path and could not be fetched from the "
            f"Hugging Face hub ({type(error).__name__}: {reason[0]}): check the name "
            f"and the network (HF_TOKEN for gated models), or pass {_expected()}"
        ) from error
