"""The books of one scheduler: who stands where, who holds what, what is still to be carried out.

All requests are moved here and only here, so that state, queues, pools and timers never
disagree. What comes late, twice or of an old attempt changes nothing and is counted.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from pdrt.device.batch import Drawn, SeqStep
from pdrt.errors import Conflict, DeadlinePassed, Draining, Illegal, Overloaded, tree
from pdrt.machine import Table
from pdrt.messages import Output, Problem, Submit
from pdrt.sched.admission import Grant, Space, admit, reserve
from pdrt.sched.blocks import BlockPool, Held, Quarantine
from pdrt.sched.effects import Booking, Effect, Free, FreeHost, Hold, Load, Save, Say
from pdrt.sched.events import Dropped, Failed, Granted, TokenOut
from pdrt.sched.hostcopies import HostCopies
from pdrt.sched.limits import Limits
from pdrt.sched.plan import Plan, bad_logits, sendable
from pdrt.sched.queues import Line, Timers
from pdrt.sched.request import Request, State
from pdrt.sched.reserve import Reserve
from pdrt.sched.steady import Cohort

_CODES: Final = frozenset(tree())
_IN_LINE: Final = frozenset({State.QUEUED, State.WAITING, State.SWAPPED})
_GROWING: Final = frozenset({State.RUNNING, State.TRANSFERRING})
_UNSERVED: Final = (
    State.QUEUED,
    State.BOOTSTRAPPING,
    State.WAITING,
    State.UNBOUND,
    State.SWAPPED,
)


@dataclass(frozen=True, slots=True)
class SchedStats:
    """Figures of one moment; counters only rise."""

    running: int = 0
    queues: dict[str, int] = field(default_factory=dict)
    blocks_used: int = 0
    blocks_total: int = 0
    blocks_quarantined: int = 0
    slots_used: int = 0
    host_blocks_used: int = 0
    host_blocks_total: int = 0
    rooms: int = 0
    counters: dict[str, int] = field(default_factory=dict)
    draining: bool = False


class Book:
    """Requests of one table, with the blocks and slots they hold."""

    def __init__(
        self,
        table: Table[State, Request, Effect | Booking],
        limits: Limits,
        blocks: int,
        slots: int,
    ) -> None:
        self._table, self.limits = table, limits  # with R as it is now
        self.reserve = Reserve(
            limits.reserved_tokens, limits.max_prefill_tokens, is_adaptive=limits.adaptive_reserve
        )
        self.reserved = 0  # blocks that are kept free for those that may grow
        self.seats = 0  # sequences that hold memory, or will from the same prompt
        self.blocks = BlockPool(blocks)
        self.slots = BlockPool(slots)
        self.host = HostCopies(limits.host_blocks)
        self.quarantine = Quarantine()
        self.requests: dict[int, Request] = {}  # by key
        self.rooms: dict[int, Request] = {}  # a sequence of a group may have one of its own
        self.groups: dict[int, dict[int, Request]] = {}  # client's room -> its sequences by key
        self.queues: dict[State, dict[int, Request]] = {state: {} for state in State}
        self.cohort = Cohort(limits.block_size)  # empty unless `is_blind`
        self.line = Line()
        self.timers = Timers()
        self.outbox: deque[Effect] = deque()
        self.counters: Counter[str] = Counter()
        self.is_draining = False
        self.now = 0.0  # of the call that is being served
        self._keys = 0
        self._open: Plan | None = None

    def next_key(self) -> int:
        self._keys += 1
        return self._keys

    @property
    def unserved(self) -> int:
        """Requests that are known and hold no memory."""
        return sum(len(self.queues[state]) for state in _UNSERVED)

    def check_admissible(self, submit: Submit, max_waiting: int) -> None:
        """Raises Draining, Conflict or Overloaded."""
        if self.is_draining:
            raise Draining("this worker is draining and takes no new requests")
        attempt = (submit.room, submit.attempt)
        if submit.room in self.rooms or submit.room in self.groups or attempt in self.quarantine:
            raise Conflict(f"room {submit.room} (attempt {submit.attempt}) is in flight already")
        if self.unserved >= max_waiting:
            raise Overloaded(
                f"{self.unserved} requests are waiting, no more than {max_waiting} may"
            )

    def enter(self, request: Request) -> None:
        self._note(request)
        request.spent.begins(request.state)
        self.counters["submitted"] += 1

    def join(self, request: Request) -> None:
        """A further sequence of a group; what it holds of another's it owns too."""
        self.blocks.share(request.blocks)
        self._note(request)

    def _note(self, request: Request) -> None:
        self.weigh(request)
        self.requests[request.key] = request
        self.rooms[request.room] = request
        if request.of_room is not None:
            self.groups.setdefault(request.of_room, {})[request.key] = request
        self._file(request)

    def members(self, room: int) -> list[Request]:
        """All that is alive of a client's room."""
        request = self.rooms.get(room)
        alone = [request] if request is not None and request.of_room is None else []
        return list(self.groups.get(room, {}).values()) or alone

    def move(self, request: Request, event: object) -> None:
        """The only way a request changes. Raises Illegal for what cannot happen."""
        before = request.state
        if self.cohort.members:
            self.cohort.settle(request)
        try:
            after, effects = self._table.step(before, request, event)
        except Illegal as error:
            error.add_note(f"room {request.room}: {' '.join(request.story)}")
            raise
        if after is not before:
            self._unfile(request)
            request.state = after
            request.story.append(f"{before}--{type(event).__name__}->{after}")
            request.spent.moved(before, after, self.now)
            self._file(request)
        elif not effects and (before, type(event)) in self._table.ignored:
            self.counters["ignored"] += 1
        if after is not before or not isinstance(event, TokenOut):
            self.weigh(request)
        for effect in effects:
            if isinstance(effect, Say):  # most are: one for each token
                is_news = request.spent.has_news or effect.output.finish is not None
                if is_news and not self.limits.is_blind:
                    told = request.spent.told(self.now)
                    effect.output = replace(effect.output, spent_ms=told)
                self.outbox.append(effect)
                self._said(effect.output)
            else:
                self._carry_out(effect)

    def weigh(self, request: Request) -> None:
        """Count anew what is kept free for it. Between that it may be a block more than needed."""
        if self.cohort.members:
            self.cohort.settle(request)
        holds = request.state in _GROWING
        blocks = reserve(request, self.limits) if holds else 0
        seats = request.sampling.n if holds else 0
        self.reserved += blocks - request.reserved
        self.seats += seats - request.seats
        request.reserved, request.seats = blocks, seats

    @property
    def is_reserve_due(self) -> bool:
        """Whether R has moved so much that it counts."""
        moved = abs(self.reserve.tokens - self.limits.reserved_tokens)
        return moved >= self.limits.block_size

    def adapt(self) -> None:
        """Keep what R says free for those that run already, too."""
        if self.is_reserve_due:
            self.limits = replace(self.limits, reserved_tokens=self.reserve.tokens)
            for state in _GROWING:
                for request in self.queues[state].values():
                    self.weigh(request)

    def admit(self, space: Space) -> list[Request]:
        """Give those in line the memory that they wait for, as far as there is space."""
        self.adapt()
        admission = admit(self.line, space, self.limits, self.blocks)
        for request in admission.overtaken:
            request.overtaken += 1
        for grant in admission.granted:
            self.blocks.share(grant.hit)  # all of them, before a new block takes the place of one
        for grant in admission.granted:
            self._grant(grant)
        return [grant.request for grant in admission.granted]

    def _grant(self, grant: Grant) -> None:
        request, size = grant.request, self.limits.block_size
        blocks = self.blocks.take(grant.blocks - len(grant.hit))
        slot = self.slots.take(1) if request.state is State.WAITING else None
        assert blocks is not None
        cached = len(grant.hit) * size
        self.counters["prefix_tokens_asked"] += len(request.tokens)
        self.counters["prefix_tokens_hit"] += cached
        granted = Granted(
            blocks=(*grant.hit, *blocks),
            slot=slot[0] if slot else None,
            hit=len(grant.hit),
            cached_tokens=cached,
            sendable=sendable(cached, 0, self.limits),
        )
        self.move(request, granted)

    def learn(self, request: Request, tokens: int, known: int | None = None) -> None:
        """The KV of its first `tokens` tokens is there: full blocks can be found from now on.

        Those of the first `known` tokens are, as far as they could be.
        """
        size = self.limits.block_size
        first, end = (request.computed if known is None else known) // size, tokens // size
        if first == end or not self.limits.prefix_cache:
            return
        keys = request.chain.keys(request.tokens, end, size)
        for key, block in zip(keys[first:], request.blocks[first:end], strict=True):
            self.blocks.cache.register(key, block)

    def expire(self, now: float) -> int:
        """End what is past its time, in whatever state it waits; how many that were."""
        due = self.timers.pop_due(now)
        for key in due:
            request = self.requests.get(key)
            if request is None:
                continue  # its group has ended just now
            lost = request.problem if now < request.deadline else None
            stage = str(request.state)
            late = Problem.of(DeadlinePassed(f"it passed while {stage}"), stage)
            self.move(request, Failed(lost or late))
        return len(due)

    def opened(self, plan: Plan) -> Plan:
        """The same plan; when it computes something, it is open until `results` is asked for."""
        assert self._open is None, "the last plan was not committed"
        self._open = plan if plan.is_for_device else None
        return plan

    def results(
        self, plan: Plan, drawn: Sequence[Drawn], lost: Collection[int] = ()
    ) -> Iterator[tuple[Request, SeqStep, Drawn | None]]:
        """What was computed for those that are still there. Damage ends its request here.

        Of those whose KV was lost before the step nothing counts.
        """
        assert plan is self._open, "this plan is not the open one"
        self._open = None
        tokens = {one.key: one for one in drawn}
        for step in plan.batch:
            request = self.requests.get(step.key)
            is_told = step.draw is not None or step.scoring is not None
            one = tokens[step.key] if is_told else None
            if request is None or step.key in lost:
                self.counters["late"] += 1
            elif one is not None and (problem := bad_logits(one)):
                self.blocks.forget(request.blocks)  # the damage may be in any of them
                self.move(request, Failed(problem))
            else:
                if step.scoring is not None and one is not None:
                    del request.odds[step.start :]  # what a retracted request had
                    request.odds += one.scored
                yield request, step, one if step.draw is not None else None

    def _file(self, request: Request) -> None:
        state = request.state
        if state is State.DONE:
            self.reserve.ended(request.said)
            del self.requests[request.key], self.rooms[request.room]
            self._leave_group(request)
            self.timers.drop(request.key)
            return
        self.queues[state][request.key] = request
        if state in _IN_LINE:
            self.line.add(request)
        if self.timers.at(request.key) != request.due:
            self.timers.set(request.key, request.due)

    def _leave_group(self, request: Request) -> None:
        if request.of_room is not None:
            group = self.groups[request.of_room]
            del group[request.key]
            if not group:
                del self.groups[request.of_room]

    def _unfile(self, request: Request) -> None:
        del self.queues[request.state][request.key]
        if self.cohort.members:
            self.cohort.drop(request)
        if request.state in _IN_LINE:
            self.line.discard(request)

    def _carry_out(self, effect: Effect | Booking) -> None:
        match effect:
            case Free(blocks, slot):
                self.free(Held(blocks, slot))
            case Hold(room, attempt, blocks, slot):
                self.quarantine.hold((room, attempt), Held(blocks, slot))
            case Save() | Load() | FreeHost():
                self.host.carry_out(effect)
            case _:
                self.outbox.append(effect)

    def _said(self, output: Output) -> None:
        self.counters["tokens_out"] += len(output.tokens)
        if output.problem is not None:
            code = output.problem.code  # from a peer, perhaps: only our own make a counter
            self.counters[f"ended_{code if code in _CODES else 'other'}"] += 1
            for other in self.groups.get(output.room, {}).copy().values():
                self.move(other, Dropped())
        elif output.finish is not None:
            self.counters[f"ended_{output.finish}"] += 1

    def free(self, held: Held) -> None:
        self.blocks.give(held.blocks)
        if held.slot is not None:
            self.slots.give((held.slot,))

    def release(self, attempt: tuple[int, int]) -> bool:
        """What was held for an attempt is free again; False when nothing was."""
        held = self.quarantine.release(attempt)
        if held is None:
            return False
        self.free(held)
        return True

    def stats(self, queues: Iterable[tuple[str, tuple[State, ...]]]) -> SchedStats:
        return SchedStats(
            running=len(self.queues[State.RUNNING]),
            queues={name: sum(len(self.queues[s]) for s in states) for name, states in queues},
            blocks_used=self.blocks.used,
            blocks_total=self.blocks.total,
            blocks_quarantined=self.quarantine.blocks,
            slots_used=self.slots.used,
            host_blocks_used=self.host.used,
            host_blocks_total=self.host.total,
            rooms=len(self.rooms),
            counters={**self.counters, "prefix_blocks_evicted": self.blocks.cache.evicted},
            draining=self.is_draining,
        )
