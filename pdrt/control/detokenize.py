"""Token ids to text, piece by piece, and the stop strings in it.

The promise: the pieces of an answer, put together, are the same text however its tokens were
grouped; half a character is held back until the rest is there; no piece contains any part of
a stop string that the answer ends with.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

REPLACEMENT: Final = "\ufffd"
_MAX_HELD: Final = 16  # tokens; a character has at most four bytes


class Pieces(Protocol):
    """The text of one answer as its tokens come; used once."""

    def push(self, token: int) -> str:
        """The text that is certain now; empty while a character is incomplete."""
        ...

    def flush(self) -> str:
        """What was held back, at the answer's end."""
        ...


class BytePieces:
    """For vocabularies whose every token is a run of bytes: exact, and cheap."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(self._bytes_of(token))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowPieces:
    """For any tokenizer: what a window of the last tokens decodes to, with and without the new.

    The window starts at a token boundary where the text was complete, so that spaces which a
    decoder strips at the start of a text are stripped on both sides of the comparison.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], is_silent: Callable[[int], bool]
    ) -> None:
        self._decode, self._is_silent = decode, is_silent
        self._ids: list[int] = []  # the window
        self._said = 0  # tokens of the window that are told
        self._text = ""  # what those decode to

    def push(self, token: int) -> str:
        if self._is_silent(token):
            return ""
        self._ids.append(token)
        held = len(self._ids) - self._said
        whole = self._decode(self._ids)
        if whole.endswith(REPLACEMENT) and held < _MAX_HELD:
            return ""
        return self._tell(whole)

    def flush(self) -> str:
        return self._tell(self._decode(self._ids)) if len(self._ids) > self._said else ""

    def _tell(self, whole: str) -> str:
        new = whole[len(self._text) :]
        if new:
            del self._ids[: self._said]
            self._said = len(self._ids)
            self._text = self._decode(self._ids)
        return new


class MarkedPieces:
    """Shows some special tokens, each as it is written; what is between them is decoded alone."""

    def __init__(self, fresh: Callable[[], Pieces], told: Mapping[int, str]) -> None:
        self._fresh, self._told = fresh, told
        self._pieces = fresh()

    def push(self, token: int) -> str:
        if token not in self._told:
            return self._pieces.push(token)
        rest, self._pieces = self._pieces.flush(), self._fresh()
        return rest + self._told[token]

    def flush(self) -> str:
        return self._pieces.flush()


class StopScanner:
    """Finds the stop string that is completed first; holds back what may become one.

    One Knuth-Morris-Pratt automaton for each stop string, so a character costs the same
    wherever the pieces are cut.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [(stop, _failures(stop)) for stop in stops]
        self._matched = [0] * len(self._stops)
        self._held = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """(what may be told now, whether a stop string is complete)."""
        if not self._stops:
            return text, False
        held = self._held + text
        seen = len(self._held)
        for at, char in enumerate(text, start=seen + 1):
            if length := self._step(char):
                self._held = ""
                return held[: at - length], True
        keep = max(self._matched)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep], False

    def rest(self) -> str:
        """What was held back, when the answer has ended without a stop string."""
        held, self._held = self._held, ""
        return held

    def _step(self, char: str) -> int:
        """Length of the longest stop string that this character completes, else 0."""
        found = 0
        for index, (stop, failures) in enumerate(self._stops):
            matched = self._matched[index]
            while matched and stop[matched] != char:
                matched = failures[matched - 1]
            matched += stop[matched] == char
            if matched == len(stop):
                found = max(found, matched)
                matched = failures[matched - 1]
            self._matched[index] = matched
        return found


def _failures(stop: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is its suffix too."""
    table = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[length] != stop[index]:
            length = table[length - 1]
        length += stop[length] == stop[index]
        table[index] = length
    return table
