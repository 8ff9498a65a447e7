"""Two ranks meet: the writer tries the way, and the other looks whether it has really written."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdrt.data.memory import PoolMemory
from pdrt.data.probe import Prober, Signature, Way, reach_ourselves
from pdrt.data.receivers import Receivers
from pdrt.data.senders import Senders
from pdrt.data.transport.promise import Ended, Peer, Transport
from pdrt.data.ways import Ways, no_way, nothing_came
from pdrt.errors import TransferFailed
from pdrt.messages import Attached, FromPrefill, Process, Rank


@dataclass(slots=True)
class Meetings:
    """What came of each is told to the desk; the ways that were found are remembered."""

    transport: Transport
    memory: PoolMemory
    prober: Prober
    rank: Rank
    process: Process
    ways: Ways = field(default_factory=Ways)

    def ended(self, end: Ended) -> bool:
        """Whether this was the end of a trial's write."""
        return self.prober.ended(end)

    async def with_ourselves(self) -> list[Way]:
        """Raises ConfigError."""
        return await reach_ourselves(self.prober, self.transport, self.memory)

    def part(self, peer: str) -> None:
        self.transport.detach(peer)
        self.ways.forget(peer)

    async def go_to(self, peer: Peer, number: int, desk: Senders, endpoint: str) -> None:
        """The prefill side's part. `endpoint`: where we are ourselves."""
        sessions = desk.sessions
        try:
            way = await self.prober.reach(peer, Signature(peer.name, self.process, number))
        except TransferFailed as error:
            session = sessions.get(peer.name)
            there = f"{peer.name} at {session.endpoint if session else 'nowhere any more'}"
            problem = no_way(f"{self.rank} at {endpoint}", there, error, self.transport.offers)
            sessions.not_attached(peer.name, problem)
            return
        if session := sessions.get(peer.name):
            self.ways.know(peer.name, session.endpoint, way)
            sessions.attached(peer.name, way.transport, way.gb_per_s)
        else:  # it died meanwhile
            self.transport.detach(peer.name)

    def proven(
        self, message: FromPrefill, desk: Receivers, session: str, endpoint: str
    ) -> FromPrefill:
        """The decode side's: an Attached counts when the bytes that it speaks of are here."""
        if not isinstance(message, Attached) or message.session != session:
            return message
        sign = Signature(session, message.process, message.number)
        for peer in desk.peers.meeting(message):
            if peer.is_attached:
                continue  # said again
            if not sign.is_in(self.memory):
                return nothing_came(message, peer.endpoint, endpoint)
            way = Way(message.transport, message.gb_per_s)
            self.ways.know(peer.name, peer.endpoint, way)
        return message
