"""One incoming connection: its frames' bytes go straight into the memory, or nowhere.

What is not admitted is read and dropped, counted, and told to its writer, once a write. The
thread waits for nothing but its own socket, and holds no leave to place bytes while it waits.
"""

from __future__ import annotations

import ctypes
import select
import socket
from collections.abc import Callable
from typing import Final

import numpy as np

from pdrt.data.memory import HostMemory
from pdrt.data.transport.promise import Areas, SlotWrite
from pdrt.data.transport.tcp_arrivals import Arrival, Arrivals
from pdrt.data.transport.tcp_grants import Grants, Permit
from pdrt.data.transport.tcp_socket import Vector
from pdrt.data.transport.tcp_wire import (
    MAX_PAYLOAD,
    MAX_RUNS,
    Answer,
    Answers,
    FrameBuffer,
    Head,
    Kind,
    SessionKeys,
    Status,
)
from pdrt.errors import PeerLost

_SCRATCH: Final = 256 << 10
_ANSWER_MS: Final = 10_000  # a writer that does not read its answers for so long is cut off


class Incoming:
    """Serves one connection in the thread that calls `serve`."""

    def __init__(
        self,
        sock: socket.socket,
        keys: SessionKeys,
        arrivals: Arrivals,
        memory: HostMemory,
        grants: Grants,
        count: Callable[[str], int],
    ) -> None:
        self._sock, self._fd = sock, sock.fileno()
        self._frame = FrameBuffer(keys.frames)
        self._answers = Answers(keys.answers)
        self._arrivals, self._memory, self._grants, self._count = arrivals, memory, grants, count
        self._base = memory.address
        self._vector = Vector(MAX_RUNS, MAX_PAYLOAD)
        self._scratch = memoryview(bytearray(_SCRATCH))
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)

    def serve(self) -> None:
        """Until the connection ends. Raises OSError then, BadMessage and PeerLost before."""
        while True:
            self._read(self._frame.header)
            head = self._frame.head()
            self._read(self._frame.rest(head))
            areas, slot = self._frame.table(head)
            if head.kind is Kind.PING:
                self._tell(Answer(Status.PONG))
                continue
            arrival = self._arrivals.open(head)
            self._take(head, areas, slot, arrival)
            if self._arrivals.book(head, slot, arrival):
                self._finish(head, arrival)

    def _take(self, head: Head, areas: Areas, slot: SlotWrite | None, arrival: Arrival) -> None:
        """Place the payload, or drop it and let the writer know."""
        permit = self._grants.find(head.key)
        if error := arrival.error or _refusal(permit, areas, slot):
            self._refuse(head, arrival, error)
            self._drop(head.payload)
            return
        self._vector.set(self._base, areas, head.payload)
        while self._vector.left and permit and not arrival.error:
            if not self._grants.begin(permit):
                self._refuse(head, arrival, _OVER)
                break
            try:
                is_more = self._vector.fill(self._fd)
            finally:
                self._grants.end(permit)
            if not is_more:
                self._readable.poll()
        self._drop(self._vector.left)

    def _refuse(self, head: Head, arrival: Arrival, error: str) -> None:
        self._count("dropped_frames")
        if self._arrivals.fail(arrival, error) and not head.is_last:
            self._tell(Answer(Status.STOP, head.write, error))

    def _finish(self, head: Head, arrival: Arrival) -> None:
        """All bytes are there: now the slot, then the answer."""
        slot = arrival.slot
        if slot and not arrival.error:
            arrival.error = self._place(head, slot)
        if arrival.error:
            self._tell(Answer(Status.FAILED, head.write, arrival.error))
        else:
            self._tell(Answer(Status.PLACED, head.write))

    def _place(self, head: Head, slot: SlotWrite) -> str | None:
        """The lock of the grants also orders it after the bytes that other threads placed."""
        permit = self._grants.find(head.key)
        error = _refusal(permit, _NOWHERE, slot)
        if error or permit is None:
            return error
        if not self._grants.begin(permit):
            return _OVER
        try:
            ctypes.memmove(self._base + slot.at, slot.data, len(slot.data))
        finally:
            self._grants.end(permit)
        return None

    def _read(self, view: memoryview) -> None:
        """Fill the view. Raises OSError when the connection ends."""
        while view:
            try:
                count = self._sock.recv_into(view)
            except BlockingIOError:
                self._readable.poll()
                continue
            if not count:
                raise ConnectionResetError("the connection was closed")
            view = view[count:]

    def _drop(self, count: int) -> None:
        while count:
            view = self._scratch[: min(count, _SCRATCH)]
            self._read(view)
            count -= len(view)

    def _tell(self, answer: Answer) -> None:
        data = self._answers.pack(answer)
        while data:
            try:
                data = data[self._sock.send(data) :]
            except BlockingIOError:
                poll = select.poll()
                poll.register(self._sock, select.POLLOUT)
                if not poll.poll(_ANSWER_MS):
                    raise PeerLost("a writer that does not read its answers") from None


_NOWHERE: Final[Areas] = np.empty((0, 2), dtype=np.int64)
_OVER: Final = "the attempt is not admitted there"
_OUTSIDE: Final = "a frame outside of what the attempt may fill"


def _refusal(permit: Permit | None, areas: Areas, slot: SlotWrite | None) -> str | None:
    """Why a frame may not be placed."""
    if permit is None:
        return _OVER
    if slot:
        areas = np.concatenate((areas, np.array([[slot.at, len(slot.data)]], dtype=np.int64)))
    return None if permit.covers(areas) else _OUTSIDE
