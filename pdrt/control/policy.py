"""Who gets the next request: pure choices over loads that are counted at dispatch.

A load counts from the moment a request is sent, not from the first token: otherwise every
prompt of a burst goes to the same instance. Each policy gives each candidate a score, and the
lowest one wins, so that a choice can be told later by what the candidates had.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final, TypeAlias

from pdrt.config import PolicyName
from pdrt.control.prefixes import Prefixes, keys_of

# Who knows a prompt's beginning may have so many times the least load plus so many tokens, and so
# many times the least that anybody was given of late plus so many times the request's own tokens.
_NEAR: Final = 1.5
_NEAR_TOKENS: Final = 2048
_EVEN: Final = 1.3
_SPARE: Final = 4
_FADING: Final = 1 - 1 / 1024  # "of late" is about so many requests
_MASK: Final = (1 << 64) - 1

Score: TypeAlias = tuple[float, ...]


@dataclass(slots=True, eq=False)
class Load:
    """What has been sent somewhere and has not ended, and what sets the place apart."""

    requests: int = 0
    tokens: int = 0
    last: int = 0  # the turn in which it was chosen last; 0 = never
    elsewhere: int = 0  # tokens that it has beyond ours, as it said last
    scale: float = 1.0  # what a token weighs there: less in a larger pool
    mark: int = 0  # of its name, the same in every router
    seats: int = 0  # bits that stand for it in the index of prefixes
    given: float = 0.0  # tokens, of late: conversations that stay come back with more of them

    def take(self, tokens: int) -> None:
        self.requests += 1
        self.tokens += tokens

    def give(self, tokens: int) -> None:
        self.requests -= 1
        self.tokens -= tokens

    @property
    def total(self) -> float:
        return (self.tokens + self.elsewhere) * self.scale


@dataclass(slots=True)
class Ask:
    """What of a request matters for who serves it; `model` is empty when the client names none."""

    model: str = ""
    room: int = 0
    prompt: object = None  # as the client gave it
    weight: int = 1  # of its prompt, in tokens
    session: str = ""  # whoever has the same is served at the same place
    session_from: str = ""  # where that was read
    salt: str = ""  # prefixes are shared with those alone that have the same
    _keys: Sequence[int] | None = field(default=None, repr=False)
    _session_mark: int | None = field(default=None, repr=False)

    @property
    def keys(self) -> Sequence[int]:
        """Of its prompt's prefixes, shortest first; made when they are needed."""
        if self._keys is None:
            self._keys = keys_of(self.prompt, f"{self.model}\0{self.salt}")
        return self._keys

    def forget_prompt(self) -> None:
        """When all choices have been made: only the reasons are still of interest."""
        self.prompt, self._keys = None, ()

    @property
    def session_mark(self) -> int:
        if self._session_mark is None:
            self._session_mark = mark_of(self.session)
        return self._session_mark


@dataclass(slots=True)  # not frozen: that takes thrice as long to make, and requests wait
class Picked:
    """A choice among candidates: which one, and what decided."""

    at: int
    policy: PolicyName
    scores: Sequence[Score]

    def told(self, names: Sequence[str], ask: Ask) -> dict[str, object]:
        """For people: the policy, what it went by and each candidate's score."""
        fields = _FIELDS[self.policy]
        if self.policy == "consistent_hash" and not ask.session:
            fields = _FIELDS["least_loaded"]
        said: dict[str, object] = {
            "policy": self.policy,
            "chosen": names[self.at],
            "candidates": [
                {"name": name, **{f: round(v, 3) for f, v in zip(fields, score, strict=False)}}
                for name, score in zip(names, self.scores, strict=True)
            ],
        }
        if self.policy == "consistent_hash":
            said["key"] = ask.session_from or "none: least loaded"
        return said


def _room(loads: Sequence[Load], ask: Ask, _held: Prefixes) -> Sequence[Score]:
    scores: list[Score] = [(1.0,)] * len(loads)
    scores[ask.room % len(loads)] = (0.0,)
    return scores


def _round_robin(loads: Sequence[Load], _ask: Ask, _held: Prefixes) -> Sequence[Score]:
    """Whose turn is longest ago: fair also while members come and go."""
    return [(load.last,) for load in loads]


def _least_loaded(loads: Sequence[Load], _ask: Ask, _held: Prefixes) -> Sequence[Score]:
    return [((d.tokens + d.elsewhere) * d.scale, d.requests, d.last) for d in loads]


def _power_of_two(loads: Sequence[Load], ask: Ask, _held: Prefixes) -> Sequence[Score]:
    """The better of two that the room's random bits draw."""
    count = len(loads)
    one = ask.room % count
    other = (one + 1 + (ask.room >> 20) % (count - 1)) % count if count > 1 else one
    return [
        (float(place not in (one, other)), load.total, load.requests, load.last)
        for place, load in enumerate(loads)
    ]


def _consistent_hash(loads: Sequence[Load], ask: Ask, held: Prefixes) -> Sequence[Score]:
    """Rendezvous: a member that comes or goes moves its own share of the keys and no other."""
    if not ask.session:
        return _least_loaded(loads, ask, held)
    key = ask.session_mark
    return [(-_mixed(key ^ load.mark),) for load in loads]


def _prefix_aware(loads: Sequence[Load], ask: Ask, held: Prefixes) -> Sequence[Score]:
    """The longest known prefix among those near the least load, whatever the others have."""
    totals = [load.total for load in loads]
    near = _NEAR * min(totals) + max(ask.weight, _NEAR_TOKENS)
    fair = _EVEN * min([load.given for load in loads]) + _SPARE * ask.weight
    known = held.lengths(ask.keys, [load.seats for load in loads])
    scores = []
    for total, length, load in zip(totals, known, loads, strict=True):
        is_far = total > near or load.given > fair
        scores.append((float(is_far), float(-length), total, load.given, load.last))
    return scores


def note_given(loads: Sequence[Load], at: int, tokens: int) -> None:
    """One of these was chosen by what it knows."""
    for load in loads:
        load.given *= _FADING
    loads[at].given += tokens


_SCORES: Final[Mapping[PolicyName, Callable[[Sequence[Load], Ask, Prefixes], Sequence[Score]]]] = {
    "room": _room,
    "round_robin": _round_robin,
    "least_loaded": _least_loaded,
    "power_of_two": _power_of_two,
    "consistent_hash": _consistent_hash,
    "prefix_aware": _prefix_aware,
}
_FIELDS: Final[Mapping[PolicyName, Sequence[str]]] = {
    "room": ("is_not_rooms",),
    "round_robin": ("turn",),
    "least_loaded": ("tokens", "requests", "turn"),
    "power_of_two": ("is_not_drawn", "tokens", "requests", "turn"),
    "consistent_hash": ("minus_hash",),
    "prefix_aware": ("is_far_above_least", "minus_prefixes_known", "tokens", "of_late", "turn"),
}
_ANY: Final = Ask()
_NOTHING_HELD: Final = Prefixes(0)


def choose(
    policy: PolicyName, loads: Sequence[Load], ask: Ask = _ANY, held: Prefixes = _NOTHING_HELD
) -> Picked:
    """Which one to take; among equals the first one listed. `loads` must not be empty."""
    scores = _SCORES[policy](loads, ask, held)
    return Picked(scores.index(min(scores)), policy, scores)


def mark_of(text: str) -> int:
    """64 bits of a text, the same in every process."""
    return int.from_bytes(blake2b(text.encode(errors="replace"), digest_size=8).digest(), "little")


def _mixed(bits: int) -> int:
    """Every bit of the result hangs on all of these (splitmix64)."""
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & _MASK
    return bits ^ bits >> 31


def weight_of(prompt: object, max_tokens: int = 0) -> int:
    """Tokens that a request will hold, as well as can be told without its tokenizer."""
    return max(1, _tokens_in(prompt)) + max_tokens


def _tokens_in(prompt: object) -> int:
    if isinstance(prompt, str):
        return len(prompt) // 4
    if isinstance(prompt, list):
        if not prompt or isinstance(prompt[0], int):  # to look at each of many takes too long
            return len(prompt)
        return sum(_tokens_in(item) for item in prompt)
    if isinstance(prompt, dict):  # a chat message
        return _tokens_in(prompt.get("content"))
    return 0
