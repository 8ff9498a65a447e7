"""Which tokens each event of a stream tells: said by its leader, kept by the router.

A mark is a comment in front of the events that it is of, and the router takes it out. The
promise: of these events the client gets all or none, so what is kept is what it has read, and
another instance can go on from there.
"""

from __future__ import annotations

from typing import Final

from pdrt.control.answer import Delta
from pdrt.control.http import Json, error_from_answer
from pdrt.control.sse import DONE, END, ERROR, MAX_EVENT
from pdrt.errors import BadMessage, PdrtError, PeerLost

MARK: Final = b":t "  # INDEX EVENTS CACHED FINISH ID,ID
_BROKE_OFF: Final = ERROR + b"data: "
_GOES_ON: Final = "-"


class Marks:
    """The leader's side. What no event told yet is told with the next one."""

    def __init__(self) -> None:
        self._untold: dict[int, tuple[int, ...]] = {}

    def of(self, delta: Delta, cached_tokens: int, events: int) -> bytes:
        """What goes before the events of `delta`; nothing when there are none."""
        ids = delta.ids
        if self._untold:
            ids = self._untold.pop(delta.index, ()) + ids
        if not events:
            self._untold[delta.index] = ids
            return b""
        finish, told = delta.finish or _GOES_ON, ",".join(map(str, ids))
        return f":t {delta.index} {events} {cached_tokens} {finish} {told}\n".encode()


class Heard:
    """The router's side: a leader's bytes come in, the client's go out, in whole events."""

    def __init__(self, sequences: int) -> None:
        self._rest = b""
        self._ids = [bytearray() for _ in range(sequences)]
        self._ends: list[str | None] = [None] * sequences
        self.cached_tokens = 0
        self.is_marked = False  # the leader says what its events tell
        self.is_over = False  # the last event has been told
        self.error: PdrtError | None = None  # what the leader's stream ended with

    @property
    def is_whole(self) -> bool:
        """Whether all sequences have ended: only the stream's own end may be missing."""
        return None not in self._ends

    def take(self, data: bytes) -> bytes:
        """What the client may read now; what comes after an error is nothing."""
        if self._rest:
            data, self._rest = self._rest + data, b""
        told: list[bytes] = []
        at, end = 0, len(data)
        try:
            while at < end and self.error is None:
                at = self._event(data, at, told) or self._hold(data, at)
        except BadMessage as error:  # the instance has lost its mind
            self.error = PeerLost(str(error))
        return told[0] if len(told) == 1 else b"".join(told)

    def forget_part(self) -> None:
        """Of events that the lost leader did not finish the client has nothing."""
        self._rest, self.error = b"", None

    def choices(self) -> list[Json]:
        """What the client has been told of each sequence. Raises BadMessage."""
        try:
            ids = [[int(one) for one in told.split(b",") if one] for told in self._ids]
        except ValueError as error:
            raise BadMessage(f"a mark names no token ids: {error}") from None
        return [
            {"ids": told, "finish": finish} for told, finish in zip(ids, self._ends, strict=True)
        ]

    def _hold(self, data: bytes, at: int) -> int:
        """To the end. Raises BadMessage for an event that does not."""
        if len(data) - at > MAX_EVENT:
            raise BadMessage(f"an event has more than {MAX_EVENT} bytes")
        self._rest = data[at:]
        return len(data)

    def _event(self, data: bytes, at: int, told: list[bytes]) -> int:
        """Where the next one begins; 0 when this one is not whole yet. Raises BadMessage."""
        if data.startswith(MARK, at):
            return self._marked(data, at, told)
        end = data.find(END, at) + 2
        if end < 2:
            return 0
        event = data[at:end]
        if event.startswith(_BROKE_OFF):
            self.error = error_from_answer(500, event[len(_BROKE_OFF) :], "decode")
            return end
        told.append(event)
        self.is_over = self.is_over or event == DONE
        return end

    def _marked(self, data: bytes, at: int, told: list[bytes]) -> int:
        begin = data.find(b"\n", at) + 1
        if not begin:
            return 0
        index, events, cached, finish, ids = _read(data[at : begin - 1])
        if index >= len(self._ids):
            raise BadMessage(f"a mark is of sequence {index}; there are {len(self._ids)}")
        self.is_marked, end = True, begin
        for _ in range(events):
            end = data.find(END, end) + 2
            if end < 2:
                return 0
        told.append(data[begin:end])
        if ids:
            self._ids[index] += ids + b","
        if finish != _GOES_ON:
            self._ends[index] = finish
        self.cached_tokens = max(self.cached_tokens, cached)
        return end


def _read(line: bytes) -> tuple[int, int, int, str, bytes]:
    """A mark without its line end. Raises BadMessage."""
    try:
        index, events, cached, finish, ids = line[len(MARK) :].split(b" ")
        numbers = int(index), int(events), int(cached)
        end = finish.decode()
    except ValueError:
        raise BadMessage(f"no mark: {line[:100]!r}") from None
    if min(numbers) < 0:
        raise BadMessage(f"no mark: {line[:100]!r}")
    return *numbers, end, ids
