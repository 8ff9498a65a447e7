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
        self.text: list[str] = []
        self.calls: list[CallPiece] = []
        self.held = ""
        self.begun = self.ended = 0
        self.is_open = False  # within a call that has been told

    def read(self) -> Asking:
        """One character."""
        char = yield
        if not char:
            raise Ended
        if not self.is_open:
            self.held += char
        return char

    def read_solid(self) -> Asking:
        """The next one that is no white space."""
        while (char := (yield from self.read())) in SPACE:
            pass
        return char

    def is_text(self) -> None:
        """What was held is no call."""
        if self.held:
            self.text.append(self.held)
            self.held = ""

    def begin(self, name: str) -> None:
        self.calls.append(CallPiece(self.begun, self._id_of(self.begun), name))
        self.begun += 1
        self.is_open, self.held = True, ""

    def argue(self, text: str) -> None:
        last = self.calls[-1] if self.calls else None
        if last is not None and last.index == self.begun - 1:
            self.calls[-1] = replace(last, arguments=last.arguments + text)
        else:
            self.calls.append(CallPiece(self.begun - 1, arguments=text))

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
        return self._told()

    def rest(self) -> tuple[str, Sequence[CallPiece]]:
        """The same when the text has ended."""
        if not self._is_over:
            self._is_over = True
            with suppress(Ended):
                self._reading.send("")
        sink = self._sink
        if self.is_done or (self.has_called and not sink.held.strip()):
            sink.held = ""  # what stands between calls
        sink.is_text()
        return self._told()

    def _told(self) -> tuple[str, Sequence[CallPiece]]:
        sink = self._sink
        text, calls = "".join(sink.text), sink.calls
        sink.text, sink.calls = [], []
        return text, calls


def joined(pieces: Sequence[CallPiece]) -> list[CallPiece]:
    """One piece a call, in their order."""
    found: list[CallPiece] = []
    for piece in pieces:
        if found and found[-1].index == piece.index:
            found[-1] = replace(found[-1], arguments=found[-1].arguments + piece.arguments)
        else:
            found.append(piece)
    return found


def call_id(answer: str, form: ToolFormat, index: int) -> str:
    """The same whenever it is asked for: an answer may be taken up by another instance."""
    digest = hashlib.sha256(f"{answer}/{index}".encode()).hexdigest()
    return digest[:9] if form.has_short_ids else f"call_{digest[:24]}"
