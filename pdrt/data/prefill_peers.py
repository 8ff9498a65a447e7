"""The prefill ranks that write to a decode rank: attached, pinged, suspected, given up.

Who is proven dead: a process whose end the kernel told (same host), and one that answers no pings
while its place (rank, address and bootstrap server) is registered anew by another process in a
newer epoch. The same process in a newer epoch proves nothing: it may still write.

A peer that lives but keeps memory in quarantine beyond the grace time is fenced: it gets no new
attempts until it has let go of all that is overdue, or is another process. The memory that it
may write stays retired, as a figure that is watched (`quarantined`, `peers_fenced`). This is the
choice because nothing else is proof: neither a deregistration nor the end of a connection keeps
an RDMA write from landing, and a restart of this side would cost all its other requests.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from pdrt.config import bracketed
from pdrt.data.limits import Patience
from pdrt.data.outward import ForgetRoute, HangUp, Outward, Tell, WatchLife
from pdrt.data.peer import Beat, Died, Health, Miss, feed
from pdrt.data.pulse import Pulse
from pdrt.data.transfer import Key
from pdrt.keys import ClusterKey
from pdrt.messages import Attach, Attached, Ping, Process, Rank, RankAddress, Refused, Route

_FORGET_S = 60.0  # a dead peer that nobody needs

Server: TypeAlias = tuple[str, int]  # a bootstrap server: host, port


@dataclass(frozen=True, slots=True)
class Receiving:
    """What a decode rank is."""

    rank: Rank
    decode_tp: int
    attach: Attach
    key: ClusterKey

    @property
    def session(self) -> str:
        return self.attach.session


@dataclass(slots=True)
class PrefillPeer:
    """One life of one prefill rank's process."""

    name: str
    address: RankAddress
    endpoint: str
    pulse: Pulse
    number: int  # of our meeting: what it says of an earlier one does not count
    health: Health = Health.UNKNOWN
    is_attached: bool = False
    is_fenced: bool = False
    transport: str = ""  # what it writes through; empty: it did not say
    needed_at: float = 0.0
    sought_at: float = 0.0  # when its successor was last asked for
    rooms: set[Key] = field(default_factory=set)  # attempts in which it has a part
    places: dict[tuple[Server, str], int] = field(default_factory=dict)  # rank -> its epoch

    @property
    def process(self) -> Process:
        return self.address.process

    @property
    def is_out(self) -> bool:
        """Whether it is no use to wait for it."""
        return self.is_fenced or self.health is Health.DEAD

    @property
    def condition(self) -> str:
        return "fenced" if self.is_fenced else self.health.value


class PrefillPeers:
    """Attaches to ranks, and keeps asking whether they live. The receivers do the rest."""

    def __init__(
        self, attach: Attach, patience: Patience, outbox: deque[Outward], counters: Counter[str]
    ) -> None:
        self._attach, self._patience = attach, patience
        self._outbox, self._counters = outbox, counters
        self._by_name: dict[str, PrefillPeer] = {}
        self._last_number = 0

    def get(self, name: str) -> PrefillPeer | None:
        return self._by_name.get(name)

    def all(self) -> list[PrefillPeer]:
        return list(self._by_name.values())

    def reach(self, route: Route, server: Server, rank: str, now: float) -> PrefillPeer:
        """The peer that has this place now; a new one is told who we are."""
        address = route.ranks[rank]
        endpoint = f"tcp://{bracketed(address.rank_ip)}:{address.rank_port}"
        process = address.process
        name = f"{endpoint}#{process.pid}.{process.started}"
        peer = self._by_name.get(name)
        if peer is None:
            pulse = Pulse(self._patience.every, self._patience.answer, now)
            same = self.by_process(process)
            number = same[0].number if same else self._new_number()
            peer = self._by_name[name] = PrefillPeer(name, address, endpoint, pulse, number)
            self._outbox.append(WatchLife(process))
            self._beat(peer, now)
        peer.places[server, rank] = address.instance_epoch
        peer.needed_at = now
        return peer

    def by_process(self, process: Process) -> list[PrefillPeer]:
        return [peer for peer in self._by_name.values() if peer.process == process]

    def answered(self, process: Process, number: int) -> None:
        """A pong."""
        for peer in self.by_process(process):
            peer.pulse.answered(number)
            feed(peer, Beat())

    def meeting(self, message: Attached | Refused) -> list[PrefillPeer]:
        """The peers that this process is, if it is our present meeting that it speaks of."""
        if message.process is None:
            return []
        peers = self.by_process(message.process)
        return [peer for peer in peers if peer.number == message.number]

    def meet_anew(self, process: Process) -> None:
        """It is told and tried once more, whatever it thinks of us."""
        number = self._new_number()
        for peer in self.by_process(process):
            peer.number, peer.is_attached = number, False

    def _new_number(self) -> int:
        self._last_number += 1
        return self._last_number

    def attached(self, message: Attached) -> list[PrefillPeer]:
        """The peers that this process is."""
        peers = self.meeting(message)
        for peer in peers:
            peer.is_attached, peer.transport = True, message.transport
        return peers

    def overdue(self, now: float) -> list[PrefillPeer]:
        """Ping who is due; returns who is dead from now on."""
        dead = [peer for peer in self.all() if self._beat(peer, now)]
        for peer in dead:
            self._give_up(peer)
        self._drop_unneeded(now)
        return dead

    def _beat(self, peer: PrefillPeer, now: float) -> bool:
        is_missing, is_due = peer.pulse.tick(now)
        has_died = is_missing and feed(peer, Miss()) is Health.DEAD
        if is_due:
            if not peer.is_attached:
                attach = replace(self._attach, number=peer.number)
                self._outbox.append(Tell(peer.endpoint, attach))
            ping = Ping(session=self._attach.session, number=peer.pulse.number)
            self._outbox.append(Tell(peer.endpoint, ping))
        return has_died

    def died(self, process: Process) -> list[PrefillPeer]:
        """The process has ended; its peers are forgotten here."""
        gone = self.by_process(process)
        for peer in gone:
            feed(peer, Died())
            self._give_up(peer)
            self.forget(peer)
        return gone

    def superseded(self, route: Route, server: Server) -> list[PrefillPeer]:
        """Peers whose places others have now: they are dead, and forgotten here.

        On our own host the kernel knows better.
        """
        gone = [p for p in self.all() if self._is_superseded(p, route, server)]
        for peer in gone:
            feed(peer, Died())
            peer.is_attached = False
            self._counters["peers_lost"] += 1
            self.forget(peer)
        return gone

    def _is_superseded(self, peer: PrefillPeer, route: Route, server: Server) -> bool:
        if peer.health is not Health.DEAD or peer.process.host == self._attach.process.host:
            return False  # who answers is not dead, whoever has its place; it may be draining
        return any(
            at == server
            and (heir := route.ranks.get(rank)) is not None
            and heir.rank_ip == peer.address.rank_ip
            and heir.instance_epoch > epoch
            and heir.process != peer.process
            for (at, rank), epoch in peer.places.items()
        )

    def may_seek_heir(self, peer: PrefillPeer, now: float) -> bool:
        """Whether to ask who has the dead peer's place now: only its death frees our memory."""
        is_local = peer.process.host == self._attach.process.host
        is_early = now - peer.sought_at < self._patience.every
        if is_local or is_early or peer.health is not Health.DEAD:
            return False
        peer.sought_at = now
        return True

    def fence(self, stuck: Collection[str]) -> list[PrefillPeer]:
        """These keep memory longer than the grace time; returns who did not before."""
        fenced = [p for p in self.all() if p.name in stuck and not p.is_fenced]
        for peer in self.all():
            peer.is_fenced = peer.name in stuck
        self._counters["peers_fenced"] += len(fenced)
        return fenced

    def forget(self, peer: PrefillPeer) -> None:
        del self._by_name[peer.name]
        self._outbox.append(HangUp(peer.endpoint))

    def _give_up(self, peer: PrefillPeer) -> None:
        self.meet_anew(peer.process)
        self._counters["peers_lost"] += 1
        self._outbox.extend(ForgetRoute(*server) for server, _ in peer.places)

    def _drop_unneeded(self, now: float) -> None:
        for peer in self.all():
            if peer.health is not Health.DEAD or peer.rooms:
                continue
            if now - peer.needed_at > _FORGET_S:
                self.forget(peer)
