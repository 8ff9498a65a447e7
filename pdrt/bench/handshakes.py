"""What becomes of connections before a word is said, from the events of libzmq's sockets.

A handshake that fails is silent by design: who knocks is told nothing. But each side can see its
own end of it, and that is enough to tell a wrong key from an empty address or a firewall.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, Literal, TypeAlias

import zmq
from zmq.utils.monitor import parse_monitor_message

Standing: TypeAlias = Literal["silent", "refused", "connected", "stranger", "known"]
_FAILED: Final = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
)
WHY: Final[Mapping[Standing, str]] = {
    "silent": "nothing comes back: is the address right, or does a firewall drop what goes there?",
    "refused": (
        "the connection is refused: nobody listens there, or a firewall rejects it; start `pdrt"
        " bench transfer --listen` there"
    ),
    "connected": (
        "it takes the connection, but shakes no hands: is it `pdrt bench transfer --listen`?"
    ),
    "stranger": (
        "it takes the connection and refuses the handshake: it has not the same cluster key"
        " (PDRT_SECURITY_KEY_FILE, PDRT_SECURITY_KEY), or is no `pdrt bench transfer --listen`"
    ),
    "known": "it has the same cluster key, but its answer does not come",
}


class Attempts:
    """How far the connection to a peer has come."""

    def __init__(self, events: zmq.Socket[bytes]) -> None:
        self._events = events
        self._standing: Standing = "silent"

    def look(self) -> Standing:
        for event in _arrived(self._events):
            self._standing = after(self._standing, event)
        return self._standing

    def close(self) -> None:
        self._events.close(linger=0)


def after(standing: Standing, event: int) -> Standing:
    """Who is refused dials again: in between it is still a stranger."""
    if event in _FAILED:
        return "stranger"
    match event:
        case zmq.EVENT_HANDSHAKE_SUCCEEDED:
            return "known"
        case zmq.EVENT_CLOSED:
            return "refused"
        case zmq.EVENT_CONNECTED:
            return "stranger" if standing == "stranger" else "connected"
        case zmq.EVENT_DISCONNECTED:
            return "silent" if standing == "known" else "stranger"
        case _:
            return standing


class Strangers:
    """How many connections to us were refused."""

    def __init__(self, events: zmq.Socket[bytes]) -> None:
        self._events = events
        self._refused = 0

    def look(self) -> int:
        self._refused += sum(event in _FAILED for event in _arrived(self._events))
        return self._refused

    def close(self) -> None:
        self._events.close(linger=0)


def _arrived(events: zmq.Socket[bytes]) -> Iterator[int]:
    while events.poll(0):
        yield int(parse_monitor_message(events.recv_multipart())["event"])
