"""Forbids the last token of a word when the output already ends with its beginning."""

import torch


def apply_bad_words(
    logits: torch.Tensor,
    bad_words_token_ids: dict[int, list[list[int]]],
    past_tokens_ids: list[list[int]],
) -> None:
    """Sets forbidden logits to -inf in place.

    `bad_words_token_ids` maps a row to its words, each a list of token ids.
    """
    rows: list[int] = []
    tokens: list[int] = []
    for row, words in bad_words_token_ids.items():
        past = past_tokens_ids[row]
        for word in words:
            start = len(past) - len(word) + 1
            if start >= 0 and past[start:] == word[:-1]:
                rows.append(row)
                tokens.append(word[-1])
    if rows:
        logits[rows, tokens] = -float("inf")
