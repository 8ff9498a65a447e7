"""Who gets the next request: pure choices over loads that are counted at dispatch.

A load counts from the moment a request is sent, not from the first token: otherwise every
prompt of a burst goes to the same instance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from pdrt.config import PolicyName

K = TypeVar("K")


@dataclass(slots=True)
class Load:
    """What has been sent somewhere and has not ended."""

    requests: int = 0
    tokens: int = 0
    last: int = 0  # the turn in which it was chosen last; 0 = never

    def take(self, tokens: int) -> None:
        self.requests += 1
        self.tokens += tokens

    def give(self, tokens: int) -> None:
        self.requests -= 1
        self.tokens -= tokens


def _round_robin(load: Load) -> tuple[int, ...]:
    """Whose turn is longest ago: fair also while members come and go."""
    return (load.last,)


def _least_loaded(load: Load) -> tuple[int, ...]:
    return load.tokens, load.requests, load.last


_ORDER: Final[Mapping[PolicyName, Callable[[Load], tuple[int, ...]]]] = {
    "round_robin": _round_robin,
    "least_loaded": _least_loaded,
}


def choose(policy: PolicyName, loads: Mapping[K, Load]) -> K:
    """The key to take; among equals the first one listed. `loads` must not be empty."""
    order = _ORDER[policy]
    return min(loads, key=lambda key: order(loads[key]))


def weight_of(prompt: object, max_tokens: int = 0) -> int:
    """Tokens that a request will hold, as well as can be told without its tokenizer."""
    return max(1, _tokens_in(prompt)) + max_tokens


def _tokens_in(prompt: object) -> int:
    if isinstance(prompt, str):
        return len(prompt) // 4
    if isinstance(prompt, list):
        if all(isinstance(item, int) for item in prompt):
            return len(prompt)
        return sum(_tokens_in(item) for item in prompt)
    if isinstance(prompt, dict):  # a chat message
        return _tokens_in(prompt.get("content"))
    return 0
