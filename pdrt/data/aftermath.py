"""An attempt that is over while its memory may still be written: how the proof of quiet is sought.

Its writers are told to stop, and told again; the transport is asked to keep them out; of a peer
that died far away, the bootstrap server is asked who has its place now. Time proves nothing: it
only shows who is stuck.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from pdrt.data.asking import Asking
from pdrt.data.limits import Patience
from pdrt.data.outward import FindRoute, ForgetRoute, Outward, Revoke
from pdrt.data.prefill_peers import PrefillPeers
from pdrt.data.quarantine import Ledger
from pdrt.data.transfer import TERMINAL, Key, Leg, Receiver
from pdrt.messages import Source


class Aftermath:
    """What follows from a proof is the receivers' business; here it is only asked for."""

    def __init__(
        self,
        writers: Ledger[Key, str],
        peers: PrefillPeers,
        asking: Asking,
        patience: Patience,
        outbox: deque[Outward],
    ) -> None:
        self._writers, self._peers, self._asking = writers, peers, asking
        self._grace, self._outbox = patience.grace, outbox

    def revoke(self, receiver: Receiver) -> None:
        """Each of its writers' transports on its own: one may prove what another cannot."""
        transports = {leg.transport for leg in self._holding(receiver)}
        for transport in sorted(transports) or [""]:
            through = frozenset({transport} if transport else ())
            self._outbox.append(Revoke(receiver.key, through))

    def kept_out(self, receiver: Receiver, through: frozenset[str]) -> list[Leg]:
        """Whom such a revocation, when it holds, proves quiet."""
        return [leg for leg in self._holding(receiver) if not through or leg.transport in through]

    def chase(self, receiver: Receiver, now: float) -> None:
        self.revoke(receiver)
        if now < receiver.again_at:
            return
        self._asking.abort_again(receiver, self._writers.holders(receiver.key), now)
        for leg in self._holding(receiver):
            peer = self._peers.get(leg.peer)
            if peer is not None and self._peers.may_seek_heir(peer, now):
                self._outbox.append(ForgetRoute(*receiver.source))
                self._outbox.append(route_wish(receiver))

    def overdue(self, receivers: Iterable[Receiver], now: float) -> list[Receiver]:
        """Those that keep memory longer than the grace time."""
        over = (receiver for receiver in receivers if receiver.state in TERMINAL)
        return [receiver for receiver in over if now - receiver.over_at > self._grace]

    def stuck(self, receivers: Iterable[Receiver], now: float) -> set[str]:
        """The peers because of whom they do."""
        late = self.overdue(receivers, now)
        return {leg.peer for receiver in late for leg in self._holding(receiver)}

    def _holding(self, receiver: Receiver) -> list[Leg]:
        return [receiver.legs[rank] for rank in sorted(self._writers.holders(receiver.key))]


def route_wish(receiver: Receiver) -> FindRoute:
    host, port = receiver.source
    source = Source(host=host, port=port, dp_rank=receiver.dp_rank)
    return FindRoute(receiver.room, receiver.attempt, source)
