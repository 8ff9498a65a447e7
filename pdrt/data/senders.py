"""The prefill side of all transfers of a rank: decisions only, no socket, thread or clock.

Promises: SendEnded comes exactly once for each expected attempt, when no write of it is open
any more; Quiesced is said only then, and after it no write of that attempt is started: an
attempt that is over is never bound again, and a handshake that comes too late is refused.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from typing import assert_never

from pdrt.data.chunks import write_of
from pdrt.data.commands import SendBlocks, TellFirsts
from pdrt.data.early import Early, EarlyHandshakes
from pdrt.data.events import SendEnded, SenderReady, SendFailed, TransferEvent
from pdrt.data.firsts import FirstsTeller
from pdrt.data.handshake import is_genuine
from pdrt.data.limits import Limits, Patience
from pdrt.data.openwrites import OpenWrite, OpenWrites
from pdrt.data.outward import AbortWrite, Outward, StartWrite
from pdrt.data.past import Past
from pdrt.data.quarantine import Ledger
from pdrt.data.sessions import Sending as Sending
from pdrt.data.sessions import Session, Sessions
from pdrt.data.targets import target_of, told
from pdrt.data.transfer import (
    TERMINAL,
    AllWritten,
    Broke,
    ChunkGiven,
    DecodeLeft,
    DecodeServed,
    Key,
    SayFailed,
    Sender,
    SendInput,
    ShookHands,
    State,
    Stopped,
    StopWrites,
    Target,
    feed_sender,
)
from pdrt.data.transport.promise import Ended, Write
from pdrt.data.voice import Voice
from pdrt.errors import (
    DeadlinePassed,
    Illegal,
    Overloaded,
    PdrtError,
    PeerLost,
    TransferFailed,
)
from pdrt.messages import (
    AbortTransfer,
    Attach,
    FromDecode,
    Handshake,
    Ping,
    Problem,
    Process,
)


class Senders:
    """Feed it messages, ends and the scheduler's wishes; read `outbox` and `events`."""

    def __init__(self, me: Sending, limits: Limits, patience: Patience) -> None:
        self._me, self._patience = me, patience
        self.outbox: deque[Outward] = deque()
        self.events: deque[TransferEvent] = deque()
        self.counters: Counter[str] = Counter()
        self.sessions = Sessions(me, limits, patience, self.outbox, self.counters)
        self.rooms: dict[Key, Sender] = {}
        self.early = EarlyHandshakes(limits.rooms_per_peer)
        self.writes: Ledger[Key, int] = Ledger()
        self._open = OpenWrites(patience)
        self._voice = Voice(me.rank, self.outbox)
        self._firsts = FirstsTeller(self._voice)
        self._outcomes: Past[Problem | None] = Past(limits.outcomes)
        self._last_write = 0
        self._leaving: Problem | None = None  # why nothing is begun any more

    # What the scheduler wants.

    def expect(self, sender: Sender) -> None:
        """A request whose prompt this rank will compute."""
        key = sender.key
        if key in self.rooms:
            raise Illegal("senders", self.rooms[key].state, sender)
        self.rooms[key] = sender
        if self._leaving:
            self._feed(sender, Stopped(self._leaving))
            return
        if problem := self._outcomes.get(key):  # decode gave it up before we heard of it
            self._feed(sender, DecodeLeft(problem))
            return
        for handshake in self.early.take(key):
            if session := self.sessions.get(handshake.session):
                self._shake_known(sender, session, handshake)

    def started(self, key: Key) -> None:
        """The prompt's computation began."""
        if sender := self.rooms.get(key):
            for session in self._targets(sender):
                self._voice.started(session, key)

    def tell_firsts(self, firsts: TellFirsts) -> None:
        """The first tokens are drawn: they go ahead of the blocks, and need not wait for any."""
        sender = self.rooms.get((firsts.room, firsts.attempt))
        if sender is not None and sender.state not in TERMINAL:
            self._firsts.tell(sender, firsts, self._targets(sender))

    def send(self, chunk: SendBlocks, now: float) -> None:
        """A chunk is computed; the one with `last` ends the prompt."""
        sender = self.rooms.get((chunk.room, chunk.attempt))
        if sender is None or sender.state in TERMINAL:
            return  # SendEnded has been told, or will be
        self._feed(sender, ChunkGiven())
        sender.is_last_given = chunk.last is not None
        for target in sender.targets.values():
            if target.writes:
                self._give(sender, target, self._write(chunk, target), now)
        self._go_on(sender)

    def _give(self, sender: Sender, target: Target, write: Write, now: float) -> None:
        """A slot waits for all earlier writes to its rank, whatever order the transport keeps."""
        sender.given_bytes += write.size
        if write.slot is not None and target.open:
            target.last = write
        elif write.size:
            self._start(sender, target, write, now)

    def abort(self, key: Key, problem: Problem) -> None:
        """The scheduler gave it up."""
        if sender := self.rooms.get(key):
            self._feed(sender, Stopped(problem))

    def leave(self, problem: Problem, _now: float) -> None:
        """Give up all of them, and take no more."""
        self._leaving = problem
        for sender in list(self.rooms.values()):
            self._feed(sender, Stopped(problem))
        for shake in self.early.expired(math.inf):
            if session := self.sessions.get(shake.session):
                self._decline(session, (shake.room, shake.attempt), problem)

    def farewell(self) -> None:
        """After `leave`, once no room is left: whatever was lost on the way, here is the proof."""
        assert not self.rooms
        for session in self.sessions.all():
            self._voice.left(session, self._me.process)

    # What the transport tells.

    def write_ended(self, end: Ended, now: float) -> None:
        write = self._open.end(end.id, now)
        if write is None:
            self.counters["duplicate_ends"] += 1
            return
        sender = self.rooms[write.key]
        is_released = self.writes.let_go(sender.key, end.id)
        if end.error is not None:
            self._break(sender, TransferFailed, f"a write failed: {end.error}")
        else:
            sender.done_bytes += write.size
            self.counters["sent_bytes"] += write.size
            self._written(sender, write, now)
        if is_released:
            self._forget(sender)

    def _written(self, sender: Sender, write: OpenWrite, now: float) -> None:
        target = sender.targets[write.session.name]
        target.open -= 1
        target.done_bytes += write.size
        if sender.state is not State.TRANSFERRING:
            return
        if write.has_slot or not sender.is_last_given:
            self._voice.progress(write.session, sender.key, target.done_bytes, write.has_slot)
        if target.last is not None and not target.open:
            last, target.last = target.last, None
            self._start(sender, target, last, now)
        self._go_on(sender)

    # What the decode workers say.

    def receive(self, message: FromDecode, now: float, wall: float) -> None:
        match message:
            case Attach():
                if session := self.sessions.greet(message, now):
                    self._drop(session, "it begins anew")
            case Ping():
                self.sessions.answer(message, now)
            case Handshake() | AbortTransfer():
                session = self.sessions.get(message.session)
                if session is None or not session.is_attached:
                    self.counters["dropped_unknown_session"] += 1
                elif isinstance(message, Handshake):
                    self._shake(session, message, now, wall)
                else:
                    self._leave(session, message, now)
            case _:
                assert_never(message)

    def _shake(self, session: Session, shake: Handshake, now: float, wall: float) -> None:
        if shake.number <= session.number:
            self.counters["dropped_late_handshake"] += 1
            return
        if not is_genuine(self._me.key, shake, session.endpoint):
            self.counters["dropped_forged_handshake"] += 1
            return
        session.number = shake.number
        self.sessions.heard(session, now)
        key = shake.room, shake.attempt
        sender = self.rooms.get(key)
        if sender is not None:
            self._shake_known(sender, session, shake)
        elif key in self._outcomes:
            self._repeat(session, key)
        elif self._leaving:
            self._decline(session, key, self._leaving)
        elif not shake.expires > wall:  # no number is no time to come either
            self._decline(session, key, self._problem(DeadlinePassed, key, "it came expired"))
        else:
            self._keep_early(session, shake, now + min(shake.expires - wall, self._patience.early))

    def _shake_known(self, sender: Sender, session: Session, shake: Handshake) -> None:
        if sender.problem is not None:
            self._voice.failed(session, sender.key, sender.problem)
        elif session.name in sender.targets:
            self._voice.accepted(session, sender.key)
            self._firsts.repeat(session, sender)
        else:
            self._bind(sender, session, shake)

    def _bind(self, sender: Sender, session: Session, shake: Handshake) -> None:
        try:
            target = target_of(sender, session, shake, self._targets(sender), self._me)
        except PdrtError as error:
            problem = self._problem(type(error), sender.key, str(error))
            self._decline(session, sender.key, problem)
            self._feed(sender, Broke(problem))
            return
        sender.targets[session.name] = target
        session.rooms.add(sender.key)
        self._voice.accepted(session, sender.key)
        if len(sender.targets) == shake.decode_ranks:
            first = min(t.first_block for t in sender.targets.values())
            self._feed(sender, ShookHands(first))

    def _keep_early(self, session: Session, shake: Handshake, expires_at: float) -> None:
        key = shake.room, shake.attempt
        pushed_out = self.early.put(key, Early(shake, expires_at))
        self._voice.accepted(session, key)
        if pushed_out is not None:
            self.counters["early_handshakes_pushed_out"] += 1
            self._decline_early(pushed_out, Overloaded, "too many rooms that nobody expects")

    def _decline_early(self, shake: Handshake, error: type[PdrtError], cause: str) -> None:
        key = shake.room, shake.attempt
        if session := self.sessions.get(shake.session):
            self._decline(session, key, self._problem(error, key, cause))

    def _leave(self, session: Session, abort: AbortTransfer, now: float) -> None:
        """Decode gave it up. Quiesced is said at once when nothing was promised to it."""
        self.sessions.heard(session, now)
        session.number = max(session.number, abort.number)
        key = abort.room, abort.attempt
        # Where it was the client, nobody reads this; else another try may do.
        because = f": {abort.reason}" if abort.reason else ""
        error = PeerLost if abort.is_leaving else TransferFailed
        problem = self._problem(error, key, f"the decode side gave it up{because}")
        self.early.drop_room(session.name, key)
        sender = self.rooms.get(key)
        is_target = sender is not None and session.name in sender.targets
        if sender is None:
            self._outcomes.remember(key, self._outcomes.get(key, problem))
        elif is_target and abort.is_served:
            self._feed(sender, DecodeServed())
        elif is_target or sender.state is State.BOOTSTRAPPING:
            self._feed(sender, DecodeLeft(problem, session.name))
        if not is_target:
            self._voice.quiesced(session, key)

    # What time and the kernel tell.

    def died(self, process: Process, _now: float) -> None:
        for session in self.sessions.died(process):
            self.counters["peers_lost"] += 1
            self._drop(session, "its process has died")

    def tick(self, now: float, wall: float) -> None:
        for session in self.sessions.silent(now):
            self.counters["peers_lost"] += 1
            self._lose(session, "it does not ping any more")
        for session in self.sessions.forgotten(now):
            self._drop(session, "it has been silent for long")
        for sender in [s for s in self.rooms.values() if s.deadline <= now]:
            self._break(sender, DeadlinePassed, "the deadline has passed")
        for shake in self.early.expired(now):
            self.counters["early_handshakes_expired"] += 1
            self._decline_early(shake, TransferFailed, "the request never came here")
        for write in self._open.stalled(now):
            self._break(self.rooms[write.key], TransferFailed, "the transport is stalled")

    def next_due(self, now: float) -> float:
        """When to tick next, at the latest."""
        return min([now + 0.1, *(s.silence.due_at for s in self.sessions.all())])

    def health(self) -> dict[str, str]:
        """Session -> how it is."""
        return {session.name: session.health.value for session in self.sessions.all()}

    @property
    def quarantined(self) -> int:
        """Attempts that are over, whose source blocks a write may still read."""
        return self.writes.sealed

    def overdue_quarantine(self, now: float) -> int:
        """Of these, how many have a write that was asked to end longer ago than the grace time."""
        return sum(self.writes.is_sealed(key) for key in self._open.overdue(now))

    def _drop(self, session: Session, cause: str) -> None:
        self.early.drop(session.name)
        self._lose(session, cause)

    def _lose(self, session: Session, cause: str) -> None:
        for key in list(session.rooms):
            self._break(self.rooms[key], PeerLost, f"decode worker at {session.endpoint}: {cause}")

    # How it is done.

    def _feed(self, sender: Sender, event: SendInput) -> None:
        was_over = sender.state in TERMINAL
        for effect in feed_sender(sender, event):
            match effect:
                case SenderReady() | SendFailed():
                    self.events.append(effect)
                case SayFailed(problem, but):
                    for session in self._targets(sender):
                        if session.name != but:
                            self._voice.failed(session, sender.key, problem)
                case StopWrites():
                    held = sorted(self.writes.holders(sender.key))
                    self.outbox.extend(AbortWrite(write) for write in held)
                case _:
                    assert_never(effect)
        is_over = not was_over and sender.state in TERMINAL
        if is_over and self.writes.seal(sender.key):
            self._forget(sender)

    def _forget(self, sender: Sender) -> None:
        """It is over and no write of it is open: source and target may be reused."""
        del self.rooms[sender.key]
        self._outcomes.remember(sender.key, sender.problem)
        self._firsts.forget(sender)
        self.counters[f"sends_{sender.state}"] += 1
        self.events.append(SendEnded(sender.room, sender.attempt, sender.problem))
        for session in self._targets(sender):
            session.rooms.discard(sender.key)
            if sender.state is not State.DONE:
                self._voice.quiesced(session, sender.key)

    def _go_on(self, sender: Sender) -> None:
        if sender.is_last_given and not self.writes.holders(sender.key):
            self._feed(sender, AllWritten())

    def _start(self, sender: Sender, target: Target, write: Write, now: float) -> None:
        session = self.sessions.get(target.session)
        assert session is not None, "its death would have ended the attempt"
        target.open += 1
        what = OpenWrite(sender.key, session, write.size, now, write.slot is not None)
        self.writes.hold(sender.key, write.id)
        self._open.begin(write.id, what)
        self.outbox.append(StartWrite(write))

    def _write(self, chunk: SendBlocks, target: Target) -> Write:
        self._last_write += 1
        return write_of(chunk, target, self._last_write)

    def _targets(self, sender: Sender) -> list[Session]:
        """The sessions that wait for it and live."""
        found = (self.sessions.get(name) for name in sender.targets)
        return [session for session in found if session is not None]

    def _break(self, sender: Sender, error: type[PdrtError], cause: str) -> None:
        if sender.state not in TERMINAL:
            self._feed(sender, Broke(self._problem(error, sender.key, cause)))

    def _problem(self, error: type[PdrtError], key: Key, cause: str) -> Problem:
        """Names all that is needed to find the fault."""
        sender = self.rooms.get(key)
        share = told(sender, self.sessions, self._me) if sender else "nobody yet"
        text = f"room {key[0]} attempt {key[1]}: {cause}; prefill rank {self._me.rank} to {share}"
        stage = "decode" if error is PeerLost else "transfer"  # who is lost, for who has to choose
        return Problem(code=error.code, message=text, stage=stage)

    def _repeat(self, session: Session, key: Key) -> None:
        """What was said at its end may have been lost."""
        problem = self._outcomes[key]
        if problem is None:
            self._firsts.repeat_old(session, key)
            self._voice.progress(session, key, 0, complete=True)
        else:
            self._decline(session, key, problem)

    def _decline(self, session: Session, key: Key, problem: Problem) -> None:
        self._outcomes.remember(key, problem)
        self._voice.failed(session, key, problem)
        self._voice.quiesced(session, key)
