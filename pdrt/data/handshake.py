"""The MAC in a handshake: only a member of the cluster can ask for writes, and only once.

It covers all that decides where bytes land. Single use comes from `number`, which is part of
it: a session's numbers only rise, and the receiver refuses what is not above the highest seen.
"""

from __future__ import annotations

from dataclasses import replace

from pdrt.keys import ClusterKey
from pdrt.messages import Handshake


def signed(key: ClusterKey, handshake: Handshake, endpoint: str) -> Handshake:
    """The same handshake with its token; `endpoint` is where its session listens."""
    return replace(handshake, token=key.mac(*_parts(handshake, endpoint)))


def is_genuine(key: ClusterKey, handshake: Handshake, endpoint: str) -> bool:
    return key.is_mac(handshake.token, *_parts(handshake, endpoint))


def _parts(handshake: Handshake, endpoint: str) -> tuple[bytes, ...]:
    numbers = (
        handshake.room,
        handshake.attempt,
        handshake.first_block,
        handshake.slot,
        handshake.prompt_tokens,
        handshake.decode_ranks,
        handshake.number,
        int(handshake.writes),
    )
    return (
        b"handshake",
        " ".join(map(str, numbers)).encode(),
        f"{handshake.expires:.3f}".encode(),
        handshake.session.encode(),
        endpoint.encode(),
        handshake.prompt_hash,
        handshake.blocks,
    )
