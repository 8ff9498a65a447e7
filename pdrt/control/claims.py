"""A client's bootstrap_room is an idempotency key: the same one never runs twice at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pdrt.errors import Conflict


def claim(rooms: set[int], room: int | None) -> None:
    """Keep `room` in `rooms` until it is released; None is no key. Raises Conflict."""
    if room is None:
        return
    if room in rooms:
        raise Conflict(f"bootstrap_room {room} is in flight")
    rooms.add(room)


def release(rooms: set[int], room: int | None) -> None:
    if room is not None:
        rooms.discard(room)


@contextmanager
def claimed(rooms: set[int], room: int | None) -> Iterator[None]:
    """The same for as long as a block runs."""
    claim(rooms, room)
    try:
        yield
    finally:
        release(rooms, room)
