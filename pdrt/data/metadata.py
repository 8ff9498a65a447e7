"""Metadata slots: 64 bytes each, by which a writer says "your KV is complete".

The promise: a slot counts only when its CRC is right and room, attempt and kv_len are the ones
that are waited for. A torn or damaged record is "not yet"; a sound record of somebody else is
counted as stale and ignored, however often the slot is reused.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Final

import numpy as np
from crc32c import crc32c

from pdrt.data.events import SlotRecord
from pdrt.data.memory import SLOT_BYTES

MAX_SPEC_TOKENS: Final = 7

# room, attempt, status, number of speculative tokens, kv_len, cached_tokens, token, logprob,
# speculative tokens, CRC-32C of the 60 bytes before it
_SLOT: Final = struct.Struct("<QIHHIIIf7II")
_STATUS_WORD: Final = 3  # status and count: never 0 once written, 0 when wiped
_CRC_WORD: Final = 15
_UNJUDGED: Final = -1


def pack_slot(record: SlotRecord) -> bytes:
    """The 64 bytes of a record. Raises ValueError for what does not fit."""
    spec = record.spec_tokens
    if len(spec) > MAX_SPEC_TOKENS:
        raise ValueError(f"{len(spec)} speculative tokens, at most {MAX_SPEC_TOKENS} fit a slot")
    try:
        body = _SLOT.pack(
            record.room,
            record.attempt,
            record.status,
            len(spec),
            record.kv_len,
            record.cached_tokens,
            record.token,
            record.logprob,
            *(spec + (0,) * (MAX_SPEC_TOKENS - len(spec))),
            0,
        )[:-4]
    except (struct.error, OverflowError) as error:
        raise ValueError(f"{record} does not fit a slot: {error}") from error
    return body + crc32c(body).to_bytes(4, "little")


def unpack_slot(data: bytes) -> SlotRecord | None:
    """The record in 64 bytes, or None when the CRC says that there is none."""
    body = data[:-4]
    if crc32c(body) != int.from_bytes(data[-4:], "little"):
        return None
    room, attempt, status, count, kv_len, cached, token, logprob, *rest = _SLOT.unpack(data)
    if count > MAX_SPEC_TOKENS:
        return None
    return SlotRecord(
        room, attempt, status, kv_len, cached, token, logprob, spec_tokens=tuple(rest[:count])
    )


def disagreement(records: Mapping[str, SlotRecord]) -> str:
    """In what the records of several ranks differ, naming two of them; empty when they agree."""
    (first, wanted), *others = ((rank, _vouched(record)) for rank, record in records.items())
    for rank, vouched in others:
        for what, value in vouched.items():
            if value != wanted[what]:
                return f"{first} and {rank} disagree: {what} {wanted[what]} and {value}"
    return ""


def _vouched(record: SlotRecord) -> dict[str, object]:
    """All but what may be rounded otherwise."""
    return {
        "token": record.token,
        "kv_len": record.kv_len,
        "status": record.status,
        "cached_tokens": record.cached_tokens,
        "spec_tokens": record.spec_tokens,
    }


class MetadataBufferPool:
    """The slots of a decode rank, in rows of `writers`, and which of them are waited for.

    A scan is one vectorised look at the slots that are waited for, however many there are
    besides; CRCs are computed for candidates only, and for a stale record only once.
    """

    def __init__(self, view: memoryview, rows: int, writers: int = 1) -> None:
        self.writers = writers
        slots = rows * writers
        self._bytes = view[: slots * SLOT_BYTES]
        self._words = np.frombuffer(self._bytes, dtype="<u4").reshape(slots, SLOT_BYTES // 4)
        self._wanted: dict[int, tuple[int, int, int]] = {}
        self._queue = np.empty(slots, dtype=np.int64)  # slots that are waited for: the first ...
        self._places = np.empty(slots, dtype=np.int64)  # ... and the place of each of them there
        self._judged = np.full(slots, _UNJUDGED, dtype=np.int64)  # CRC of a known stale record
        self._torn: set[int] = set()
        self.stale = 0
        self.corrupt = 0

    @property
    def waiting(self) -> int:
        return len(self._wanted)

    def slot_of(self, row: int, place: int) -> int:
        """Where the row's writer of this place writes."""
        assert 0 <= place < self.writers, f"place {place} of a row of {self.writers}"
        return row * self.writers + place

    def watch(self, slot: int, room: int, attempt: int, kv_len: int) -> None:
        """Wipe the slot and wait for this record. To be called before its writer learns of it."""
        self._wipe(slot)
        if slot not in self._wanted:
            self._places[slot] = len(self._wanted)
            self._queue[len(self._wanted)] = slot
        self._wanted[slot] = (room, attempt, kv_len)

    def unwatch(self, slot: int) -> None:
        """Wait no longer, and wipe."""
        self._wait_no_more(slot)
        self._wipe(slot)

    def _wait_no_more(self, slot: int) -> None:
        if self._wanted.pop(slot, None) is None:
            return
        last, place = self._queue[len(self._wanted)], self._places[slot]
        self._queue[place], self._places[last] = last, place

    def _wipe(self, slot: int) -> None:
        self._words[slot] = 0
        self._judged[slot] = _UNJUDGED
        self._torn.discard(slot)

    def scan(self) -> list[tuple[int, SlotRecord]]:
        """Slots that became valid since the last scan, each once."""
        slots = self._queue[: len(self._wanted)]
        words = self._words[slots]
        is_new = words[:, _STATUS_WORD] != 0
        if not is_new.any():
            return []
        is_new &= words[:, _CRC_WORD] != self._judged[slots]
        found = ((slot, self.look(slot)) for slot in sorted(slots[is_new].tolist()))
        return [(slot, record) for slot, record in found if record is not None]

    def look(self, slot: int) -> SlotRecord | None:
        """The record that this slot waits for, if it is there; then it waits no longer."""
        wanted = self._wanted.get(slot)
        if wanted is None:
            return None
        data = bytes(self._bytes[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES])
        record = unpack_slot(data)
        if record is None:
            self._note_torn(slot, data)
            return None
        if (record.room, record.attempt, record.kv_len) != wanted:
            self.stale += 1
            self._judged[slot] = int.from_bytes(data[-4:], "little")
            return None
        self._wait_no_more(slot)
        return record

    def _note_torn(self, slot: int, data: bytes) -> None:
        """A write may be halfway: look again next time, but count it once."""
        if any(data) and slot not in self._torn:
            self._torn.add(slot)
            self.corrupt += 1
