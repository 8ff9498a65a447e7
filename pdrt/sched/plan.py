"""What the next step computes: who grows, who makes way, and how prompts are cut into chunks.

Pure decisions on requests as they are; the schedulers reserve what is decided in the same
breath. The promise: as long as something runs that can have its block, something runs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pdrt.device.batch import Drawn, Odds, Scoring, SeqStep
from pdrt.errors import BadLogits
from pdrt.messages import Problem
from pdrt.sched.limits import Limits
from pdrt.sched.request import Request
from pdrt.sched.sequences import draws


@dataclass(frozen=True, slots=True)
class Plan:
    """One step. When `batch` is not empty, the plan must be committed before the next one."""

    batch: tuple[SeqStep, ...] = ()
    granted: int = 0
    retracted: int = 0
    expired: int = 0

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
    given = Counter[int]()  # a block is free when each of its owners gave it
    batch = keep[: limits.max_batch_size]
    grow = [r for r in batch if _lacks_block(r, limits)]
    while len(grow) > free and len(keep) > 1:
        victim = min(keep, key=_cost)
        keep.remove(victim)
        retract.append(victim)
        given.update(victim.blocks)
        free += sum(1 for block in victim.blocks if given[block] == owners(block))
        batch = keep[: limits.max_batch_size]
        grow = [r for r in batch if _lacks_block(r, limits)]
    if len(grow) > free:  # the last one: others still hold what it needs, and will let go
        batch, grow = [], []
    return Fit(tuple(batch), tuple(grow), tuple(retract))


def _lacks_block(request: Request, limits: Limits) -> bool:
    return request.borrows or len(request.tokens) > len(request.blocks) * limits.block_size


def _cost(request: Request) -> tuple[int, int, int]:
    """Fewest output tokens first, then the longest prompt, then the latest."""
    return request.said, -request.prompt_tokens, -request.key


def steps(runners: Sequence[Request], limits: Limits) -> tuple[SeqStep, ...]:
    """Single tokens for those that decode, chunks in order for the rest while the budget lasts."""
    budget = limits.max_prefill_tokens
    batch: list[SeqStep] = []
    for request in runners:
        count = request.pending
        if count > 1:
            count = min(count, budget)
            budget -= count
        if count > 0:
            batch.append(_step(request, count))
    return tuple(batch)


def prefill_budget(runners: Iterable[Request], limits: Limits) -> int:
    """Chunk tokens of this step that the runners leave over."""
    wanted = sum(r.pending for r in runners if r.pending > 1)
    return max(0, limits.max_prefill_tokens - wanted)


def _step(request: Request, count: int) -> SeqStep:
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
    told: tuple[Drawn | Odds, ...] = (drawn, *drawn.further, *drawn.scored)
    if not any(math.isnan(one.logprob) for one in told):
        return None
    return Problem.of(BadLogits("the device computed what is no number"), "device")


def sendable(computed: int, sent: int, limits: Limits) -> int:
    """Leading blocks of a prompt that may leave once `computed` tokens are in the pool."""
    return computed // limits.block_size if limits.chunked else sent
