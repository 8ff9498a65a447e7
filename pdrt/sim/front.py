"""Requests at the router: both legs go out, tokens come back, refusals are made up for.

What a relay does about a failed leg is done here the same way: a full instance is not asked again
before its next beat, another one is tried up to three times, and a client whose tries are spent
reads the error: a 429 where all are full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from random import Random
from typing import Final

from pdrt.config import PolicySection
from pdrt.control.chance import Chance
from pdrt.control.choice import Choice
from pdrt.control.instances import Hold, Instance
from pdrt.control.legs import ATTEMPT_STEP
from pdrt.control.rooms import Rooms
from pdrt.control.substitutes import MAX_TRIES
from pdrt.data.commands import TransferCommand
from pdrt.errors import DeadlinePassed, Overloaded, PdrtError, Unavailable, tree
from pdrt.messages import AskPrefill, Output, Problem, Sampling, Source, Submit
from pdrt.sched.events import Cancelled, Rebound, ResumeLocally
from pdrt.sim.clock import Clock
from pdrt.sim.cluster import Leader
from pdrt.sim.cost import RequestCost
from pdrt.sim.fleet import Chosen, source_of
from pdrt.sim.machine import Front
from pdrt.sim.tally import Answer, Tally
from pdrt.sim.wire import Wire
from pdrt.sim.worker import Steady, Worker
from pdrt.sim.workload import Request, Workload

_TOKEN_BYTES: Final = 4
_ZEROS: Final = bytes(1 << 22)


@dataclass(slots=True, eq=False)
class Call:
    """One client's request, from its arrival to its end."""

    answer: Answer
    room: int = 0
    attempt: int = 0
    choice: Choice | None = None
    tokens: bytes = b""
    sampling: Sampling = field(default_factory=Sampling)
    deadline: float = 0.0
    tries: int = 0
    tried: set[Instance] = field(default_factory=set)
    has_begun: bool = False
    prefill_hold: Hold | None = None
    decode_hold: Hold | None = None

    def submit(self, now: float, source: Source | None = None) -> Submit:
        return Submit(
            room=self.room,
            attempt=self.attempt,
            request_id="",
            tokens=self.tokens,
            prompt_tokens=self.answer.input,
            sampling=self.sampling,
            time_left=max(self.deadline - now, 1e-3),
            source=source,
        )

    def release(self) -> None:
        """What is counted for it."""
        for hold in (self.prefill_hold, self.decode_hold):
            if hold is not None:
                hold.release()
        self.prefill_hold = self.decode_hold = None


class Router:
    """All that is outside the workers: `carry`, `said` and `went_on` are called by them."""

    def __init__(self, clock: Clock, cost: RequestCost, tally: Tally, seed: int) -> None:
        self.clock, self._cost, self.tally = clock, cost, tally
        self._rooms = Rooms(1, Chance(Random(seed).randbytes))
        self.calls: dict[int, Call] = {}  # by room
        self._left = 0  # requests that have not ended
        self._in_flight = 0
        self._waiting: Iterator[tuple[int, Request]] = iter(())
        self._is_closed_loop = False

    def connect(
        self, leaders: Sequence[Leader], wire: Wire, front: Front, policy: PolicySection
    ) -> None:
        self._wire, self._front, self._most = wire, front, policy.max_in_flight
        self._leader_of = {worker: leader for leader in leaders for worker in leader.workers}
        self._chosen = Chosen(self.clock, leaders, policy, lambda: not self._left)

    # Arrivals.

    def serve(self, workload: Workload) -> None:
        self._left = len(workload.requests)
        self._waiting = iter(enumerate(workload.requests))
        self._is_closed_loop = workload.concurrency > 0
        if self._is_closed_loop:
            for number, request in islice(self._waiting, workload.concurrency):
                self._arrive(number, request)
        else:
            self._await_next()
        last = max((request.at for request in workload.requests), default=0.0)
        longest = self._chosen.timeouts.request_s * MAX_TRIES
        self._chosen.begin(last + longest * max(1, len(workload.requests)))

    def _await_next(self) -> None:
        if (following := next(self._waiting, None)) is not None:
            number, request = following
            self.clock.at(request.at, lambda: self._came(number, request))

    def _came(self, number: int, request: Request) -> None:
        self._await_next()
        self._arrive(number, request)

    def _arrive(self, number: int, request: Request) -> None:
        now = self.clock.now
        call = Call(Answer(number, request.input, request.output, now))
        self._in_flight += 1
        if self._in_flight > self._most:
            self._refuse(call, Overloaded("as many requests as may be are in flight"))
            return
        own = number.to_bytes(_TOKEN_BYTES, "little")
        call.tokens = own + _ZEROS[: (request.input - 1) * _TOKEN_BYTES]
        call.sampling = Sampling(max_tokens=request.output, temperature=0.0, ignore_eos=True)
        call.deadline = now + self._chosen.timeouts.request_s
        self._choose(call)

    def _choose(self, call: Call) -> None:
        call.room, call.attempt, call.choice = self._rooms.mint(), 0, None
        weight = call.answer.input
        try:
            call.choice = choice = self._chosen.pick(call.room, weight, call.tried)
        except (Unavailable, Overloaded) as error:
            self._refuse(call, error)
            return
        self.calls[call.room] = call
        if choice.prefill is not None:
            call.prefill_hold = self._chosen.hold(choice.prefill, weight, choice.dp_rank)
        call.decode_hold = self._chosen.hold(choice.decode, weight + call.answer.output)
        self._on_its_way(lambda: self._open(call, choice))

    def _on_its_way(self, arrive: Callable[[], None]) -> None:
        delay = self._cost.front_ms * 1e-3
        self._front.run(self._cost.cpu_ms * 1e-3, lambda: self.clock.after(delay, arrive))

    # Legs.

    def _open(self, call: Call, choice: Choice) -> None:
        message = call.submit(self.clock.now, source_of(choice))
        if refused := self._chosen.leaders[choice.decode].submit(message):
            self._decode_failed(call, refused)
        else:
            self._open_prefill(call, choice)

    def _open_prefill(self, call: Call, choice: Choice) -> None:
        if choice.prefill is not None:
            leader = self._chosen.leaders[choice.prefill]
            if refused := leader.submit(call.submit(self.clock.now)):
                self._prefill_failed(call, refused)

    def _prefill_failed(self, call: Call, error: PdrtError) -> None:
        """Decode keeps its place; another prefill instance is joined to it, if there is one."""
        before = call.choice
        if before is None or before.prefill is None:
            return
        other: Choice | None = None
        if self._may_retry(call, before.prefill, error):
            other = self._another(call, before.decode)
        source = source_of(other) if other is not None else None
        if other is None or other.prefill is None or source is None:
            self._fail(call, error)
            return
        if call.prefill_hold is not None:
            call.prefill_hold.release()
        call.prefill_hold = self._chosen.hold(other.prefill, call.answer.input, other.dp_rank)
        call.choice = other
        call.attempt += ATTEMPT_STEP
        decode = self._chosen.leaders[before.decode].workers[0]
        decode.feed(Rebound(call.room, call.attempt, source))
        self._open_prefill(call, other)

    def _another(self, call: Call, decode: Instance) -> Choice | None:
        try:
            return self._chosen.pick_prefill(decode, call.room, call.answer.input, call.tried)
        except (Unavailable, Overloaded):
            return None

    def _decode_failed(self, call: Call, error: PdrtError) -> None:
        """Nothing is kept: others serve it, in a room of its own."""
        if call.choice is None:
            return
        if self._may_retry(call, call.choice.decode, error):
            self._leave(call)
            self._choose(call)
        else:
            self._fail(call, error)

    def _may_retry(self, call: Call, culprit: Instance, error: PdrtError) -> bool:
        if isinstance(error, Overloaded):
            culprit.overflowed()
        call.tries += 1
        call.tried.add(culprit)
        is_late = isinstance(error, DeadlinePassed)
        return not (call.has_begun or is_late) and call.tries < MAX_TRIES

    def _leave(self, call: Call) -> None:
        """Give back what it holds, and end what still runs of it."""
        call.release()
        self.calls.pop(call.room, None)
        if (choice := call.choice) is not None:
            for instance in (choice.prefill, choice.decode):
                self._cancel(call.room, instance)

    def _cancel(self, room: int, instance: Instance | None) -> None:
        for worker in self._chosen.leaders[instance].workers if instance is not None else ():
            if room in worker.book.rooms:
                worker.feed(Cancelled(room, "replaced"))

    # Ends.

    def _fail(self, call: Call, error: PdrtError) -> None:
        self._leave(call)
        self._refuse(call, error)

    def _refuse(self, call: Call, error: PdrtError) -> None:
        self.tally.failed(call.room, error.code)
        self._over()

    def _done(self, call: Call) -> None:
        answer = call.answer
        answer.e2e_s = self.clock.now - answer.began + self.tally.later
        call.release()
        del self.calls[call.room]
        self.tally.ended(call.room, answer)
        self._over()

    def _over(self) -> None:
        self._in_flight -= 1
        self._left -= 1
        if self._is_closed_loop and (following := next(self._waiting, None)) is not None:
            number, request = following
            self.clock.after(self.tally.later, lambda: self._arrive(number, request))

    # What workers say.

    def said(self, worker: Worker, outputs: Sequence[Output]) -> None:
        tokens = sum([len(one.tokens) for one in outputs])
        seconds = tokens * self._cost.token_cpu_ms * 1e-3
        self._front.run(seconds, lambda: self._heard(worker, outputs))

    def _heard(self, worker: Worker, outputs: Sequence[Output]) -> None:
        is_prefill = self._leader_of[worker].role == "prefill"
        for output in outputs:
            if output.finish is not None or output.problem is not None:
                self._leader_of[worker].ended(worker, output)
            call = self.calls.get(output.room)
            if call is None:
                continue
            if is_prefill:
                self._prefill_said(call, output)
            else:
                self._decode_said(call, output)

    def _prefill_said(self, call: Call, output: Output) -> None:
        if output.problem is not None and output.attempt == call.attempt:
            self._prefill_failed(call, _error(output.problem))
        elif output.finish == "prefilled" and call.prefill_hold is not None:
            call.prefill_hold.release()

    def _decode_said(self, call: Call, output: Output) -> None:
        now, tally = self.clock.now, self.tally
        if output.tokens:
            if call.has_begun:
                tally.next(call.room, now)
            else:
                call.has_begun = True
                call.answer.ttft_s = now - call.answer.began + tally.later
                tally.first(call.room, now)
        if output.problem is not None:
            self._decode_failed(call, _error(output.problem))
        elif output.finish is not None:
            self._done(call)

    def went_on(self, worker: Worker, steady: Steady) -> None:
        seconds = len(steady.rooms) * len(steady.ends) * self._cost.token_cpu_ms * 1e-3
        if seconds:
            self._front.run(seconds, lambda: self._one_by_one(steady.rooms))
        elif steady.since is None:
            self._one_by_one(steady.rooms)
        else:
            self.tally.run(steady.rooms, steady.since, steady.ends)

    def _one_by_one(self, rooms: Sequence[int]) -> None:
        now = self.clock.now
        for room in rooms:
            if room in self.calls:
                self.tally.next(room, now)

    # What workers ask.

    def carry(self, worker: Worker, effect: TransferCommand | AskPrefill) -> None:
        if isinstance(effect, AskPrefill):
            self._on_its_way(lambda: self._ask_again(worker, effect))
        else:
            self._wire.carry(worker, effect)

    def _ask_again(self, worker: Worker, ask: AskPrefill) -> None:
        """As the decode leader does: the prefill instance that computed it is asked again."""
        call = self.calls.get(ask.room)
        if call is None or call.choice is None or call.choice.prefill is None:
            return
        message = replace(call.submit(self.clock.now), attempt=ask.attempt, tokens=ask.tokens)
        leader = self._chosen.leaders[call.choice.prefill]
        if leader.submit(message) is not None:
            worker.feed(ResumeLocally(ask.room))


def _error(problem: Problem) -> PdrtError:
    return tree().get(problem.code, PdrtError)(problem.message)
