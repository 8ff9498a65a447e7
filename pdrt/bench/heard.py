"""What one streamed answer told and when: server-sent events, read after the run.

While a load runs its client keeps the bytes and when they came; to parse them at once would cost
it time that the next token's would be counted with.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, NamedTuple, TypeAlias

from pdrt.control.http import error_from_answer

Json: TypeAlias = Mapping[str, Any]
_DONE: Final = b"[DONE]"


class Piece(NamedTuple):
    """Bytes as they came."""

    at: float
    data: bytes


@dataclass(slots=True)
class Record:
    """One request as its client saw it. Seconds; `ended` is 0 where it was left."""

    began: float
    ended: float = 0.0
    pieces: list[Piece] = field(default_factory=list)
    failure: str = ""  # a code
    reason: str = ""  # for a person

    def fail(self, code: str, reason: str) -> None:
        self.failure, self.reason = code, reason


@dataclass(slots=True)
class Told:
    """What an answer said; `at` is when each event with new tokens was here."""

    began: float
    ended: float = 0.0
    at: list[float] = field(default_factory=list)
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    over_at: float = 0.0  # when it said that it was over
    failure: str = ""
    reason: str = ""

    @property
    def ttft_s(self) -> float | None:
        return self.at[0] - self.began if self.at else None

    @property
    def e2e_s(self) -> float:
        return self.ended - self.began

    @property
    def gaps_s(self) -> list[float]:
        """Between one event with tokens and the next: the inter-token latencies."""
        return [after - before for before, after in pairwise(self.at)]

    @property
    def per_token_s(self) -> float | None:
        """The mean time of a token after the first."""
        if self.tokens < 2 or len(self.at) < 2:
            return None
        return (self.at[-1] - self.at[0]) / (self.tokens - 1)


def told_by(record: Record) -> Told:
    """An answer that ended before it said so is a failure, as is one without a token."""
    told = Told(record.began, record.ended, failure=record.failure, reason=record.reason)
    if not told.failure:
        for at, data in events(record.pieces):
            _read(told, at, data)
    if told.tokens and not told.at:  # none of them had a text
        told.at = [told.over_at]
    told.tokens = told.tokens or len(told.at)
    if record.ended and not told.failure and not told.over_at:
        told.failure, told.reason = "cut_off", "the stream ended before the answer did"
    if record.ended and not told.failure and not told.at:
        told.failure, told.reason = "no_tokens", "the answer had no token"
    return told


class Said(NamedTuple):
    """An answer's content; a server that tells text only has no ids."""

    text: str
    ids: tuple[int, ...]


def said_in(record: Record) -> Said | None:
    """None of an answer that failed."""
    if told_by(record).failure:
        return None
    texts, ids = list[str](), list[int]()
    for _, data in events(record.pieces):
        event: Json = {} if data == _DONE else json.loads(data)
        if "output_ids" in event:
            texts.append(str(event.get("output") or ""))
            ids += event["output_ids"]
        else:
            texts += [str(choice.get("text") or "") for choice in event.get("choices") or ()]
    return Said("".join(texts), tuple(ids))


def events(pieces: Iterable[Piece]) -> Iterator[tuple[float, bytes]]:
    """Each `data:` and when the last byte of its line was here, however the bytes were cut."""
    rest, at = b"", 0.0
    for at, data in pieces:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield at, line[5:].strip()
    if rest.startswith(b"data:"):
        yield at, rest[5:].strip()


def _read(told: Told, at: float, data: bytes) -> None:
    if data == _DONE or told.failure:
        return
    try:
        event: Json = json.loads(data)
        if event.get("error"):
            error = error_from_answer(500, data, "stream")
            told.failure, told.reason = error.code, str(error)
        elif "output_ids" in event:
            _read_generate(told, at, event)
        else:
            _read_completion(told, at, event)
    except (ArithmeticError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
        told.failure = "bad_answer"
        told.reason = f"no event of a completion: {data[:100].decode(errors='replace')}"


def _read_generate(told: Told, at: float, event: Json) -> None:
    """pdrt's own dialect: ids, so that a token counts whose text is not whole yet."""
    ids = event["output_ids"]
    if not isinstance(ids, list) or not all(isinstance(each, int) for each in ids):
        raise TypeError("output_ids are no list of numbers")
    if ids:
        told.at.append(at)
    if event["finish_reason"]:
        told.over_at = at
    _read_usage(told, event.get("usage") or {})


def _read_completion(told: Told, at: float, event: Json) -> None:
    for choice in event.get("choices") or ():
        if choice.get("text"):
            told.at.append(at)
        if choice.get("finish_reason"):
            told.over_at = at
    _read_usage(told, event.get("usage") or {})


def _read_usage(told: Told, usage: Json) -> None:
    told.tokens = int(usage.get("completion_tokens") or told.tokens)
    told.prompt_tokens = int(usage.get("prompt_tokens") or told.prompt_tokens)
    details = usage.get("prompt_tokens_details") or usage
    told.cached_tokens = int(details.get("cached_tokens") or told.cached_tokens)
