"""Few cases out of a large grid, so that every two values still meet."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Case = dict[str, Any]


def _always(case: Case) -> bool:
    return True


def grid(
    factors: Mapping[str, Sequence[Any]], allowed: Callable[[Case], bool] = _always
) -> Iterator[Case]:
    """Every allowed combination, as a dict by the factors' names."""
    for values in product(*factors.values()):
        case = dict(zip(factors, values, strict=True))
        if allowed(case):
            yield case


def pairwise(
    factors: Mapping[str, Sequence[Any]], allowed: Callable[[Case], bool] = _always
) -> list[Case]:
    """Allowed combinations in which all pairs of values occur that can occur at all.

    Greedy: a case is kept if none before it brings as many new pairs of the first pair
    that is still missing. The same factors give the same cases.
    """
    cases = list(grid(factors, allowed))
    pairs = [_pairs(case) for case in cases]
    missing = dict.fromkeys(pair for of_case in pairs for pair in of_case)
    holders: dict[Any, list[int]] = {pair: [] for pair in missing}
    for i, of_case in enumerate(pairs):
        for pair in of_case:
            holders[pair].append(i)
    kept = []
    while missing:
        wanted = next(iter(missing))
        best = max(
            holders[wanted], key=lambda i: sum(pair in missing for pair in pairs[i])
        )
        kept.append(cases[best])
        for pair in pairs[best]:
            missing.pop(pair, None)
    return kept


def _pairs(case: Case) -> list[tuple[tuple[str, Any], tuple[str, Any]]]:
    return list(combinations(case.items(), 2))
