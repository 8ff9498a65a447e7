"""The cluster key and all that is derived from it: CURVE keys, bearer tokens, MACs.

Whoever holds the key is inside the trust boundary; nothing derived from it reveals it.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass, field

import zmq
from zmq.utils import z85

MIN_KEY_BYTES = 16


@dataclass(frozen=True, slots=True)
class ClusterKey:
    """One shared secret for all nodes and routers of a cluster."""

    secret: bytes = field(repr=False)

    @staticmethod
    def fresh() -> ClusterKey:
        return ClusterKey(secrets.token_bytes(32))

    @staticmethod
    def from_text(text: str) -> ClusterKey:
        """The key in a file or variable: any text of at least 16 bytes. Raises ValueError."""
        secret = text.strip().encode()
        if len(secret) < MIN_KEY_BYTES:
            raise ValueError(
                f"a cluster key needs at least {MIN_KEY_BYTES} characters, got {len(secret)}"
            )
        return ClusterKey(secret)

    def derive(self, purpose: str) -> bytes:
        """32 bytes for one purpose (HMAC-SHA256 as a key-derivation function)."""
        return hmac.digest(self.secret, b"pdrt:" + purpose.encode(), "sha256")

    def bearer(self) -> str:
        """The token for `authorization: Bearer` on bootstrap, leader and admin HTTP."""
        return self.derive("http").hex()

    def is_bearer(self, header: str | None) -> bool:
        """Whether an Authorization header's value carries the cluster's token."""
        return hmac.compare_digest(
            (header or "").encode(errors="surrogateescape"), f"Bearer {self.bearer()}".encode()
        )

    def curve_pair(self) -> tuple[bytes, bytes]:
        """(public, secret) CURVE keys in Z85 that every member uses, as server and as client."""
        secret = z85.encode(self.derive("curve"))
        return zmq.curve_public(secret), secret

    def mac(self, *parts: bytes) -> bytes:
        """16 bytes that only a holder of the key can make over these parts, in this order."""
        framed = b"".join(len(p).to_bytes(4, "little") + p for p in parts)
        return hmac.digest(self.derive("mac"), framed, "sha256")[:16]

    def is_mac(self, mac: bytes, *parts: bytes) -> bool:
        return hmac.compare_digest(mac, self.mac(*parts))

    def room_token(self, room: int, attempt: int, expires: float) -> str:
        """What the router gives both leaders: leave to work on (room, attempt) until then."""
        mac = self.mac(b"room", f"{room}.{attempt}.{expires:.3f}".encode())
        return f"{expires:.3f}:{mac.hex()}"

    def is_room_token(self, token: str, room: int, attempt: int, now: float) -> bool:
        """Whether `token` is genuine for (room, attempt) and not expired at wall clock `now`."""
        expires, _, _ = token.partition(":")
        try:
            genuine = hmac.compare_digest(token, self.room_token(room, attempt, float(expires)))
        except (ValueError, TypeError):  # not a number, or not ASCII
            return False
        return genuine and now < float(expires)
