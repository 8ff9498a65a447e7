"""One answer as it grows: a worker's outputs become text, ids, counts and times.

The promise: text, ids and usage are the same however the outputs were grouped, and nothing
counts that came after the answer's end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pdrt.control.detokenize import Pieces, StopScanner
from pdrt.control.http import Json
from pdrt.messages import Finish, Output


@dataclass(frozen=True, slots=True)
class Delta:
    """What one output added; `finish` is set on the last."""

    text: str
    ids: tuple[int, ...]
    finish: Finish | None = None


@dataclass(slots=True)
class Times:
    """Seconds on the leader's clock; zero until known."""

    arrived: float
    tokenised: float = 0.0
    first: float = 0.0
    last: float = 0.0

    def json(self) -> Json:
        marks = {"tokenise": self.tokenised, "first_token": self.first, "total": self.last}
        return {name: round((at - self.arrived) * 1000, 3) for name, at in marks.items() if at}


@dataclass(slots=True)
class Answer:
    prompt_tokens: int
    pieces: Pieces
    scanner: StopScanner
    times: Times
    ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    cached_tokens: int = 0
    finish: Finish | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def usage(self) -> Json:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": len(self.ids),
            "cached_tokens": self.cached_tokens,
        }

    def take(self, output: Output, now: float) -> Delta:
        """Add what a worker said. After `finish` nothing may be added."""
        assert self.finish is None, "the answer has ended"
        if output.tokens and not self.times.first:
            self.times.first = now
        self.times.last = now
        self.cached_tokens = min(max(self.cached_tokens, output.cached_tokens), self.prompt_tokens)
        delta = self._add(output)
        self.texts.append(delta.text)
        self.finish = delta.finish
        return delta

    def _add(self, output: Output) -> Delta:
        spoken, silent = _spoken(output)
        text: list[str] = []
        for index, token in enumerate(spoken):
            said, is_stopped = self.scanner.feed(self.pieces.push(token))
            text.append(said)
            if is_stopped:
                return self._delta(text, spoken[: index + 1], "stop")
        if output.finish is None:
            return self._delta(text, spoken, None)
        said, is_stopped = self.scanner.feed(self.pieces.flush())
        text += (said, "" if is_stopped else self.scanner.rest())
        is_length = output.finish == "length" and not is_stopped
        return self._delta(text, (*spoken, *silent), "length" if is_length else "stop")

    def _delta(self, text: list[str], ids: Sequence[int], finish: Finish | None) -> Delta:
        self.ids += ids
        return Delta("".join(text), tuple(ids), finish)


def _spoken(output: Output) -> tuple[Sequence[int], Sequence[int]]:
    """The tokens that are text, and the one that said stop, which is only an id."""
    if output.finish == "stop":
        return output.tokens[:-1], output.tokens[-1:]
    return output.tokens, ()
