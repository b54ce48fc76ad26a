"""Merges found by hashes are those found by trying every cut."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.transformers_utils import gguf_merges
from vllm.transformers_utils.gguf_merges import ways_to_merge


def by_trying(tokens: list[str], wanted: list[bool]) -> list[tuple[int, int, int]]:
    ids = {token: i for i, token in enumerate(tokens)}
    return [
        (whole, ids[token[:cut]], ids[token[cut:]])
        for whole, token in enumerate(tokens)
        if wanted[whole]
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    ]


def found(tokens: list[str], wanted: list[bool]) -> list[tuple[int, int, int]]:
    columns = ways_to_merge(tokens, np.asarray(wanted, bool))
    return list(zip(*(column.tolist() for column in columns), strict=True))


@given(
    st.lists(
        st.tuples(st.text("ab\0é𐍈", max_size=6), st.booleans()), min_size=1, max_size=60
    )
)
def test_every_way_is_found_in_order(given_tokens: list[tuple[str, bool]]) -> None:
    tokens = [token for token, _ in given_tokens]
    wanted = [want for _, want in given_tokens]
    assert found(tokens, wanted) == by_trying(tokens, wanted)


def test_parts_of_a_vocabulary_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    letters = "abc"
    tokens = [a + b + c for a in ["", *letters] for b in letters for c in letters]
    wanted = [len(token) > 2 or token < "b" for token in tokens]
    monkeypatch.setattr(gguf_merges, "_TOKENS_AT_ONCE", 5)
    assert found(tokens + list(letters), wanted + [True] * 3) == by_trying(
        tokens + list(letters), wanted + [True] * 3
    )


@pytest.mark.parametrize(
    "tokens", [[""], ["a"], ["", "a", "aa"], ["\ud800", "\ud800a", "a"]]
)
def test_short_and_strange_tokens_are_tokens(tokens: list[str]) -> None:
    wanted = [True] * len(tokens)
    assert found(tokens, wanted) == by_trying(tokens, wanted)
