"""What a check of `pdrt doctor` found: fine, worth knowing, or wrong, with advice."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    FINE = "ok"
    NOTE = "note"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Finding:
    verdict: Verdict
    what: str
    advice: str = ""


def fine(what: str) -> Finding:
    return Finding(Verdict.FINE, what)


def note(what: str, advice: str = "") -> Finding:
    return Finding(Verdict.NOTE, what, advice)


def wrong(what: str, advice: str) -> Finding:
    return Finding(Verdict.WRONG, what, advice)
