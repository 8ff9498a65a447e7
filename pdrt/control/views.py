"""Who may serve a model's requests just now: made anew when something changes, not for a request.

Pure: pairs in, candidates out. The best come first: without a full member, not suspect, and with
a canary passed since their last fault; others are only for want of better.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from pdrt.control.instances import Instance
from pdrt.control.pairs import Pair, Trust
from pdrt.control.policy import Load
from pdrt.data.peer import Health

Excluded: TypeAlias = Collection[Instance]
Grade: TypeAlias = Callable[[Pair], int | None]
_GRADES: Final = {Trust.PASSED: 0, Trust.DOUBTFUL: 1, Trust.RETRYING: 1}


def grade(pair: Pair) -> int | None:
    """0 = has served since its last fault, 1 = may serve, None = must not be used."""
    return _GRADES.get(pair.trust)


def any_grade(_pair: Pair) -> int:
    """Where there are no canaries."""
    return 0


@dataclass(frozen=True, slots=True)
class Candidates:
    """Instances with their loads beside them, as policies want them."""

    instances: Sequence[Instance] = ()
    loads: Sequence[Load] = ()

    @staticmethod
    def of(instances: Iterable[Instance]) -> Candidates:
        each = tuple(dict.fromkeys(instances))
        return Candidates(each, tuple(one.load for one in each))

    @property
    def names(self) -> Sequence[str]:
        return [each.name for each in self.instances]


@dataclass(frozen=True, slots=True)
class View:
    """Of one model. `decode` is by the prefill instance that was chosen."""

    model: str = ""
    prefill: Candidates = Candidates()
    decode: Mapping[Instance, Candidates] = field(default_factory=dict)
    alone: Candidates = Candidates()
    is_full: bool = False  # some could serve, and each of them is full
    is_split_full: bool = False  # the same of those that are no hybrids


def view_of(
    model: str,
    pairs: Iterable[Pair],
    grade_of: Grade,
    without: Excluded = (),
    pinned: Instance | None = None,
) -> View:
    usable = [
        pair
        for pair in pairs
        if pair.is_routable
        and grade_of(pair) is not None
        and pinned in (None, pair.prefill)
        and not any(each in without for each in pair.members)
    ]
    free = [pair for pair in usable if not any(each.is_full for each in pair.members)]
    split = _best([pair for pair in free if pair.prefill], grade_of)
    alone = _best([pair for pair in free if not pair.prefill], grade_of)
    decode: dict[Instance, list[Instance]] = {}
    for pair in split:
        if pair.prefill:
            decode.setdefault(pair.prefill, []).append(pair.decode)
    return View(
        model,
        Candidates.of(decode),
        {prefill: Candidates.of(each) for prefill, each in decode.items()},
        Candidates.of(pair.decode for pair in alone),
        bool(usable) and not free,
        any(pair.prefill for pair in usable) and not split,
    )


def _best(pairs: Sequence[Pair], grade_of: Grade) -> Sequence[Pair]:
    """Those of the best grade; a suspect instance is only for want of others."""

    def order(pair: Pair) -> tuple[bool, int]:
        suspect = any(each.health is not Health.ALIVE for each in pair.members)
        return suspect, grade_of(pair) or 0

    best = min(map(order, pairs), default=None)
    return [pair for pair in pairs if order(pair) == best]


def set_scales(instances: Iterable[Instance]) -> None:
    """What a token weighs: with twice the KV pool an instance carries twice the tokens."""
    known = [each for each in instances if each.status and each.status.load.pool_tokens]
    pools = [each.status.load.pool_tokens for each in known if each.status]
    usual = sum(pools) / len(pools) if pools else 1
    for each, pool in zip(known, pools, strict=True):
        each.load.scale = usual / pool
