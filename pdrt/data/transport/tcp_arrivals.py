"""Which bytes of each write have come, over all connections of one link; pure bookkeeping.

The promise: of the threads that take in a write's frames exactly one is told that it is whole,
and this after the last byte has been placed or dropped; that one places the slot and answers.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from pdrt.data.transport.promise import SlotWrite
from pdrt.data.transport.tcp_wire import Head, Kind
from pdrt.errors import BadMessage

MAX_OPEN = 1024  # writes of one link that have begun and are not whole


@dataclass(slots=True, eq=False)
class Arrival:
    """One write. Once it has an error, the rest of it is dropped."""

    seen: int = 0
    total: int = -1  # until its last frame says so
    slot: SlotWrite | None = None
    error: str | None = None


class Arrivals:
    """The open writes of one link."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, Arrival] = {}

    def __len__(self) -> int:
        return len(self._open)

    def open(self, head: Head) -> Arrival:
        """The write that a frame belongs to. Raises BadMessage when there are too many."""
        with self._lock:
            arrival = self._open.get(head.write)
            if arrival is None:
                if len(self._open) >= MAX_OPEN:
                    raise BadMessage("too many writes at once")
                arrival = self._open[head.write] = Arrival()
            if head.kind is Kind.CANCEL:
                arrival.error = arrival.error or "aborted"
            return arrival

    def fail(self, arrival: Arrival, error: str) -> bool:
        """Whether this is the first that goes wrong with it, and its writer should know."""
        with self._lock:
            is_news = arrival.error is None
            arrival.error = arrival.error or error
            return is_news

    def book(self, head: Head, slot: SlotWrite | None, arrival: Arrival) -> bool:
        """A frame is through: whether its write is whole now. Raises BadMessage if it is more."""
        with self._lock:
            arrival.seen += head.payload
            arrival.slot = slot or arrival.slot
            if head.is_last or head.kind is Kind.CANCEL:
                arrival.total = head.total
            if arrival.total >= 0 and arrival.seen > arrival.total:
                raise BadMessage("more bytes than the write has")
            is_whole = arrival.seen == arrival.total
            if is_whole:
                del self._open[head.write]
            return is_whole
