"""Who is let in: the admission formula, and ageing so that nobody waits for ever.

Admit when `ceil((prompt + R) / B) <= free - sum of ceil(R / B)` over those that hold memory, with
R = reserved tokens, for each request no more than it may still say. Blocks of a cached prefix that
others own already are not needed again: they are taken off the left side. One that nobody owns is
counted in `free`, so that it is needed like any other. A request that does not fit is passed by,
but only so often: then it is waited for. One that comes back is never passed by.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass

from pdrt.data.layout import blocks_for
from pdrt.sched.blocks import BlockPool
from pdrt.sched.limits import Limits
from pdrt.sched.request import Request, State


@dataclass(slots=True)
class Space:
    """What is left to give out; `admit` works on it and leaves the rest."""

    blocks: int  # beyond what is reserved for those that hold memory
    slots: int
    requests: int
    prefill_tokens: int  # of this step, for those that are computed here

    def is_spent(self, request: Request) -> bool:
        """Whether neither this one nor any after it can be admitted."""
        no_way_in = self.slots <= 0 and self.prefill_tokens <= 0
        is_computed = request.state is State.SWAPPED
        return self.blocks <= 0 or self.requests <= 0 or (no_way_in and not is_computed)


@dataclass(frozen=True, slots=True)
class Grant:
    request: Request
    blocks: int  # for all its tokens
    hit: tuple[int, ...]  # of these the first, which hold what they should already


@dataclass(frozen=True, slots=True)
class Admission:
    granted: tuple[Grant, ...] = ()
    overtaken: tuple[Request, ...] = ()  # once for each later request that was granted


def reserve(request: Request, limits: Limits) -> int:
    """Blocks kept free so that an admitted request can grow, in all its sequences.

    Each of them copies the prompt's last block, if it is not full.
    """
    each = blocks_for(min(limits.reserved_tokens, request.left), limits.block_size)
    if request.sampling.n == 1:
        return each + request.borrows
    return request.sampling.n * (each + (len(request.tokens) % limits.block_size > 0))


def _needed(request: Request, limits: Limits, total: int) -> int:
    """Blocks that must be free to admit it. Sequences that never fit at once run in turns."""
    if request.sampling.n > 1:
        prompt = blocks_for(len(request.tokens), limits.block_size)
        return min(prompt + reserve(request, limits), total)
    tokens = len(request.tokens) + min(limits.reserved_tokens, request.left)
    return blocks_for(tokens, limits.block_size)


def hit(request: Request, pool: BlockPool, limits: Limits) -> tuple[int, ...]:
    """Blocks that hold its leading tokens. The last token is always computed, to draw from.

    A prompt whose tokens are scored is computed from its first one.
    """
    most = _most_hit(request, limits)
    return pool.cache.find(request.chain.keys(request.tokens, most, limits.block_size))


def _most_hit(request: Request, limits: Limits) -> int:
    """How many blocks it may share at most."""
    if not limits.prefix_cache or request.scoring >= 0:
        return 0
    return (len(request.tokens) - 1) // limits.block_size


def admit(line: Iterable[Request], space: Space, limits: Limits, pool: BlockPool) -> Admission:
    """First come, first served, except past those that do not fit yet. `pool` is only read."""
    granted: list[Grant] = []
    overtaken: list[Request] = []
    passed: list[Request] = []
    patience = limits.patience
    woken: set[int] = set()  # blocks without an owner that somebody is granted here
    for request in line:
        is_over = patience <= 0 or len(passed) >= limits.lookahead
        if is_over or space.is_spent(request):
            break
        if grant := _fitting(request, space, limits, pool, woken):
            granted.append(grant)
            woken.update(grant.hit)
            overtaken += passed
            patience -= bool(passed)
        elif request.is_returning:
            break
        else:
            passed.append(request)
            patience = min(patience, limits.patience - request.overtaken)
    return Admission(tuple(granted), tuple(overtaken))


def _fitting(
    request: Request, space: Space, limits: Limits, pool: BlockPool, woken: Set[int]
) -> Grant | None:
    """What it is granted, taken out of `space`; None when that is not enough."""
    if not _has_way_in(request, space):
        return None
    tokens = len(request.tokens)
    needed = _needed(request, limits, pool.total)
    if not _may_share(request, needed - space.blocks, limits, pool):
        return None
    found = hit(request, pool, limits)
    shared = sum(1 for block in found if block in woken or pool.owners(block))
    if needed - shared > space.blocks:
        return None
    blocks = blocks_for(tokens, limits.block_size)
    space.blocks -= blocks - shared + reserve(request, limits)
    space.requests -= request.sampling.n
    if request.state is State.QUEUED:
        space.prefill_tokens -= tokens - len(found) * limits.block_size
    elif request.state is State.WAITING:
        space.slots -= 1
    return Grant(request, blocks, found)


def _has_way_in(request: Request, space: Space) -> bool:
    match request.state:
        case State.QUEUED:
            return space.prefill_tokens > 0
        case State.WAITING:
            return space.slots > 0
        case _:
            return True  # its KV is in host memory


def _may_share(request: Request, count: int, limits: Limits, pool: BlockPool) -> bool:
    """Whether so many of its blocks can be found at all: cheap, for those that wait for long."""
    if count <= 0:
        return True
    if count > _most_hit(request, limits):
        return False
    keys = request.chain.keys(request.tokens, count, limits.block_size)
    return pool.cache.has(keys[-1])
