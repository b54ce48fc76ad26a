"""A pairwise choice is small and complete."""

from itertools import combinations

from tests.pairwise import grid, pairwise

FACTORS = {"a": [1, 2, 3, 4], "b": "xyz", "c": [True, False], "d": [0.5, 1.5, 2.5]}


def pairs(cases: list[dict]) -> set:
    return {pair for case in cases for pair in combinations(case.items(), 2)}


def allowed(case: dict) -> bool:
    return not (case["a"] == 1 and case["b"] == "x")


def test_every_allowed_pair_occurs_in_few_cases() -> None:
    chosen = pairwise(FACTORS, allowed)
    assert all(allowed(case) for case in chosen)
    assert pairs(chosen) == pairs(list(grid(FACTORS, allowed)))
    assert 12 <= len(chosen) <= 18


def test_the_choice_is_stable() -> None:
    assert pairwise(FACTORS) == pairwise(FACTORS)
