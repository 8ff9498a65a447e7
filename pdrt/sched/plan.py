"""What the next step computes: who grows, who makes way, and how prompts are cut into chunks.

Pure decisions on requests as they are; the schedulers reserve what is decided in the same
breath. The promise: as long as something runs that can have its block, something runs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pdrt.device.batch import Drawn, Odds, Scoring, SeqStep
from pdrt.device.moves import NONE as NO_MOVES
from pdrt.device.moves import Moves
from pdrt.errors import BadLogits, GrammarFailed
from pdrt.messages import Problem
from pdrt.sched.limits import Limits
from pdrt.sched.request import Request
from pdrt.sched.sequences import draws
from pdrt.sched.steady import Cohort


@dataclass(frozen=True, slots=True)
class Plan:
    """One step. When it is for the device, it must be committed before the next one is made."""

    batch: tuple[SeqStep, ...] = ()
    granted: int = 0
    retracted: int = 0
    expired: int = 0
    moves: Moves = NO_MOVES  # before the batch
    steady: int = 0  # with `is_blind`: so many have one more token each, in the same step
    context: int = 0  # and look at so many tokens, in sum

    @property
    def is_for_device(self) -> bool:
        """Otherwise: wait for an event or timer."""
        return bool(self.batch or self.moves or self.steady)

    @property
    def prompt_tokens(self) -> int:
        """Tokens in chunks, as opposed to single decode steps."""
        return sum(len(step.tokens) for step in self.batch if len(step.tokens) > 1)


@dataclass(frozen=True, slots=True)
class Fit:
    """Which runners may step; those that need a block for it; those that make way."""

    step: tuple[Request, ...]
    grow: tuple[Request, ...]
    retract: tuple[Request, ...]


def fit(running: Iterable[Request], free: int, owners: Callable[[int], int], limits: Limits) -> Fit:
    """Take blocks back from the cheapest until the others can all grow; never from the last."""
    keep, retract = list(running), list[Request]()
    batch = keep[: limits.max_batch_size]
    grow = _growing(batch, limits.block_size)
    if len(grow) <= free:
        return Fit(tuple(batch), tuple(grow), ())
    given = Counter[int]()  # a block is free when each of its owners gave it
    while len(grow) > free and len(keep) > 1:
        victim = min(keep, key=_cost)
        keep.remove(victim)
        retract.append(victim)
        given.update(victim.blocks)
        free += sum(1 for block in victim.blocks if given[block] == owners(block))
        batch = keep[: limits.max_batch_size]
        grow = _growing(batch, limits.block_size)
    if len(grow) > free:  # the last one: others still hold what it needs, and will let go
        batch, grow = [], []
    return Fit(tuple(batch), tuple(grow), tuple(retract))


def _growing(batch: Iterable[Request], size: int) -> list[Request]:
    return [r for r in batch if r.borrows or len(r.tokens) > len(r.blocks) * size]


def _cost(request: Request) -> tuple[int, int, int, int]:
    """The lowest priority first, the fewest output tokens, the longest prompt, then the latest."""
    return request.priority, request.said, -request.prompt_tokens, -request.key


class Batch:
    """A step as it fills: single tokens of those that decode, and chunks while a budget lasts.

    The promises: no more prompt tokens than `max_prefill_tokens` however many prompts there are,
    so that a chunk bounds what a step takes; and no scraps: a chunk is shorter than a block only
    when it is a prompt's last one.
    """

    def __init__(self, limits: Limits, cohort: Cohort | None = None) -> None:
        self.prefill_tokens = limits.max_prefill_tokens  # what is left of them
        self._scrap = min(limits.block_size, limits.max_prefill_tokens)
        self._cohort = cohort  # with `is_blind`: who takes in those that are steady
        self._decode: list[SeqStep] = []
        self._chunks: list[SeqStep] = []

    @property
    def steps(self) -> tuple[SeqStep, ...]:
        return (*self._decode, *self._chunks)

    @property
    def room(self) -> int:
        """Prompt tokens that another prompt may have."""
        return self.prefill_tokens if self.prefill_tokens >= self._scrap else 0

    def fill(self, runners: Iterable[Request]) -> None:
        """In their order: the oldest prompt has all that it can use."""
        if self._cohort is not None:
            runners = self._cohort.gather(runners)
        for r in runners:
            tokens, start = r.tokens, r.computed
            if len(tokens) - start == 1 and len(tokens) > r.prompt_tokens:  # most are: no calls
                step = SeqStep(r.key, tokens[start:], start, r.blocks, r.draw, (), r.copy_from)
                self._decode.append(step)
            else:
                self._add_chunk(r)

    def _add_chunk(self, request: Request) -> None:
        pending = request.pending
        count = min(pending, self.prefill_tokens)
        if count > 0 and (count == pending or count >= self._scrap):
            self.prefill_tokens -= count
            self._chunks.append(_chunk(request, count))


def _chunk(request: Request, count: int) -> SeqStep:
    start = request.computed
    tokens = request.tokens[start : start + count]
    is_last = start + count == len(request.tokens)
    draw, further = draws(request) if is_last else (None, ())
    scoring = _scoring(request, start, start + count)
    return SeqStep(
        request.key, tokens, start, request.blocks, draw, further, request.copy_from, scoring
    )


def _scoring(request: Request, start: int, end: int) -> Scoring | None:
    """Row i is asked for token i + 1, as far as the prompt goes."""
    targets = request.tokens[start + 1 : min(end + 1, request.prompt_tokens)]
    return Scoring(targets, request.scoring) if request.scoring >= 0 and targets else None


def bad_logits(drawn: Drawn) -> Problem | None:
    """What is wrong when the device computed what is no number: damage must not become a token."""
    if drawn.logprob == drawn.logprob and not drawn.further and not drawn.scored:
        return None
    for one in (drawn, *drawn.further):
        if one.fault:
            return Problem.of(GrammarFailed(f"the answer's grammar: {one.fault}"), "device")
    told: tuple[Drawn | Odds, ...] = (drawn, *drawn.further, *drawn.scored)
    if not any(math.isnan(one.logprob) for one in told):
        return None
    return Problem.of(BadLogits("the device computed what is no number"), "device")


def sendable(computed: int, sent: int, limits: Limits) -> int:
    """Leading blocks of a prompt that may leave once `computed` tokens are in the pool."""
    return computed // limits.block_size if limits.chunked else sent
