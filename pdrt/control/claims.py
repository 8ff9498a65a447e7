"""A client's bootstrap_room is an idempotency key: the same one never runs twice at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pdrt.errors import Conflict


@contextmanager
def claimed(rooms: set[int], room: int | None) -> Iterator[None]:
    """Keep `room` in `rooms` meanwhile; None is no key. Raises Conflict when it is there."""
    if room is None:
        yield
        return
    if room in rooms:
        raise Conflict(f"bootstrap_room {room} is in flight")
    rooms.add(room)
    try:
        yield
    finally:
        rooms.discard(room)
