"""Tool calls out of an answer's text, as it grows, in the words of the model's own format.

The promise: what is told is the same however the text was cut; a call that has been begun is
never text; what turns out not to be a call is, every character of it. A call must name a tool that
was offered. Its arguments are told as the model writes them, so an answer that ends at its
length may end within them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

SPACE: Final = frozenset(" \t\r\n")

Reading: TypeAlias = Generator[None, str, None]  # is sent characters, "" at the end
Asking: TypeAlias = Generator[None, str, str]
Trying: TypeAlias = Generator[None, str, bool]


@dataclass(frozen=True, slots=True)
class CallPiece:
    """What call `index` gains: `id` and `name` once, at its beginning; then its arguments."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes calls. `markers` are told though they may be special tokens."""

    name: str
    read: Callable[[Sink], Reading]
    markers: tuple[str, ...] = ()
    has_short_ids: bool = False  # nine characters, which its template asks for


class Ended(Exception):
    """There is no more text."""


class Sink:
    """What the readers below have found. What they are not sure of yet is `held`."""

    def __init__(self, names: Collection[str], id_of: Callable[[int], str]) -> None:
        self.names, self._id_of = names, id_of
        self._text: list[str] = []
        self._calls: list[CallPiece] = []
        self._arguments: list[str] = []  # of the call that was begun last
        self.held: list[str] = []
        self.begun = self.ended = 0
        self.is_open = False  # within a call that has been told

    def read(self) -> Asking:
        """One character."""
        char = yield
        if not char:
            raise Ended
        if not self.is_open:
            self.held.append(char)
        return char

    def read_solid(self) -> Asking:
        """The next one that is no white space."""
        while (char := (yield from self.read())) in SPACE:
            pass
        return char

    def is_text(self) -> None:
        """What was held is no call."""
        self._text += self.held
        self.held.clear()

    def begin(self, name: str) -> None:
        self._settle()
        self._calls.append(CallPiece(self.begun, self._id_of(self.begun), name))
        self.begun += 1
        self.is_open = True
        self.held.clear()

    def argue(self, text: str) -> None:
        self._arguments.append(text)

    def taken(self) -> tuple[str, Sequence[CallPiece]]:
        """What was found since it was asked for last."""
        self._settle()
        text, calls = "".join(self._text), joined(self._calls)
        self._text, self._calls = [], []
        return text, calls

    def _settle(self) -> None:
        if self._arguments:
            arguments = "".join(self._arguments)
            self._calls.append(CallPiece(self.begun - 1, arguments=arguments))
            self._arguments = []

    def tell(self, name: str, arguments: str) -> None:
        """A call as a whole, unless it is being told already."""
        if not self.is_open:
            self.begin(name)
            self.argue(arguments)

    def end(self) -> bool:
        """Whether there was a call."""
        was_open, self.is_open = self.is_open, False
        self.ended += was_open
        return was_open


class ToolReader:
    """For one answer; with `only_one` it is done after the first call."""

    def __init__(self, form: ToolFormat, sink: Sink, *, only_one: bool = False) -> None:
        self._sink, self._only_one, self._is_over = sink, only_one, False
        self._reading = form.read(sink)
        next(self._reading)

    @property
    def has_called(self) -> bool:
        return self._sink.begun > 0

    @property
    def is_done(self) -> bool:
        """Nothing that follows is told."""
        return self._only_one and self._sink.ended > 0

    def feed(self, text: str) -> tuple[str, Sequence[CallPiece]]:
        """(the text that may be told now, what calls gained)."""
        for char in text:
            if self.is_done:
                break
            self._reading.send(char)
        return self._sink.taken()

    def rest(self) -> tuple[str, Sequence[CallPiece]]:
        """The same when the text has ended."""
        if not self._is_over:
            self._is_over = True
            with suppress(Ended):
                self._reading.send("")
        sink = self._sink
        if self.is_done or (self.has_called and not "".join(sink.held).strip()):
            sink.held.clear()  # what stands between calls
        sink.is_text()
        return sink.taken()


def joined(pieces: Sequence[CallPiece]) -> list[CallPiece]:
    """One piece a call, in their order."""
    firsts: dict[int, CallPiece] = {}
    arguments: dict[int, list[str]] = {}
    for piece in pieces:
        firsts.setdefault(piece.index, piece)
        arguments.setdefault(piece.index, []).append(piece.arguments)
    return [replace(first, arguments="".join(arguments[index])) for index, first in firsts.items()]


def call_id(answer: str, form: ToolFormat, index: int) -> str:
    """The same whenever it is asked for: an answer may be taken up by another instance."""
    digest = hashlib.sha256(f"{answer}/{index}".encode()).hexdigest()
    return digest[:9] if form.has_short_ids else f"call_{digest[:24]}"
