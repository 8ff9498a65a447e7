"""What a decode rank says of its attempts to the prefill ranks, and when it says so again.

Messages may get lost: a handshake is repeated to each rank that did not accept it (and rarely
to one that did), an abort to each rank that may still write, until it is known that it does not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import replace
from typing import Final

from pdrt.data.handshake import signed
from pdrt.data.limits import Patience
from pdrt.data.outward import Outward, Tell
from pdrt.data.peer import Health
from pdrt.data.prefill_peers import PrefillPeer, PrefillPeers
from pdrt.data.transfer import Leg, Receiver
from pdrt.keys import ClusterKey
from pdrt.messages import AbortTransfer, Attach

_AGAIN_ACCEPTED: Final = 5.0  # an accepted handshake is asked about so many times more slowly


class Asking:
    """One counter numbers all that is said: what a peer hears late, it can tell by it."""

    def __init__(
        self,
        attach: Attach,
        key: ClusterKey,
        peers: PrefillPeers,
        patience: Patience,
        outbox: deque[Outward],
    ) -> None:
        self._attach, self._key, self._peers = attach, key, peers
        self._again, self._outbox = patience.again, outbox
        self.number = 0

    def shake(self, receiver: Receiver, now: float) -> None:
        """To each rank whose turn it is."""
        for leg in receiver.legs.values():
            if (leg.record is None or receiver.needs_firsts) and leg.again_at <= now:
                is_first, leg.again_at = not leg.again_at, now + self._again
                peer = self._peers.get(leg.peer)
                if peer is not None and (is_first or peer.health is not Health.DEAD):
                    self._shake(receiver, leg, peer)
        self._plan(receiver)

    def accepted(self, receiver: Receiver, leg: Leg, now: float) -> None:
        leg.again_at = now + self._again * _AGAIN_ACCEPTED
        self._plan(receiver)

    def abort(self, receiver: Receiver, writers: Collection[str], now: float) -> None:
        """To all who are concerned, for the first time: those who need not write, too."""
        receiver.again_at = now + self._again
        for leg in receiver.legs.values():
            if (leg.rank in writers or not leg.writes) and (peer := self._peers.get(leg.peer)):
                self._abort(receiver, peer)

    def abort_again(self, receiver: Receiver, writers: Collection[str], now: float) -> None:
        """To those who may still write and are able to hear it."""
        receiver.again_at = now + self._again
        for rank in sorted(writers):
            peer = self._peers.get(receiver.legs[rank].peer)
            if peer is not None and peer.health is not Health.DEAD:
                self._abort(receiver, peer)

    def _plan(self, receiver: Receiver) -> None:
        receiver.again_at = min(leg.again_at for leg in receiver.legs.values())

    def _shake(self, receiver: Receiver, leg: Leg, peer: PrefillPeer) -> None:
        assert receiver.handshake is not None
        self.number += 1
        shake = replace(receiver.handshake, number=self.number, writes=leg.writes)
        if leg.writes:
            shake = replace(shake, slot=shake.slot + leg.place)
        else:
            shake = replace(shake, blocks=b"")
        message = signed(self._key, shake, self._attach.endpoint)
        self._outbox.append(Tell(peer.endpoint, message))

    def _abort(self, receiver: Receiver, peer: PrefillPeer) -> None:
        assert receiver.over is not None, "it is over"
        self.number += 1
        room, attempt = receiver.key
        message = AbortTransfer(
            room=room,
            attempt=attempt,
            session=self._attach.session,
            number=self.number,
            reason=receiver.over.reason,
            is_served=receiver.over.is_served,
            is_leaving=receiver.over.is_leaving,
        )
        self._outbox.append(Tell(peer.endpoint, message))
