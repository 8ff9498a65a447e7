"""Which prompts' beginnings were sent where: an index for many places, bounded, and about right.

A prompt is known by a chain of hashes, one for each prefix, 16 tokens apart at first and then by
a 32nd. All of them are noted, so that who knows a prefix knows each shorter one too, and the
longest known one is found by halving. A place is a bit. What has not been noted for long goes in
bulk: of two generations the older one is dropped when the younger one is full.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from pdrt.control.affinity import ends

_MOST: Final = 1 << 20  # bytes of a prompt that are looked at

Text: TypeAlias = str | bytes


class Prefixes:
    """What each place has been sent. Seats are taken once a life and given back after it."""

    def __init__(self, most: int = 1 << 18) -> None:
        self._half = most // 2
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}
        self._taken = 0
        self._resting: list[tuple[int, int]] = []  # (seat, the generation in which it is clean)
        self._generation = 0

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def take_seat(self) -> int:
        """A bit that nothing is known of."""
        while self._resting and self._resting[0][1] <= self._generation:
            self._taken &= ~self._resting.pop(0)[0]
        seat = ~self._taken & (self._taken + 1)
        self._taken |= seat
        return seat

    def give_seat(self, seat: int) -> None:
        """Nobody asks for it any more; it is used again when all that was noted of it is gone."""
        self._resting.append((seat, self._generation + 2))

    def note(self, keys: Sequence[int], seat: int) -> None:
        """This prompt was sent there."""
        young, old = self._young, self._old
        for key in keys:
            young[key] = young.get(key, 0) | old.get(key, 0) | seat
        if len(young) > self._half:
            self._young, self._old = {}, young
            self._generation += 1

    def lengths(self, keys: Sequence[int], seats: Sequence[int]) -> list[int]:
        """How many of these prefixes each place knows; it knows all of them up to that one."""
        if not keys or not self._seen(keys[0]):
            return [0] * len(seats)
        return [self._known(keys, seat) for seat in seats]

    def _known(self, keys: Sequence[int], seat: int) -> int:
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high) // 2
            if self._seen(keys[middle]) & seat:
                low = middle + 1
            else:
                high = middle
        return low

    def _seen(self, key: int) -> int:
        return self._young.get(key, 0) | self._old.get(key, 0)


def keys_of(prompt: object, salt: str = "") -> list[int]:
    """Of a prompt's prefixes, shortest first; none for what is shorter than 16 tokens or no prompt.

    They hold in this process only.
    """
    text = _text_of(prompt)[:_MOST]
    keys: list[int] = []
    before, key = 0, hash(salt)
    for end in ends(len(text)):
        key = hash((key, text[before:end]))
        keys.append(key)
        before = end
    return keys


def share_of(prompt: object, known: int) -> float:
    """How much of a prompt its first `known` prefixes are."""
    length = len(_text_of(prompt))
    return list(ends(min(length, _MOST)))[known - 1] / length if known else 0.0


def _text_of(prompt: object) -> Text:
    """Text as it is, tokens packed, the turns of a chat one after the other."""
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, Sequence) or not prompt:
        return b""
    if isinstance(prompt[0], int):
        try:
            return array("i", prompt[:_MOST]).tobytes()
        except (TypeError, OverflowError):  # a plain backend's business
            return b""
    say: Callable[[object], str] = str if isinstance(prompt[0], str) else _turn
    return "\0".join(map(say, prompt))


def _turn(turn: object) -> str:
    return json.dumps(turn, ensure_ascii=False, default=str)
