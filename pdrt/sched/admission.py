"""Who is let in: the admission formula, and ageing so that nobody waits for ever.

Admit when `ceil((prompt + R) / B) <= free - sum of ceil(R / B)` over those that hold memory, with
R = reserved tokens, for each request no more than it may still say. A request that does not fit is
passed by, but only so often: then it is waited for. One that comes back is never passed by.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pdrt.data.layout import blocks_for
from pdrt.sched.limits import Limits
from pdrt.sched.request import Request, State


@dataclass(slots=True)
class Space:
    """What is left to give out; `admit` works on it and leaves the rest."""

    blocks: int  # beyond what is reserved for those that hold memory
    slots: int
    requests: int
    prefill_tokens: int  # of this step, for those that are computed here

    @property
    def is_spent(self) -> bool:
        no_way_in = self.slots <= 0 and self.prefill_tokens <= 0
        return self.blocks <= 0 or self.requests <= 0 or no_way_in


@dataclass(frozen=True, slots=True)
class Admission:
    granted: tuple[tuple[Request, int], ...] = ()  # each with the blocks for its tokens
    overtaken: tuple[Request, ...] = ()  # once for each later request that was granted


def reserve(request: Request, limits: Limits) -> int:
    """Blocks kept free so that an admitted request can grow."""
    return blocks_for(min(limits.reserved_tokens, request.left), limits.block_size)


def admit(line: Iterable[Request], space: Space, limits: Limits) -> Admission:
    """First come, first served, except past those that do not fit yet."""
    granted: list[tuple[Request, int]] = []
    overtaken: list[Request] = []
    passed: list[Request] = []
    patience = limits.patience
    for request in line:
        if space.is_spent or patience <= 0:
            break
        if _fits(request, space, limits):
            granted.append((request, _grant(request, space, limits)))
            overtaken += passed
            patience -= bool(passed)
        elif request.is_returning:
            break
        else:
            passed.append(request)
            patience = min(patience, limits.patience - request.overtaken)
    return Admission(tuple(granted), tuple(overtaken))


def _fits(request: Request, space: Space, limits: Limits) -> bool:
    ways = space.prefill_tokens if request.state is State.QUEUED else space.slots
    tokens = len(request.tokens) + min(limits.reserved_tokens, request.left)
    return ways > 0 and blocks_for(tokens, limits.block_size) <= space.blocks


def _grant(request: Request, space: Space, limits: Limits) -> int:
    blocks = blocks_for(len(request.tokens), limits.block_size)
    space.blocks -= blocks + reserve(request, limits)
    space.requests -= 1
    if request.state is State.QUEUED:
        space.prefill_tokens -= len(request.tokens)
    else:
        space.slots -= 1
    return blocks
