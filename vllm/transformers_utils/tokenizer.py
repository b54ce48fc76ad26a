"""Builds the tokenizer of a model source.

Knows where a tokenizer comes from. Refuses to know prompts, requests and detokenising.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from vllm.transformers_utils.gguf import open_gguf
from vllm.transformers_utils.source import ModelSource, resolve_model
from vllm.utils.import_utils import resolve

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

# Both import transformers (0.6 s), which an engine core without text never needs; the
# second lists every model that it knows besides (0.3 s).
_GGUF_TOKENIZER = "vllm.transformers_utils.gguf_tokenizer:build_tokenizer"
_AUTO_TOKENIZER = "transformers.models.auto.tokenization_auto:AutoTokenizer"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_JSON_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json")


@dataclass(frozen=True, kw_only=True)
class FoundTokenizer:
    """Where a tokenizer lies; its files are there, and nothing of them is loaded."""

    source: ModelSource
    trust_remote_code: bool


def get_tokenizer(
    source: ModelSource,
    tokenizer: str | None = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
) -> "PreTrainedTokenizerBase":
    """The tokenizer of `source`, or of `tokenizer` (alias, folder, GGUF, hub name).

    GGUF files bring vocabulary, special tokens and chat template along. Raises
    ValueError in one line when there is none or it cannot be loaded.
    """
    return open_tokenizer(
        find_tokenizer(source, tokenizer, trust_remote_code, revision)
    )


def find_tokenizer(
    source: ModelSource,
    tokenizer: str | None = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
) -> FoundTokenizer:
    """As `get_tokenizer`, but only looks for it, in milliseconds: ValueError when there
    is none, and when a file of it is no JSON."""
    if tokenizer is not None and tokenizer != source.name:
        source = _tokenizer_source(tokenizer, revision)
    if source.kind == "hf":
        _check_files(source, trust_remote_code)
    return FoundTokenizer(source=source, trust_remote_code=trust_remote_code)


def _check_files(source: ModelSource, trust_remote_code: bool) -> None:
    folder = Path(source.path)
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES) and not (
        trust_remote_code and (folder / "tokenizer_config.json").is_file()
    ):
        raise ValueError(
            f"{source.path} holds no tokenizer ({', '.join(_TOKENIZER_FILES)}): "
            "pass --tokenizer with a folder or name that has one, or "
            "--skip-tokenizer-init"
        )
    for name in _JSON_FILES:
        try:
            if (folder / name).is_file():
                msgspec.json.decode((folder / name).read_bytes(), type=msgspec.Raw)
        except (OSError, msgspec.DecodeError) as error:
            raise _not_loaded(source, f"{name}: {error}") from error


def open_tokenizer(found: FoundTokenizer) -> "PreTrainedTokenizerBase":
    """Loads what was found. Raises ValueError in one line when that fails."""
    source = found.source
    if source.kind == "gguf":
        return resolve(_GGUF_TOKENIZER)(open_gguf(source.path))
    try:
        return resolve(_AUTO_TOKENIZER).from_pretrained(
            source.path, trust_remote_code=found.trust_remote_code
        )
    except Exception as error:  # the library raises many kinds
        raise _not_loaded(source, " ".join(str(error).split())) from error


def _not_loaded(source: ModelSource, reason: str) -> ValueError:
    return ValueError(
        f"the tokenizer in {source.path} cannot be loaded ({reason}): repair the "
        "folder, or pass --tokenizer with another one"
    )


def _tokenizer_source(name: str, revision: str | None) -> ModelSource:
    """Like `resolve_model`, but a folder need not hold a model."""
    folder = Path(name).expanduser()
    if name and folder.is_dir() and not any(folder.glob("*.gguf")):
        return ModelSource(kind="hf", path=str(folder), name=name)
    try:
        return resolve_model(name, revision)
    except ValueError as error:
        raise ValueError(
            f"tokenizer {name!r} cannot be used (--tokenizer): expected the folder of "
            f"one ({', '.join(_TOKENIZER_FILES)}), or what --model takes; {error}"
        ) from error
