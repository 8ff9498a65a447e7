"""What each fault may lead to, and whether that was kept: the bounds of promise 2, as plain data.

Every request ends soon and truthfully: within 2 s of the fault (of the deadline, where a deadline
is all that can tell), as a typed JSON error or whole, never as HTTP 200 with an error inside, and
with both legs let go within 2 s more.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Final, Literal

from pdrt.bench.faults_client import Got

BOUND_S: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """How a row may end."""

    statuses: Collection[int] = (200,)
    codes: Collection[str] = ()  # of a typed error; empty: any
    ends: Literal["said", "error event", "left"] = "said"  # left: the client did not wait
    waits: Literal["no", "deadline", "slow reader", "upload"] = "no"  # what the fault must wait for
    retry_after: str = ""  # what Retry-After must say; empty: anything, with 429


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the router was told, in seconds; and whether its answers have pdrt's headers."""

    deadline_s: float
    slow_reader_s: float = 30.0
    upload_s: float = 30.0
    is_pdrt: bool = True

    def answer_s(self, want: Want) -> float:
        waits = {
            "no": 0.0,
            "deadline": self.deadline_s,
            "slow reader": self.slow_reader_s,
            "upload": self.upload_s,
        }
        return BOUND_S + waits[want.waits]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one row led to."""

    got: Got
    released_s: float | None  # None: a leg is still at work
    well_s: float | None  # until a good request was served again; None: none was


def broken(want: Want, outcome: Outcome, limits: Limits) -> list[str]:
    """The bounds that were not kept, in words."""
    has_left = "left" in (want.ends, outcome.got.end)  # then nothing is known of its end
    found = [] if has_left else list(_answer(want, outcome.got, limits))
    found += [outcome.got.problem] if outcome.got.problem else []
    released = outcome.released_s
    if released is None or released > BOUND_S:
        told = "never" if released is None else f"after {released:.1f} s"
        found.append(f"legs let go {told}, wanted within {BOUND_S:g} s")
    if outcome.well_s is None:
        found.append("no good request is served afterwards")
    return found


def _answer(want: Want, got: Got, limits: Limits) -> Iterator[str]:
    within = limits.answer_s(want)
    if got.end == "silent" or got.total_s > within:
        yield (
            f"no answer within {within:.1f} s"
            if got.end == "silent"
            else (f"answered after {got.total_s:.1f} s, wanted within {within:.1f} s")
        )
    if got.end in ("reset", "cut", "refused"):
        yield f"the answer is {got.end}"
    if got.status and got.status not in want.statuses:
        yield f"status {got.status}, wanted {' or '.join(map(str, want.statuses))}"
    if got.status >= 400:
        yield from _refusal(want, got)
    elif got.status:
        yield from _good(want, got)
    elif got.end == "whole":
        yield f"no HTTP answer: {got.body[:60]!r}"
    if limits.is_pdrt and got.status:
        missing = [name for name in ("x-request-id", "x-pd-path") if not got.headers.get(name)]
        yield from (f"no {name}" for name in missing)


def _refusal(want: Want, got: Got) -> Iterator[str]:
    error = got.error
    if not got.headers.get("content-type", "").startswith("application/json"):
        yield f"no JSON: {got.headers.get('content-type', 'no content-type')}"
    elif error is None or not isinstance(error.get("code"), str) or not error.get("message"):
        yield f"no typed error: {got.body[:80]!r}"
    elif want.codes and error["code"] not in want.codes:
        yield f"code {error['code']}, wanted {' or '.join(want.codes)}"
    told = got.headers.get("retry-after", "")
    if got.status == 429 and (not told or (want.retry_after and told != want.retry_after)):
        yield f"Retry-After {told or 'missing'}, wanted {want.retry_after or 'one'}"


def _good(want: Want, got: Got) -> Iterator[str]:
    if not got.is_stream:
        if want.ends == "error event":
            yield "no stream, wanted one that ends with an error event"
        if problem := _inside(got.body):
            yield problem
        return
    error = got.error
    if want.ends == "error event" and error is None:
        yield "the stream says nothing of the fault" if got.is_done else "the stream just ends"
    elif want.ends == "said" and error is not None:
        yield f"the stream ends with {error.get('code')}"
    elif error is None and not got.is_done:
        yield "the stream just ends, without [DONE]"
    if error is not None and not isinstance(error.get("code"), str):
        yield "the stream's error is not typed"


def _inside(body: bytes) -> str:
    """What is wrong with a good answer's JSON."""
    try:
        told = json.loads(body)
    except ValueError:
        return f"status 200 with what is no JSON: {body[:60]!r}"
    if not isinstance(told, dict) or told.get("error"):
        return "status 200 with an error inside"
    return ""
