"""Builds the tokenizer of a model source.

Knows where a tokenizer comes from. Refuses to know prompts, requests and detokenising.
"""

from pathlib import Path
from typing import TYPE_CHECKING

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
    if tokenizer is not None and tokenizer != source.name:
        source = _tokenizer_source(tokenizer, revision)
    if source.kind == "gguf":
        return resolve(_GGUF_TOKENIZER)(open_gguf(source.path))
    folder = Path(source.path)
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES) and not (
        trust_remote_code and (folder / "tokenizer_config.json").is_file()
    ):
        raise ValueError(
            f"{source.path} holds no tokenizer ({', '.join(_TOKENIZER_FILES)}): "
            "pass --tokenizer with a folder or name that has one, or "
            "--skip-tokenizer-init"
        )
    try:
        return resolve(_AUTO_TOKENIZER).from_pretrained(
            source.path, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # the library raises many kinds
        reason = " ".join(str(error).split())
        raise ValueError(
            f"the tokenizer in {source.path} cannot be loaded ({reason}): repair the "
            "folder, or pass --tokenizer with another one"
        ) from error


def _tokenizer_source(name: str, revision: str | None) -> ModelSource:
    """Like `resolve_model`, but a folder need not hold a model."""
    folder = Path(name).expanduser()
    if folder.is_dir() and any((folder / file).is_file() for file in _TOKENIZER_FILES):
        return ModelSource(kind="hf", path=str(folder), name=name)
    return resolve_model(name, revision)
