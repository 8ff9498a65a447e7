"""Steps of those that only go on, when nobody reads their tokens: the same books for less.

A simulator (`Limits.is_blind`) wants to know when tokens come and what they hold, not what they
are. A request is steady while it decodes and its next token is not its last one. The promise: what
is done here in bulk leaves requests, blocks, reserve and counters as plan and commit would, one
step at a time; who needs the contents (prefix cache, scoring, groups, copies) is not steady.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Final

from pdrt.sched.request import Request, State
from pdrt.sched.spent import Phase

if TYPE_CHECKING:
    from pdrt.sched.book import Book

TOKEN: Final = 0  # stands for any


def split(requests: Iterable[Request]) -> tuple[list[Request], list[Request]]:
    """Those that are steady, which decode and say a token after their next one, and the others."""
    decode = Phase.DECODE
    every = list(requests)
    steady = [
        r
        for r in every
        if r.computed + 1 == len(r.tokens) < r.most - 1
        and r.spent.phase is decode
        and r.copy_from < 0
    ]
    if len(steady) == len(every):
        return steady, []
    keys = {r.key for r in steady}
    return steady, [r for r in every if r.key not in keys]


def advance(book: Book, requests: Collection[Request]) -> None:
    """One more token for each that is still there."""
    running, late = State.RUNNING, 0
    for r in requests:
        if r.state is running:
            r.computed += 1
            r.tokens.append(TOKEN)
        else:
            late += 1
    book.counters["tokens_out"] += len(requests) - late
    if late:
        book.counters["late"] += late


def grow(book: Book, requests: Iterable[Request], blocks: Iterable[int]) -> None:
    """A block more for each, as `Grown` does: what is kept free for one changes near its end."""
    far = book.limits.reserved_tokens
    for request, block in zip(requests, blocks, strict=True):
        assert not request.borrows, "who shares blocks is not grown in bulk"
        request.blocks.append(block)
        if request.most - len(request.tokens) < far:
            book.weigh(request)


def steady_steps(book: Book, max_held: int, most: int) -> int:
    """How many steps from now on only let those that run go on: none ends, comes or makes way.

    Who waits for memory must be unable to get it until somebody ends: all seats are taken.
    """
    limits, runners = book.limits, book.queues[State.RUNNING].values()
    if not limits.is_blind or not 0 < len(runners) <= limits.max_batch_size:
        return 0
    if book.line and book.seats < max_held:
        return 0
    steady, others = split(runners)
    if others:
        return 0
    steps = min(most, min([r.most - len(r.tokens) for r in steady]) - 1)
    while steps > 0 and _growth(runners, steps, limits.block_size) > book.blocks.free:
        steps //= 2
    return steps


def _growth(requests: Iterable[Request], steps: int, size: int) -> int:
    """Blocks that they need for so many steps."""
    return sum(max(0, -((1 - steps - len(r.tokens)) // size) - len(r.blocks)) for r in requests)


def skip(book: Book, steps: int) -> None:
    """So many steps of all that run, each with its growth in its turn."""
    runners, limits = list(book.queues[State.RUNNING].values()), book.limits
    begun = [len(r.tokens) for r in runners]
    growers = _growers(runners, steps, limits.block_size)
    for number in range(steps):
        if growing := growers.get(number):
            _grow(book, growing, number)
        if book.line:
            _wait(book, runners, begun, number)
    for request, length in zip(runners, begun, strict=True):
        _set_length(request, length + steps)
    book.counters["tokens_out"] += steps * len(runners)


def _growers(
    runners: Sequence[Request], steps: int, size: int
) -> dict[int, list[tuple[Request, int]]]:
    """Who needs a block before which of the steps, and how long it is then."""
    found: dict[int, list[tuple[Request, int]]] = {}
    for r in runners:
        length = len(r.tokens)
        for number in range(max(0, len(r.blocks) * size - length + 1), steps, size):
            found.setdefault(number, []).append((r, length + number))
    return found


def _grow(book: Book, growing: Sequence[tuple[Request, int]], number: int) -> None:
    blocks = book.blocks.take(len(growing))
    assert blocks is not None, f"step {number}: fewer blocks than `steady_steps` counted"
    for request, length in growing:
        _set_length(request, length)
    grow(book, [request for request, _ in growing], blocks)


def _wait(book: Book, runners: Sequence[Request], begun: Sequence[int], number: int) -> None:
    """Somebody waits in this step, which moves R; all are weighed anew when it has moved enough."""
    book.reserve.waited()
    if book.is_reserve_due:
        for request, length in zip(runners, begun, strict=True):
            _set_length(request, length + number)
        book.adapt()


def _set_length(request: Request, length: int) -> None:
    """All but the last token's KV is computed."""
    tokens = request.tokens
    tokens.extend(repeat(TOKEN, length - len(tokens)))
    request.computed = length - 1
