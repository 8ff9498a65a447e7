"""Handshakes that came before their request: kept for a while, a bounded number for each peer."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from pdrt.data.transfer import Key
from pdrt.messages import Handshake


@dataclass(frozen=True, slots=True)
class Early:
    handshake: Handshake
    expires_at: float


class EarlyHandshakes:
    """Oldest first, by session. Whatever a peer sends, this does not grow beyond its bound."""

    def __init__(self, per_session: int) -> None:
        self._per_session = per_session
        self._sessions: dict[str, OrderedDict[Key, Early]] = {}

    def put(self, key: Key, early: Early) -> Handshake | None:
        """Keep it; returns the oldest one when that had to go for it."""
        waiting = self._sessions.setdefault(early.handshake.session, OrderedDict())
        waiting[key] = early
        waiting.move_to_end(key)
        return (
            waiting.popitem(last=False)[1].handshake if len(waiting) > self._per_session else None
        )

    def take(self, key: Key) -> list[Handshake]:
        """All handshakes for this attempt; they are kept no longer."""
        found = [w.pop(key).handshake for w in self._sessions.values() if key in w]
        self._drop_empty()
        return found

    def expired(self, now: float) -> list[Handshake]:
        late = [
            (session, key)
            for session, waiting in self._sessions.items()
            for key, early in waiting.items()
            if early.expires_at <= now
        ]
        gone = [self._sessions[session].pop(key).handshake for session, key in late]
        self._drop_empty()
        return gone

    def drop_room(self, session: str, key: Key) -> None:
        """The session does not want this attempt any more."""
        self._sessions.get(session, OrderedDict()).pop(key, None)
        self._drop_empty()

    def drop(self, session: str) -> None:
        """The session is gone."""
        self._sessions.pop(session, None)

    def _drop_empty(self) -> None:
        for session in [s for s, waiting in self._sessions.items() if not waiting]:
            del self._sessions[session]

    def __len__(self) -> int:
        return sum(map(len, self._sessions.values()))
