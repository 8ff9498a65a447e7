"""Steps of those that only go on, when nobody reads their tokens: the same books for less.

A simulator (`Limits.is_blind`) wants to know when tokens come and what they hold, not what they
are. A request is steady while it decodes and its next token is not its last one. Those that are
make a cohort, for which a step is one number more; a member's own books are made up when somebody
looks at them. The promise: what is done here in bulk leaves requests, blocks, reserve and counters
as plan and commit would, one step at a time; who needs the contents (prefix cache, scoring, groups,
copies) is not steady.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from itertools import repeat
from typing import TYPE_CHECKING, Final

from pdrt.sched.request import Request, State
from pdrt.sched.spent import Phase

if TYPE_CHECKING:
    from pdrt.sched.book import Book

TOKEN: Final = 0  # stands for any


class Cohort:
    """Runners that are steady, all of them in each step. `settle` before reading one's tokens."""

    def __init__(self, block_size: int) -> None:
        self.steps = 0  # done so far
        self.context = 0  # tokens of all
        self._size = block_size
        self.members: dict[int, Request] = {}  # by key
        self._bases: dict[int, int] = {}  # its tokens less `steps`, the same while it is here
        self._growing: dict[int, list[tuple[int, int]]] = {}  # by step: keys and bases
        self._ending: list[tuple[int, int, int]] = []  # a heap of steps, keys and bases
        self._rooms: list[int] | None = None

    @property
    def rooms(self) -> Sequence[int]:
        """Of those that are here now."""
        if self._rooms is None:  # replaced, never changed: who has it keeps it
            self._rooms = [request.room for request in self.members.values()]
        return self._rooms

    def gather(self, runners: Iterable[Request]) -> list[Request]:
        """Take in those that are steady from now on; the others are left."""
        bases, decode = self._bases, Phase.DECODE
        others: list[Request] = []
        for r in [r for r in runners if r.key not in bases]:
            goes_on = r.computed + 1 == len(r.tokens) < r.most - 1
            if goes_on and r.spent.phase is decode and r.copy_from < 0:
                self._join(r)
            else:
                others.append(r)
        return others

    def _join(self, request: Request) -> None:
        assert not request.borrows, "who shares blocks is not grown in bulk"
        key, length = request.key, len(request.tokens)
        base = length - self.steps
        self.members[key], self._bases[key], self._rooms = request, base, None
        self.context += length
        heappush(self._ending, (request.most - 1 - base, key, base))
        full = len(request.blocks) * self._size - base + 1
        self._growing.setdefault(full, []).append((key, base))

    def drop(self, request: Request) -> None:
        """It runs no more, whatever its tokens are now."""
        base = self._bases.pop(request.key, None)
        if base is not None:
            self.context -= base + self.steps
            del self.members[request.key]
            self._rooms = None

    def disperse(self) -> None:
        """Each goes on by itself."""
        for request in list(self.members.values()):
            self.settle(request)
            self.drop(request)

    def settle(self, request: Request) -> None:
        """Its own books say what was done; all but the last token's KV is computed."""
        base = self._bases.get(request.key)
        if base is not None:
            tokens, length = request.tokens, base + self.steps
            tokens.extend(repeat(TOKEN, length - len(tokens)))
            request.computed = length - 1

    # A step.

    def due(self) -> list[Request]:
        """Who needs a block before the next step, settled; asked once for each."""
        found = dict.fromkeys(self._growing.pop(self.steps, ()))
        due = [self.members[key] for key, base in found if self._bases.get(key) == base]
        for request in due:
            self.settle(request)
        return due

    def grown(self, request: Request) -> None:
        """It has a block more."""
        base = self._bases.get(request.key)
        if base is not None:
            self._growing.setdefault(self.steps + self._size, []).append((request.key, base))

    def went_on(self) -> None:
        self.steps += 1
        self.context += len(self._bases)

    def steps_to_end(self) -> int:
        """Until the next token of one is its last; there is a member."""
        ending = self._ending
        while self._bases.get(ending[0][1]) != ending[0][2]:
            heappop(ending)
        return ending[0][0] - self.steps

    def release(self) -> None:
        """Those whose next token is their last go on by themselves."""
        while self._bases and self.steps_to_end() <= 0:
            request = self.members[self._ending[0][1]]
            self.settle(request)
            self.drop(request)

    def growth(self, steps: int) -> int:
        """Blocks that are needed for so many steps."""
        size, now = self._size, self.steps
        return sum(
            max(0, -((1 - steps - base - now) // size) - len(self.members[key].blocks))
            for key, base in self._bases.items()
        )

    def may_grow(self, steps: int, free: int) -> bool:
        """Whether so many blocks are enough for so many steps."""
        most = len(self._bases) * (steps // self._size + 1)
        return most <= free or self.growth(steps) <= free


def prepare(book: Book) -> None:
    """Before a plan: whoever it decides about has its own books in order."""
    if not book.limits.is_blind:
        return
    cohort, runners = book.cohort, book.queues[State.RUNNING]
    cohort.release()
    cohort.due()
    if len(runners) > min(book.blocks.free, book.limits.max_batch_size):
        for request in runners.values():  # somebody may have to make way
            cohort.settle(request)


def grow(book: Book, requests: Iterable[Request], blocks: Iterable[int]) -> None:
    """A block more for each, as `Grown` does: what is kept free for one changes near its end."""
    far = book.limits.reserved_tokens
    for request, block in zip(requests, blocks, strict=True):
        assert not request.borrows, "who shares blocks is not grown in bulk"
        request.blocks.append(block)
        book.cohort.grown(request)
        if request.most - len(request.tokens) < far:
            book.weigh(request)


def advance(book: Book, planned: int) -> None:
    """One more token for each that is still there."""
    cohort = book.cohort
    cohort.went_on()
    book.counters["tokens_out"] += len(cohort.members)
    if late := planned - len(cohort.members):
        book.counters["late"] += late


def steady_steps(book: Book, max_held: int, most: int) -> int:
    """How many steps from now on only let those that run go on: none ends, comes or makes way.

    Who waits for memory must be unable to get it until somebody ends: all seats are taken.
    """
    limits, runners, cohort = book.limits, book.queues[State.RUNNING], book.cohort
    if not limits.is_blind or not 0 < len(runners) <= limits.max_batch_size:
        return 0
    if book.line and book.seats < max_held:
        return 0
    cohort.release()
    if len(cohort.members) < len(runners) and cohort.gather(runners.values()):
        return 0
    steps = min(most, cohort.steps_to_end())
    while steps > 0 and not cohort.may_grow(steps, book.blocks.free):
        steps //= 2
    return steps


def begin(book: Book) -> None:
    """The next step, of those that `steady_steps` spoke of."""
    if due := book.cohort.due():
        blocks = book.blocks.take(len(due))
        assert blocks is not None, "fewer blocks than `steady_steps` counted"
        keys = {request.key for request in due}
        runners = book.queues[State.RUNNING].values()
        grow(book, [r for r in runners if r.key in keys] if len(due) > 1 else due, blocks)
    if book.line:  # somebody waits, which moves R
        book.reserve.waited()
        book.adapt()


def skip(book: Book, steps: int) -> None:
    """So many steps of all that run, each with its growth in its turn."""
    cohort = book.cohort
    for _ in range(steps):
        begin(book)
        cohort.went_on()
    book.counters["tokens_out"] += steps * len(cohort.members)
