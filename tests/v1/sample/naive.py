"""Independent references: one row at a time, in plain Python and float64."""

import math

import torch

from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata


def metadata(num_rows: int, vocab_size: int, **changes) -> SamplingMetadata:
    """Metadata of greedy requests with nothing special."""
    defaults = {
        "temperature": None,
        "all_greedy": True,
        "all_random": False,
        "top_p": None,
        "top_k": None,
        "generators": {},
        "max_num_logprobs": None,
        "no_penalties": True,
        "prompt_token_ids": None,
        "frequency_penalties": torch.zeros(num_rows),
        "presence_penalties": torch.zeros(num_rows),
        "repetition_penalties": torch.ones(num_rows),
        "output_token_ids": [[] for _ in range(num_rows)],
        "allowed_token_ids_mask": None,
        "bad_words_token_ids": {},
        "logitsprocs": LogitsProcessors(),
    }
    return SamplingMetadata(**{**defaults, **changes})


def softmax(row: list[float]) -> list[float]:
    top = max(row)
    weights = [math.exp(x - top) for x in row]
    total = sum(weights)
    return [w / total for w in weights]


def kept_tokens(row: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """Tokens that survive min-p, top-k and top-p of one row of distinct logits."""
    probs = softmax(row)
    best = max(probs)
    order = sorted(range(len(row)), key=lambda t: -row[t])
    order = [t for t in order if probs[t] >= min_p * best]
    order = order[:top_k] if top_k > 0 else order
    total = sum(probs[t] for t in order)
    kept, mass = set(), 0.0
    for token in order:
        kept.add(token)
        mass += probs[token]
        if mass >= top_p * total:
            break
    return kept


def penalised(
    row: list[float],
    prompt: list[int],
    output: list[int],
    presence: float,
    frequency: float,
    repetition: float,
) -> list[float]:
    result = list(row)
    for token in set(prompt) | set(output):
        logit = result[token]
        result[token] = logit / repetition if logit > 0 else logit * repetition
    for token in set(output):
        result[token] -= frequency * output.count(token) + presence
    return result
