"""KV on its way from prefill workers to decode workers, as both real schedulers ask for it.

Modelled are the handshake's delay and the writes: of one prefill worker they go one after the
other, each hand-over (a chunk's blocks, the slot with the last one) as long as the cost file says
for so many runs of adjacent blocks. Small messages take no time. Nothing gets lost here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Final, TypeAlias

from pdrt.data.commands import (
    AbortReceiver,
    AbortSend,
    AdmitReceiver,
    ExpectHandshakes,
    OpenReceiver,
    SendBlocks,
    TellFirsts,
    TellStarted,
    TransferCommand,
)
from pdrt.data.events import (
    FirstTokens,
    Quiet,
    Received,
    ReceiveFailed,
    ReceiverReady,
    SendEnded,
    SenderReady,
    SendFailed,
    TransferEvent,
)
from pdrt.errors import Cancelled
from pdrt.messages import Problem
from pdrt.sim.clock import Call, Clock
from pdrt.sim.cost import Cost, transfer_s, write_us
from pdrt.sim.machine import Machine
from pdrt.sim.worker import Worker

Key: TypeAlias = tuple[int, int]  # room, attempt
_SLOT_BYTES: Final = 64
_GONE: Final = Problem.of(Cancelled("the other side has left"), "transfer")


class Link:
    """What one prefill worker writes, in its order. `share` of the time is work of its machine."""

    def __init__(self, clock: Clock, machine: Machine, share: float) -> None:
        self._clock, self._machine, self._share = clock, machine, share
        self._waiting: deque[tuple[float, Call]] = deque()
        self._is_busy = False

    def write(self, seconds: float, done: Call) -> None:
        self._waiting.append((seconds, done))
        if not self._is_busy:
            self._next()

    def _next(self) -> None:
        self._is_busy = bool(self._waiting)
        if not self._waiting:
            return
        seconds, done = self._waiting.popleft()
        rest = seconds * (1 - self._share)
        if self._share:
            ended = self._clock.after
            work = seconds * self._share
            self._machine.run(work, lambda: ended(rest, lambda: self._ended(done)), is_step=False)
        else:
            self._clock.after(rest, lambda: self._ended(done))

    def _ended(self, done: Call) -> None:
        done()
        self._next()


@dataclass(slots=True)
class Leg:
    """One attempt's way from its prefill worker to its decode worker, as far as they are known."""

    prefill: Worker | None = None
    decode: Worker | None = None
    admitted: AdmitReceiver | None = None
    writing: int = 0
    ending: tuple[Problem, bool] | None = None  # why it ends early; whether prefill was told


class Wire:
    """All legs of a cluster."""

    def __init__(self, clock: Clock, cost: Cost, machine: Machine) -> None:
        self.clock, self.cost, self._machine = clock, cost, machine
        self.legs: dict[Key, Leg] = {}
        self.links: dict[str, Link] = {}  # by the prefill worker's name
        self.moved_blocks = 0
        self._write_us = lru_cache(4096)(partial(write_us, cost.transfer))

    def carry(self, worker: Worker, effect: TransferCommand) -> None:
        key = effect.room, effect.attempt
        match effect:
            case OpenReceiver():
                self._leg(key).decode = worker
                worker.feed(ReceiverReady(*key))  # all peers are attached
            case ExpectHandshakes():
                self._leg(key).prefill = worker
                self._meet(key)
            case AdmitReceiver():
                self._leg(key).admitted = effect
                self._meet(key)
            case SendBlocks():
                self._send(key, effect)
            case AbortReceiver():
                self._end(key, is_served=effect.is_served)
            case AbortSend(problem=problem):
                self._stop(key, problem)
            case TellFirsts():
                self._told(key, effect)
            case TellStarted():
                pass  # decode only notes when; a message a request less

    def _leg(self, key: Key) -> Leg:
        leg = self.legs.get(key)
        if leg is None:
            leg = self.legs[key] = Leg()
        return leg

    def _tell(self, worker: Worker, event: TransferEvent) -> None:
        """As a message: whoever is in the middle of something hears it afterwards."""
        self.clock.at(self.clock.now, lambda: worker.feed(event))

    def _meet(self, key: Key) -> None:
        leg = self.legs[key]
        if leg.prefill is not None and leg.admitted is not None:
            delay = self.cost.request.handshake_ms * 1e-3
            self.clock.after(delay, lambda: self._ready(key, leg))

    def _ready(self, key: Key, leg: Leg) -> None:
        if self.legs.get(key) is leg and leg.prefill is not None and leg.admitted is not None:
            leg.prefill.feed(SenderReady(*key, leg.admitted.first_block))

    def _told(self, key: Key, effect: TellFirsts) -> None:
        leg = self.legs.get(key)
        if leg is not None and leg.decode is not None:
            told = FirstTokens(*key, effect.tokens, effect.logprobs, effect.tops)
            self._tell(leg.decode, told)

    # Writes.

    def _send(self, key: Key, effect: SendBlocks) -> None:
        leg = self.legs.get(key)
        if leg is None or leg.prefill is None or leg.ending is not None:
            return
        seconds = transfer_s(self.cost, self._runs(leg, effect), self._write_us)
        leg.writing += 1
        self._link(leg.prefill).write(seconds, lambda: self._written(key, leg, effect))

    def _link(self, worker: Worker) -> Link:
        link = self.links.get(worker.name)
        if link is None:
            share = self.cost.transfer.cpu_share
            link = self.links[worker.name] = Link(self.clock, self._machine, share)
        return link

    def _runs(self, leg: Leg, effect: SendBlocks) -> tuple[int, ...]:
        """Bytes of each write: blocks that lie side by side on both sides go as one."""
        assert leg.admitted is not None, "blocks are sent to who was admitted"
        offset = effect.first_block - leg.admitted.first_block
        targets = leg.admitted.blocks[offset : offset + len(effect.blocks)]
        runs = runs_of(effect.blocks, targets)
        slot = (_SLOT_BYTES,) if effect.last is not None else ()
        return (*(run * self.cost.block_bytes for run in runs), *slot)

    def _written(self, key: Key, leg: Leg, effect: SendBlocks) -> None:
        leg.writing -= 1
        self.moved_blocks += len(effect.blocks)
        if leg.ending is not None:
            if not leg.writing:
                self._cut(key, leg)
        elif effect.last is not None:
            del self.legs[key]
            assert leg.decode is not None
            assert leg.prefill is not None
            leg.decode.feed(Received(*key, effect.last))
            leg.prefill.feed(SendEnded(*key, None))

    # Ends before the end.

    def _end(self, key: Key, *, is_served: bool) -> None:
        """Decode leaves."""
        leg = self.legs.get(key)
        if leg is None or leg.ending is not None:
            return
        if leg.prefill is not None and not is_served:
            self._tell(leg.prefill, SendFailed(*key, _GONE))
        leg.ending = _GONE, is_served
        if not leg.writing:
            self._cut(key, leg)

    def _stop(self, key: Key, problem: Problem) -> None:
        """Prefill leaves."""
        leg = self.legs.get(key)
        if leg is None or leg.ending is not None:
            return
        if leg.decode is not None:
            self._tell(leg.decode, ReceiveFailed(*key, problem))
        leg.ending = problem, False
        if not leg.writing:
            self._cut(key, leg)

    def _cut(self, key: Key, leg: Leg) -> None:
        """Nothing of it is written any more."""
        del self.legs[key]
        assert leg.ending is not None
        problem, is_served = leg.ending
        if leg.prefill is not None:
            self._tell(leg.prefill, SendEnded(*key, None if is_served else problem))
        if leg.decode is not None and leg.admitted is not None:
            self._tell(leg.decode, Quiet(*key))


def runs_of(sources: Sequence[int], targets: Sequence[int]) -> list[int]:
    """How many blocks each write has."""
    runs: list[int] = []
    before = (-2, -2)
    for here in zip(sources, targets, strict=True):
        if here == (before[0] + 1, before[1] + 1):
            runs[-1] += 1
        else:
            runs.append(1)
        before = here
    return runs
