"""The decode workers that a prefill rank writes to: who they are, and whether they live.

Who is silent for long is forgotten, that its place goes to another; that proves nothing of the
writes to it, which end when the transport says so. Should it come back, it is met anew.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field, replace

from pdrt.data.layout import Part
from pdrt.data.limits import Limits, Patience
from pdrt.data.mapping import TargetRankMapping, check_heads
from pdrt.data.memory import SLOT_BYTES
from pdrt.data.outward import AttachPeer, DetachPeer, HangUp, Outward, Tell, WatchLife
from pdrt.data.peer import Beat, Died, Health, Miss, feed
from pdrt.data.pulse import Silence
from pdrt.data.transfer import Key
from pdrt.data.transport.promise import Peer
from pdrt.errors import ConfigError, Overloaded, PdrtError
from pdrt.keys import ClusterKey
from pdrt.messages import (
    PROTOCOL,
    Attach,
    Attached,
    KvLayout,
    Ping,
    Pong,
    Problem,
    Process,
    Rank,
    Refused,
)


@dataclass(frozen=True, slots=True)
class Sending:
    """What a prefill rank is."""

    rank: Rank
    process: Process
    layout: KvLayout
    pool_at: int  # of its own memory
    transport: str
    key: ClusterKey
    tp: int = 1  # of its instance


@dataclass(slots=True)
class Session:
    """One life of one decode worker."""

    attach: Attach
    silence: Silence
    part: Part  # what of each block is ours to write
    decode_ranks: int  # of its instance, which shake hands with us for each of its attempts
    health: Health = Health.UNKNOWN
    is_attached: bool = False  # if not, the way to it is being tried
    tried: int = 0  # the number of the meeting for which it was, or is
    dead_at: float = 0.0
    transport: str = ""  # what it is written through, once that was tried ...
    gb_per_s: float = 0.0  # ... and was so fast
    number: int = 0  # highest of its handshakes and aborts: what is not above it comes too late
    rooms: set[Key] = field(default_factory=set)
    moved_at: float = 0.0  # when a write to it last ended

    @property
    def name(self) -> str:
        return self.attach.session

    @property
    def endpoint(self) -> str:
        return self.attach.endpoint


class Sessions:
    """Attaches, pings and deaths. The senders do the rest."""

    def __init__(
        self,
        me: Sending,
        limits: Limits,
        patience: Patience,
        outbox: deque[Outward],
        counters: Counter[str],
    ) -> None:
        self._me = me
        self._limits, self._patience = limits, patience
        self._outbox, self._counters = outbox, counters
        self._by_name: dict[str, Session] = {}

    def get(self, name: str) -> Session | None:
        return self._by_name.get(name)

    def all(self) -> list[Session]:
        return list(self._by_name.values())

    def heard(self, session: Session, now: float) -> None:
        session.silence.heard(now)
        feed(session, Beat())

    def greet(self, attach: Attach, now: float) -> Session | None:
        """A decode worker wants to be written to. Said again, it is answered again.

        Returns one that begins anew, when it has given up what was promised to it before.
        """
        known = self._by_name.get(attach.session)
        if known is None:
            self._greet_new(attach, now)
            return None
        if replace(attach, number=known.attach.number) != known.attach:
            self._counters["dropped_attach_conflict"] += 1
            return None
        self.heard(known, now)
        was_attached, number = known.is_attached, known.attach.number
        if attach.number > number:
            known.attach = attach
        if not was_attached or attach.number < number:
            return None  # it will have its answer, or has it
        if attach.number == number:
            self._welcome(known)
            return None
        self._try_anew(known)
        return known

    def _greet_new(self, attach: Attach, now: float) -> None:
        try:
            session = self._new_session(attach, now)
        except PdrtError as error:
            self._refuse(attach, Problem.of(error, "attach"))
            return
        self._by_name[attach.session] = session
        self.heard(session, now)
        self._outbox.append(WatchLife(attach.process))
        self._try(session)

    def _try(self, session: Session) -> None:
        attach = session.attach
        session.is_attached, session.tried = False, attach.number
        peer = Peer(attach.session, attach.process, attach.region, attach.checksums)
        self._outbox.append(AttachPeer(peer, attach.number))

    def _try_anew(self, session: Session) -> None:
        self._outbox.append(DetachPeer(session.name))
        self._try(session)

    def attached(self, name: str, transport: str = "", gb_per_s: float = 0.0) -> None:
        session = self._by_name.get(name)
        if session is None:
            return
        if session.tried != session.attach.number:
            self._try_anew(session)
            return
        session.is_attached = True
        session.transport, session.gb_per_s = transport, gb_per_s
        self._welcome(session)

    def not_attached(self, name: str, problem: Problem) -> None:
        session = self._by_name.get(name)
        if session is None:
            return
        if session.tried != session.attach.number:
            self._try_anew(session)
            return
        del self._by_name[name]
        self._refuse(session.attach, problem)

    def answer(self, ping: Ping, now: float) -> None:
        session = self._by_name.get(ping.session)
        if session is None:
            self._counters["dropped_unknown_session"] += 1
            return
        self.heard(session, now)
        pong = Pong(session=session.name, number=ping.number, process=self._me.process)
        self._outbox.append(Tell(session.endpoint, pong))

    def died(self, process: Process) -> list[Session]:
        """The sessions of a dead process; they are forgotten here."""
        gone = [s for s in self._by_name.values() if s.attach.process == process]
        for session in gone:
            feed(session, Died())
            self._forget(session)
        return gone

    def silent(self, now: float) -> list[Session]:
        """Sessions that are dead from now on, because two pings in a row did not come."""
        missing = [s for s in self._by_name.values() if s.silence.is_missed(now)]
        dead = [s for s in missing if feed(s, Miss()) is Health.DEAD]
        for session in dead:
            session.dead_at = now
        return dead

    def forgotten(self, now: float) -> list[Session]:
        """Those that were silent for longer than the grace time; on our host the kernel tells."""
        here, grace = self._me.process.host, self._patience.grace
        gone = [
            session
            for session in self._by_name.values()
            if session.health is Health.DEAD and now - session.dead_at > grace
            if session.attach.process.host != here
        ]
        for session in gone:
            self._forget(session)
        return gone

    def _forget(self, session: Session) -> None:
        del self._by_name[session.name]
        self._outbox.append(DetachPeer(session.name))
        self._outbox.append(HangUp(session.endpoint))

    def _welcome(self, session: Session) -> None:
        message = Attached(
            session=session.name,
            rank=self._me.rank,
            process=self._me.process,
            transport=session.transport,
            gb_per_s=session.gb_per_s,
            number=session.tried,
        )
        self._outbox.append(Tell(session.endpoint, message))

    def _refuse(self, attach: Attach, problem: Problem) -> None:
        self._counters["refused_attach"] += 1
        message = Refused(
            session=attach.session,
            problem=problem,
            process=self._me.process,
            number=attach.number,
        )
        self._outbox.append(Tell(attach.endpoint, message))
        self._outbox.append(HangUp(attach.endpoint))

    def _new_session(self, attach: Attach, now: float) -> Session:
        """Raises ConfigError for what can never fit, Overloaded when there is no place."""
        if attach.protocol != PROTOCOL:
            raise ConfigError(f"protocol {attach.protocol} there, {PROTOCOL} here")
        if differences := self._me.layout.differences(attach.layout):
            raise ConfigError(f"KV layouts differ: {'; '.join(differences)}")
        mapping = self._mapping(attach)
        region = attach.region
        pool_end = region.pool_at + region.blocks * attach.layout.block_bytes
        if max(pool_end, region.slots_at + region.slots * SLOT_BYTES) > region.size:
            raise ConfigError("the described region is larger than its memory")
        if len(self._by_name) >= self._limits.peers:
            raise Overloaded(f"{len(self._by_name)} decode workers are attached, no more are taken")
        silence = Silence(self._patience.every, self._patience.answer, now)
        return Session(attach, silence, self._part(attach, mapping), mapping.handshakes)

    def _mapping(self, attach: Attach) -> TargetRankMapping:
        """Raises ConfigError for two ranks that have nothing to do with each other."""
        me, layout = self._me, self._me.layout
        check_heads(layout, me.rank.tp, me.tp)
        check_heads(attach.layout, attach.rank.tp, attach.tp)
        if attach.rank.cp:
            raise ConfigError(f"decode cp rank {attach.rank.cp}: a decode instance has cp = 1")
        total, is_latent = layout.model_kv_heads, layout.kind == "latent"
        mapping = TargetRankMapping(me.tp, attach.tp, attach.rank.tp, total, is_latent)
        if me.rank.tp not in mapping.span:
            raise ConfigError(
                f"decode tp rank {attach.rank.tp} of {attach.tp} is written by prefill tp ranks"
                f" {list(mapping.span)} of {me.tp}, not by {me.rank.tp}"
            )
        return mapping

    def _part(self, attach: Attach, mapping: TargetRankMapping) -> Part:
        """Where our heads lie in each block, here and there."""
        heads, size = mapping.heads_from(self._me.rank.tp), self._me.layout.head_bytes
        return Part(
            bytes=heads.count * size,
            src_at=self._me.pool_at + heads.source * size,
            src_stride=self._me.layout.block_bytes,
            dst_at=attach.region.pool_at + heads.target * size,
            dst_stride=attach.layout.block_bytes,
        )
