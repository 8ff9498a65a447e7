"""What a check is, and how it ends: well, not as expected, or not served at all."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from pdrt.conformance.endpoint import Endpoint

Verdict: TypeAlias = Literal["pass", "FAIL", "not supported", "not compared"]
Run: TypeAlias = Callable[[Endpoint], Awaitable[object]]
_NEAR: Final = 1e-3  # log-probabilities may differ by rounding
_SHOWN: Final = 160


class Failed(Exception):
    """An answer is not what it must be."""


class NotServed(Exception):
    """The server does not have what the check is about."""


@dataclass(frozen=True, slots=True)
class Check:
    """`run` returns what two servers are compared by, if they are."""

    group: str
    name: str
    run: Run
    is_compared: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    check: str
    group: str
    endpoint: str
    verdict: Verdict
    why: str = ""
    told: object = None


def must(holds: bool, expected: str, got: object) -> None:
    """Raises Failed."""
    if not holds:
        raise Failed(f"expected {expected}, got {shown(got)}")


def same(expected: object, got: object, what: str) -> None:
    """Raises Failed."""
    if expected != got:
        raise Failed(f"{what}: expected {shown(expected)}, got {shown(got)}")


def shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def alike(one: object, other: object) -> bool:
    """Equal but for rounding of numbers with a fraction."""
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= _NEAR
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(alike(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(alike(a, b) for a, b in pairs)
    return one == other


def compared(checks: Sequence[Check], results: Sequence[Sequence[Result]]) -> list[list[Result]]:
    """For each check that two servers can be compared by: a result for each but the first."""
    found = list[list[Result]]()
    for check, row in zip(checks, results, strict=True):
        if check.is_compared and len(row) > 1:
            first, *others = row
            found.append([_against(check, first, other) for other in others])
    return found


def _against(check: Check, first: Result, other: Result) -> Result:
    name = f"{check.group}: {check.name}"
    if not first.verdict == other.verdict == "pass":
        who = first if first.verdict != "pass" else other
        why = f"{who.endpoint}: {who.verdict}"
        return Result(name, "equality", other.endpoint, "not compared", why)
    if alike(first.told, other.told):
        return Result(name, "equality", other.endpoint, "pass")
    why = f"{first.endpoint} says {shown(first.told)}, {other.endpoint} {shown(other.told)}"
    return Result(name, "equality", other.endpoint, "FAIL", why)
