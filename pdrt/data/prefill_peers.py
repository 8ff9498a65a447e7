"""The prefill ranks that write to a decode rank: attached, pinged, suspected, given up."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from pdrt.config import bracketed
from pdrt.data.limits import Patience
from pdrt.data.outward import ForgetRoute, HangUp, Outward, Tell, WatchLife
from pdrt.data.peer import Beat, Died, Health, Miss, feed
from pdrt.data.pulse import Pulse
from pdrt.data.transfer import Key
from pdrt.messages import Attach, Ping, Process, RankAddress

_FORGET_S = 60.0  # a dead peer that nobody needs


@dataclass(slots=True)
class PrefillPeer:
    """One life of one prefill rank's process."""

    name: str
    endpoint: str
    process: Process
    pulse: Pulse
    health: Health = Health.UNKNOWN
    is_attached: bool = False
    needed_at: float = 0.0
    rooms: set[Key] = field(default_factory=set)  # attempts that it writes or will write
    sources: set[tuple[str, int]] = field(default_factory=set)


class PrefillPeers:
    """Attaches to ranks, and keeps asking whether they live. The receivers do the rest."""

    def __init__(
        self, attach: Attach, patience: Patience, outbox: deque[Outward], counters: Counter[str]
    ) -> None:
        self._attach, self._patience = attach, patience
        self._outbox, self._counters = outbox, counters
        self._by_name: dict[str, PrefillPeer] = {}

    def get(self, name: str) -> PrefillPeer | None:
        return self._by_name.get(name)

    def all(self) -> list[PrefillPeer]:
        return list(self._by_name.values())

    def reach(self, address: RankAddress, source: tuple[str, int], now: float) -> PrefillPeer:
        """The peer at this address in this life; a new one is told who we are."""
        endpoint = f"tcp://{bracketed(address.rank_ip)}:{address.rank_port}"
        process = address.process
        name = f"{endpoint}#{process.pid}.{process.started}"
        peer = self._by_name.get(name)
        if peer is None:
            pulse = Pulse(self._patience.every, self._patience.answer, now)
            peer = self._by_name[name] = PrefillPeer(name, endpoint, process, pulse)
            self._outbox.append(WatchLife(process))
            self._beat(peer, now)
        peer.sources.add(source)
        peer.needed_at = now
        return peer

    def by_process(self, process: Process) -> list[PrefillPeer]:
        return [peer for peer in self._by_name.values() if peer.process == process]

    def answered(self, process: Process, number: int) -> None:
        """A pong."""
        for peer in self.by_process(process):
            peer.pulse.answered(number)
            feed(peer, Beat())

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
                self._outbox.append(Tell(peer.endpoint, self._attach))
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

    def forget(self, peer: PrefillPeer) -> None:
        del self._by_name[peer.name]
        self._outbox.append(HangUp(peer.endpoint))

    def _give_up(self, peer: PrefillPeer) -> None:
        peer.is_attached = False
        self._counters["peers_lost"] += 1
        self._outbox.extend(ForgetRoute(*source) for source in peer.sources)

    def _drop_unneeded(self, now: float) -> None:
        for peer in self.all():
            if peer.health is not Health.DEAD or peer.rooms:
                continue
            if now - peer.needed_at > _FORGET_S:
                self.forget(peer)
