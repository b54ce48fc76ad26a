"""Rebuilds a model's tokenizer from the vocabulary inside its GGUF file.

Knows the two kinds of vocabulary (byte-level BPE with merges, sentencepiece BPE with
scores) and the table of pre-tokenizers. Anything it does not know is refused: a
tokenizer that is nearly right is worse than none.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
from tokenizers.pre_tokenizers import (
    ByteLevel,
    Digits,
    PreTokenizer,
    Sequence,
    Split,
)
from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

from vllm.transformers_utils.gguf import GGUFFile
from vllm.transformers_utils.gguf_merges import ways_to_merge

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6

_SPACE = "\u2581"  # how sentencepiece writes a space

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, kw_only=True)
class BPERecipe:
    """How text is cut before byte-level BPE runs on the pieces.

    `pattern` None means GPT-2's own pattern. `add_bos` is what holds when the file does
    not say. With `ignore_merges` a piece that is itself a token is taken whole.
    """

    pattern: str | None = None
    single_digits: bool = False
    ignore_merges: bool = False
    nfc: bool = False
    add_bos: bool = False


_DIGITS_RECIPE = BPERecipe(single_digits=True)
_GPT2_RECIPE = BPERecipe()
_LLAMA3_RECIPE = BPERecipe(pattern=_LLAMA3, ignore_merges=True, add_bos=True)
_QWEN2_RECIPE = BPERecipe(pattern=_QWEN2, nfc=True)

# tokenizer.ggml.pre -> recipe
BPE_RECIPES = {
    "default": _GPT2_RECIPE,
    "gpt-2": _GPT2_RECIPE,
    "phi-2": _GPT2_RECIPE,
    "olmo": _GPT2_RECIPE,
    "smollm": _DIGITS_RECIPE,
    "starcoder": _DIGITS_RECIPE,
    "refact": _DIGITS_RECIPE,
    "command-r": _DIGITS_RECIPE,
    "llama-bpe": _LLAMA3_RECIPE,
    "llama3": _LLAMA3_RECIPE,
    "llama-v3": _LLAMA3_RECIPE,
    "smaug-bpe": _LLAMA3_RECIPE,
    "qwen2": _QWEN2_RECIPE,
    "deepseek-r1-qwen": _QWEN2_RECIPE,
    "tekken": BPERecipe(pattern=_TEKKEN, ignore_merges=True, add_bos=True),
}


def build_tokenizer(gguf: GGUFFile) -> PreTrainedTokenizerFast:
    """The tokenizer of the file, with special tokens, BOS policy and chat template.

    Raises ValueError naming the file for a missing or unknown kind of vocabulary.
    """
    kind = gguf.get("tokenizer.ggml.model")
    tokens = gguf.get("tokenizer.ggml.tokens")
    if not kind or not tokens:
        raise ValueError(
            f"GGUF file {gguf.path} holds no tokenizer: pass --tokenizer with a "
            "Hugging Face folder or name"
        )
    vocab = {token: i for i, token in enumerate(tokens)}
    if kind == "gpt2":
        tokenizer, add_bos = _byte_level(gguf, vocab)
    elif kind == "llama":
        tokenizer, add_bos = _sentencepiece(gguf, tokens, vocab)
    else:
        raise ValueError(
            f"GGUF file {gguf.path} holds a {kind!r} tokenizer; supported are 'gpt2' "
            "(byte-level BPE) and 'llama' (sentencepiece BPE): pass --tokenizer with a "
            "Hugging Face folder or name"
        )
    _add_tokens(tokenizer, gguf, tokens)
    return _wrapped(tokenizer, gguf, tokens, add_bos)


def _byte_level(gguf: GGUFFile, vocab: dict[str, int]) -> tuple[Tokenizer, bool]:
    pre = gguf.get("tokenizer.ggml.pre", "default")
    recipe = BPE_RECIPES.get(pre)
    if recipe is None:
        raise ValueError(
            f"GGUF file {gguf.path} uses the pre-tokenizer {pre!r}; known are "
            f"{', '.join(sorted(BPE_RECIPES))}: pass --tokenizer with a Hugging Face "
            "folder or name"
        )
    merges = [
        _merge(text, vocab, gguf.path) for text in gguf.get("tokenizer.ggml.merges", [])
    ]
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, ignore_merges=recipe.ignore_merges, fuse_unk=False)
    )
    if recipe.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(recipe)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, recipe.add_bos


def _merge(text: str, vocab: dict[str, int], path: str) -> tuple[str, str]:
    """The two halves of one merge rule; a half never starts with the separator."""
    left, _, right = text.partition(" ")
    if left not in vocab or right not in vocab:
        raise ValueError(
            f"GGUF file {path}: merge {text!r} names a piece that is no token; the "
            "file is damaged"
        )
    return left, right


def _pre_tokenizer(recipe: BPERecipe) -> PreTokenizer:
    if recipe.pattern is None:
        cut: list[Any] = [Digits(individual_digits=True)] * recipe.single_digits
        return Sequence([*cut, ByteLevel(add_prefix_space=False, use_regex=True)])
    return Sequence(
        [
            Split(Regex(recipe.pattern), behavior="isolated"),
            ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _sentencepiece(
    gguf: GGUFFile, tokens: list[str], vocab: dict[str, int]
) -> tuple[Tokenizer, bool]:
    """BPE over characters with byte fallback; merge order follows the scores."""
    scores = gguf.get("tokenizer.ggml.scores")
    if not scores:
        raise ValueError(
            f"GGUF file {gguf.path}: its sentencepiece vocabulary has no scores; "
            "convert the model again"
        )
    unknown = gguf.get("tokenizer.ggml.unknown_token_id", 0)
    tokenizer = Tokenizer(
        models.BPE(
            vocab,
            _merges_by_score(gguf, tokens, scores),
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    # A text, and what follows a special token, starts with a space of its own.
    prefix = gguf.get("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_SPACE), spaces])
        if prefix
        else spaces
    )
    steps = [
        decoders.Replace(_SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if prefix:
        steps.append(decoders.Strip(content=" ", left=1))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer, True


def _merges_by_score(
    gguf: GGUFFile, tokens: list[str], scores: list[float]
) -> list[tuple[str, str]]:
    """Every way to make a token of two tokens, best-scored results first.

    Merges with the same result keep the order of their halves' ids, as sentencepiece
    tries the piece that it met first.
    """
    types = gguf.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    if not len(tokens) == len(scores) == len(types):
        raise ValueError(
            f"GGUF file {gguf.path}: {len(tokens)} tokens have {len(scores)} scores "
            f"and {len(types)} types; the file is damaged"
        )
    whole, left, right = ways_to_merge(tokens, np.asarray(types) == _NORMAL)
    _, rank = np.unique(-np.asarray(scores), return_inverse=True)
    order = np.lexsort((right, rank[whole] * len(tokens) + left))
    lefts, rights = left[order].tolist(), right[order].tolist()
    return [(tokens[a], tokens[b]) for a, b in zip(lefts, rights, strict=True)]


def _add_tokens(tokenizer: Tokenizer, gguf: GGUFFile, tokens: list[str]) -> None:
    """Registers control tokens as special, user-defined ones as plain added tokens."""
    types = gguf.get("tokenizer.ggml.token_type") or []
    special, added = [], []
    for token, kind in zip(tokens, types, strict=False):
        if kind in (_CONTROL, _UNKNOWN):
            special.append(AddedToken(token, special=True, normalized=False))
        elif kind == _USER_DEFINED:
            added.append(AddedToken(token, special=False, normalized=False))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(added)


def _wrapped(
    tokenizer: Tokenizer, gguf: GGUFFile, tokens: list[str], add_bos: bool
) -> PreTrainedTokenizerFast:
    named: dict[str, Any] = {}
    for key, name in (
        ("bos", "bos_token"),
        ("eos", "eos_token"),
        ("unknown", "unk_token"),
        ("padding", "pad_token"),
    ):
        token_id = gguf.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None and 0 <= token_id < len(tokens):
            named[name] = tokens[token_id]
    wants_bos = gguf.get("tokenizer.ggml.add_bos_token", add_bos)
    # The wrapper copies what it is given, by way of JSON. Nobody else has this one.
    tokenizer.__deepcopy__ = lambda _: tokenizer
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        add_bos_token=bool(wants_bos) and "bos_token" in named,
        add_eos_token=bool(gguf.get("tokenizer.ggml.add_eos_token", False)),
        chat_template=_chat_template(gguf),
        **named,
    )
    del tokenizer.__deepcopy__
    return wrapped


def _chat_template(gguf: GGUFFile) -> str | dict[str, str] | None:
    """The template, or the named templates of a file that has several."""
    default = gguf.get("tokenizer.chat_template")
    names = gguf.get("tokenizer.chat_templates") or []
    named = {
        name: text
        for name in names
        if (text := gguf.get(f"tokenizer.chat_template.{name}")) is not None
    }
    if named and default is not None:
        return {"default": default, **named}
    return default
