"""Streamed text equals the text decoded in one go, and stop strings never leak."""

import random
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from vllm.sampling_params import SamplingParams
from vllm.transformers_utils.source import resolve_model
from vllm.transformers_utils.tokenizer import get_tokenizer
from vllm.v1.engine.detokenizer import (
    IncrementalDetokenizer,
    StreamPieces,
    WindowPieces,
    find_stop,
)

TEXTS = [
    "Hello, world! The quick brown fox jumps over the lazy dog.",
    "naïve café — “quotes” … Straße, coöperate, ½ π ≈ 1.57",
    "日本語のテキスト、한국어 문장, русский текст, עברית, العربية, हिन्दी",
    "emoji 😀 👨‍👩‍👧‍👦 🏳️‍🌈 👍🏽 flags 🇩🇪🇯🇵 and e\u0301 combining \u200d marks",
    "def f(x):\n\treturn {'a': [1, 2.5e-3]}  # tabs\tand   spaces\r\n\n\n",
    "  leading and trailing spaces  ",
    "𐍈 𒀀 𓀀 outside the basic plane",
]
SPECIAL = ["<|im_start|>", "<|im_end|>"]


def byte_level_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=alphabet, special_tokens=SPECIAL
    )
    tokenizer.train_from_iterator(TEXTS[:1] * 4, trainer)
    return tokenizer


def byte_fallback_tokenizer() -> Tokenizer:
    """SentencePiece style: leading spaces as a mark, unknown characters as bytes."""
    words = [
        "▁",
        "▁Hello",
        "▁world",
        "▁the",
        ",",
        "!",
        "H",
        "e",
        "l",
        "o",
        "w",
        "r",
        "d",
    ]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab.update({f"<0x{byte:02X}>": 3 + byte for byte in range(256)})
    vocab.update({word: 259 + i for i, word in enumerate(words)})
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


TOKENIZERS = {
    "byte_level": byte_level_tokenizer(),
    "byte_fallback": byte_fallback_tokenizer(),
}


class Wrapped:
    """A tokenizer that only has `decode`, as custom ones do."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._inner = tokenizer

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return self._inner.decode(ids, skip_special_tokens=skip_special_tokens)


def stream(
    tokenizer: Any, prompt: list[int], output: list[int], **params: Any
) -> tuple[str, list[str]]:
    """All text at the end, and the deltas on the way."""
    detokenizer = IncrementalDetokenizer.from_new_request(
        tokenizer, prompt, SamplingParams(max_tokens=None, **params)
    )
    deltas = []
    for token in output:
        stop = detokenizer.update([token], stop_terminated=False)
        deltas.append(detokenizer.get_next_output_text(stop is not None, delta=True))
        if stop is not None:
            return detokenizer.output_text, deltas
    detokenizer.finish()
    deltas.append(detokenizer.get_next_output_text(True, delta=True))
    return detokenizer.output_text, deltas


@pytest.mark.parametrize("wrap", [False, True], ids=["stream", "window"])
@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("text", TEXTS)
def test_streamed_text_equals_full_decode(name: str, text: str, wrap: bool) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text).ids
    for cut in {0, 1, len(ids) // 3, len(ids) // 2}:
        prompt, output = ids[:cut], ids[cut:]
        before = tokenizer.decode(prompt)
        full = tokenizer.decode(ids)
        if not full.startswith(before):
            continue  # the prompt ends inside a character
        got, deltas = stream(Wrapped(tokenizer) if wrap else tokenizer, prompt, output)
        assert got == full[len(before) :] == "".join(deltas)


@pytest.fixture(scope="module")
def smollm2() -> Any:
    return get_tokenizer(resolve_model("smollm2-135m"))


@pytest.mark.parametrize("wrap", [False, True], ids=["stream", "window"])
def test_a_real_tokenizer_streams_whole_characters(smollm2: Any, wrap: bool) -> None:
    for text in TEXTS:
        ids = smollm2.encode(text)
        tokenizer = Wrapped(smollm2) if wrap else smollm2
        got, deltas = stream(tokenizer, [], ids, skip_special_tokens=False)
        assert got == text == "".join(deltas)
        assert not any("\ufffd" in delta for delta in deltas)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_random_tokens_stream_like_the_window(name: str) -> None:
    """Bytes that form no character included: both decoders agree with the full text."""
    tokenizer, rng = TOKENIZERS[name], random.Random(0)
    for _ in range(200):
        ids = [rng.randrange(3, tokenizer.get_vocab_size()) for _ in range(40)]
        got, deltas = stream(tokenizer, [], ids)
        assert got == "".join(deltas)
        assert got == stream(Wrapped(tokenizer), [], ids)[0]


def test_unfinished_character_comes_out_at_the_end() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("ok 😀").ids[:-1]
    got, deltas = stream(tokenizer, [], ids)
    assert got == tokenizer.decode(ids) == "".join(deltas)
    assert "\ufffd" not in "".join(deltas[:-1])


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens_follow_the_parameter(skip: bool) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("<|im_start|>hi<|im_end|> there<|im_end|>").ids
    got, _ = stream(tokenizer, [], ids, skip_special_tokens=skip)
    assert got == tokenizer.decode(ids, skip_special_tokens=skip)
    assert ("<|im_end|>" in got) is not skip


@pytest.mark.parametrize("include", [True, False])
def test_stop_token_has_no_text_unless_included(include: bool) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("abc").ids
    detokenizer = IncrementalDetokenizer.from_new_request(
        tokenizer, None, SamplingParams(include_stop_str_in_output=include)
    )
    detokenizer.update(ids[:-1], stop_terminated=False)
    detokenizer.update(ids[-1:], stop_terminated=True)
    detokenizer.finish()
    expected = ids if include else ids[:-1]
    assert detokenizer.output_text == tokenizer.decode(expected)
    assert detokenizer.token_ids == ids


@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("stop", ["fox", "n f", "own fox jumps", "q", "dog."])
def test_stop_strings_across_tokens(stop: str, include: bool) -> None:
    tokenizer, text = TOKENIZERS["byte_level"], TEXTS[0]
    ids = tokenizer.encode(text).ids
    got, deltas = stream(
        tokenizer, [], ids, stop=stop, include_stop_str_in_output=include
    )
    end = text.index(stop) + (len(stop) if include else 0)
    assert got == text[:end] == "".join(deltas)


def test_no_prefix_of_a_stop_string_is_shown_before_it_is_refuted() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = [t for c in "aab ENX END tail" for t in tokenizer.encode(c).ids]
    got, deltas = stream(tokenizer, [], ids, stop=["END"])
    shown = ""
    for delta in deltas:
        shown += delta
        assert not shown.endswith(("E", "EN"))
    assert got == shown == "aab ENX "


def test_held_back_text_is_shown_when_the_request_ends() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("value EN").ids
    got, deltas = stream(tokenizer, [], ids, stop=["END"])
    assert got == "value EN" == "".join(deltas)


def test_cumulative_text_holds_back_too() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    detokenizer = IncrementalDetokenizer.from_new_request(
        tokenizer, None, SamplingParams(stop=["END"])
    )
    detokenizer.update(tokenizer.encode("x EN").ids, stop_terminated=False)
    assert detokenizer.get_next_output_text(finished=False, delta=False) == "x "
    assert detokenizer.get_next_output_text(finished=True, delta=False) == "x EN"


def test_min_tokens_let_stop_strings_pass() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = [t for c in "a.b.c.d" for t in tokenizer.encode(c).ids]
    got, _ = stream(tokenizer, [], ids, stop=["."], min_tokens=5)
    assert got == "a.b.c"


def test_the_earliest_stop_string_wins() -> None:
    assert find_stop("one two three", 0, ["three", "two"]) == (4, "two")
    assert find_stop("one two", 6, ["one", "two"]) == (4, "two")
    assert find_stop("one two", 7, ["one", "two"]) is None


def test_without_tokenizer_tokens_are_kept_and_text_is_empty() -> None:
    for tokenizer, params in [
        (None, SamplingParams()),
        (TOKENIZERS["byte_level"], SamplingParams(detokenize=False)),
    ]:
        detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, [1], params)
        assert detokenizer.update([5, 6], stop_terminated=False) is None
        detokenizer.finish()
        assert detokenizer.token_ids == [5, 6]
        assert detokenizer.get_next_output_text(True, delta=False) == ""


def test_a_stream_that_gives_up_goes_on_as_a_window() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    pieces = StreamPieces(tokenizer, [], True)
    ids = tokenizer.encode(TEXTS[2]).ids
    got = "".join(pieces.step(i) for i in ids[:10])

    class Broken:
        def step(self, *_: Any) -> str:
            raise ValueError("Invalid prefix encountered")

    pieces._stream = Broken()
    got += "".join(pieces.step(i) for i in ids[10:]) + pieces.flush()
    assert got == TEXTS[2]
    assert isinstance(pieces._fallback, WindowPieces)
