"""Presence, frequency and repetition penalties: touches only tokens that occurred."""

import itertools

import numpy as np
import torch


def _flat_positions(
    token_ids: list[list[int]], vocab_size: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """(row, row * V + token) of every token in the lists, int64 [N] each."""
    lengths = np.fromiter(map(len, token_ids), dtype=np.int64, count=len(token_ids))
    total = int(lengths.sum())
    rows = np.repeat(np.arange(len(token_ids), dtype=np.int64), lengths)
    tokens = np.fromiter(
        itertools.chain.from_iterable(token_ids), dtype=np.int64, count=total
    )
    known = (tokens >= 0) & (tokens < vocab_size)
    rows, tokens = rows[known], tokens[known]
    flat = torch.from_numpy(rows * vocab_size + tokens)
    return torch.from_numpy(rows).to(device), flat.to(device)


def _prompt_positions(
    prompt_token_ids: torch.Tensor, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = (prompt_token_ids < vocab_size).nonzero(as_tuple=True)
    return rows, rows * vocab_size + prompt_token_ids[rows, columns].long()


def apply_all_penalties(
    logits: torch.Tensor,
    prompt_token_ids: torch.Tensor | None,
    presence_penalties: torch.Tensor,
    frequency_penalties: torch.Tensor,
    repetition_penalties: torch.Tensor,
    output_token_ids: list[list[int]],
) -> torch.Tensor:
    """Penalises tokens in place; `logits` float32 [R, V] is contiguous.

    Repetition concerns tokens of prompt and output: a positive logit is divided by the
    penalty, a negative one multiplied. Then output tokens lose the frequency penalty
    per occurrence and the presence penalty once. Output ids outside the vocabulary are
    placeholders and are skipped.
    """
    vocab_size = logits.shape[1]
    flat = logits.view(-1)
    out_rows, out_flat = _flat_positions(output_token_ids, vocab_size, logits.device)
    seen_rows, seen_flat = out_rows, out_flat
    if prompt_token_ids is not None:
        rows, positions = _prompt_positions(prompt_token_ids, vocab_size)
        seen_rows = torch.cat((out_rows, rows))
        seen_flat = torch.cat((out_flat, positions))
    # A repeated token is read before anything is written, and written with one value.
    value, penalty = flat[seen_flat], repetition_penalties[seen_rows]
    flat[seen_flat] = torch.where(value > 0, value / penalty, value * penalty)
    unique, counts = torch.unique(out_flat, return_counts=True)
    rows = unique // vocab_size
    flat[unique] -= frequency_penalties[rows] * counts + presence_penalties[rows]
    return logits
