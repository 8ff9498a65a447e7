"""Choices among loads: pure, fair, and counted at dispatch."""

from __future__ import annotations

import random

import pytest

from pdrt.config import PolicyName
from pdrt.control.policy import Load, choose, weight_of


def _run(policy: PolicyName, loads: dict[str, Load], weights: list[int]) -> list[str]:
    picked = []
    for turn, weight in enumerate(weights, start=1):
        name = choose(policy, loads)
        loads[name].take(weight)
        loads[name].last = turn
        picked.append(name)
    return picked


def test_round_robin_takes_turns_whatever_the_load() -> None:
    loads = {name: Load() for name in "abc"}
    assert _run("round_robin", loads, [9, 1, 1, 1, 1, 1]) == list("abcabc")


def test_round_robin_serves_a_newcomer_next() -> None:
    loads = {name: Load() for name in "ab"}
    _run("round_robin", loads, [1, 1, 1])
    loads["c"] = Load()
    assert choose("round_robin", loads) == "c"


def test_least_loaded_evens_out_tokens() -> None:
    """CASES 73, and SPEC's bound for a skewed mix."""
    rng = random.Random(5)
    loads = {name: Load() for name in "abcd"}
    weights = [min(4000, int(rng.paretovariate(1.2) * 100)) for _ in range(400)]
    _run("least_loaded", loads, weights)
    tokens = [load.tokens for load in loads.values()]
    assert max(tokens) / min(tokens) <= 1.3


def test_least_loaded_takes_turns_among_idle_ones() -> None:
    loads = {name: Load() for name in "abc"}
    picked = []
    for turn in range(1, 7):
        name = choose("least_loaded", loads)
        loads[name].last = turn
        picked.append(name)
    assert picked == list("abcabc")


def test_what_was_taken_is_given_back() -> None:
    load = Load()
    load.take(5)
    load.take(7)
    load.give(5)
    load.give(7)
    assert (load.requests, load.tokens) == (0, 0)


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ("", 1),
        ("x" * 400, 100),
        ([1, 2, 3], 3),
        (["x" * 40, "x" * 40], 20),
        ([{"role": "user", "content": "x" * 40}], 10),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}]}], 1),
        ({"content": None}, 1),
        (None, 1),
        (7, 1),
    ],
)
def test_a_prompts_weight_is_about_its_tokens(prompt: object, tokens: int) -> None:
    assert weight_of(prompt) == tokens
    assert weight_of(prompt, 16) == tokens + 16
