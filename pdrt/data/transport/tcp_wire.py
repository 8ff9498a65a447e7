"""What the tcp transport says, as bytes: greeting, frames, answers; each checked before use.

Greeting (who speaks first is the one who was called, so that nobody gets a proof for nothing):

    target: MAGIC, nonce
    writer: MAGIC, nonce, the memory that it means, the link that it belongs to, proof
    target: verdict, proof

A proof is HMAC-SHA256 under a key derived from the cluster key, over a label that names the
role and over all that was said before, both nonces included: nothing of it can be replayed or
mirrored. From the same bytes both derive two fresh keys. Then the writer sends frames, the
target answers; each header, with its table of destinations and its slot, and each answer ends
with a MAC over the number of messages before it: who sits on the path can neither move bytes to
another place, nor repeat or leave out a frame. The payload has no MAC and is not encrypted.
"""

from __future__ import annotations

import hmac
import os
from dataclasses import dataclass
from enum import IntEnum
from struct import Struct, unpack_from
from typing import Final

import msgpack
import numpy as np

from pdrt.data.layout import Runs
from pdrt.data.transport.promise import Areas, Key, SlotWrite
from pdrt.errors import BadMessage, TransferFailed
from pdrt.keys import ClusterKey

MAX_RUNS: Final = 1000  # with the header they are one vector of IOV_MAX
MAX_PAYLOAD: Final = 16 << 20
MAX_SLOT: Final = 4096
MAX_TEXT: Final = 512
MAX_OFFER: Final = 1024
NAME_BYTES: Final = 16  # of a memory, of a link

_MAGIC: Final = b"PDRT-TCP 1\r\n"
_NONCE: Final = 32
_PROOF: Final = 32
_MAC: Final = 16
_COUNT: Final = 8  # the frame's number: part of what is sealed, not sent

BANNER_BYTES: Final = len(_MAGIC) + _NONCE
HELLO_BYTES: Final = BANNER_BYTES + 2 * NAME_BYTES + _PROOF
VERDICT_BYTES: Final = 1 + _PROOF


@dataclass(frozen=True, slots=True)
class Offer:
    """Where a memory's owner listens. `memory` names it for as long as it lives."""

    host: str
    port: int
    memory: bytes

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def pack(self) -> bytes:
        packed: bytes = msgpack.packb([self.host, self.port, self.memory])
        return packed

    @staticmethod
    def unpack(data: bytes) -> Offer:
        """Raises TransferFailed for anything that is no offer."""
        try:
            fields = msgpack.unpackb(data[:MAX_OFFER], max_array_len=8)
        except (ValueError, msgpack.UnpackException) as error:
            raise TransferFailed(f"no tcp offer: {error}") from error
        match fields:
            case [str(host), int(port), bytes(memory), *_] if (
                0 < port < 1 << 16 and len(memory) == NAME_BYTES and "\0" not in host
            ):
                return Offer(host, port, memory)
        raise TransferFailed("no tcp offer: host, port and a memory's name wanted")


class Verdict(IntEnum):
    """What the target makes of a writer that has the key."""

    WELCOME = 0
    OTHER_MEMORY = 1  # another process listens there now
    FULL = 2


VERDICTS: Final = {
    Verdict.OTHER_MEMORY: "another process listens there now",
    Verdict.FULL: "it has too many connections",
}


@dataclass(frozen=True, slots=True)
class SessionKeys:
    frames: bytes
    answers: bytes


class Greeting:
    """Both sides' half of the greeting: what to send, and whether to believe what came."""

    def __init__(self, key: ClusterKey) -> None:
        self._key = key.derive("tcp")
        self._said = b""

    def banner(self) -> bytes:
        """Target: the first word."""
        self._said = _MAGIC + os.urandom(_NONCE)
        return self._said

    def hello(self, banner: bytes, memory: bytes, link: bytes) -> bytes:
        """Writer: the answer to a banner. Raises BadMessage when that is none."""
        if not banner.startswith(_MAGIC):
            raise BadMessage("no tcp transport of pdrt answers there")
        hello = _MAGIC + os.urandom(_NONCE) + memory + link
        self._said = banner + hello
        return hello + self._proof(b"writer")

    def heard(self, hello: bytes) -> tuple[bytes, bytes]:
        """Target: the memory and the link that a writer names. Raises BadMessage."""
        words, proof = hello[:-_PROOF], hello[-_PROOF:]
        self._said += words
        if not words.startswith(_MAGIC) or not hmac.compare_digest(proof, self._proof(b"writer")):
            raise BadMessage("a writer without the cluster key")
        return words[BANNER_BYTES : BANNER_BYTES + NAME_BYTES], words[-NAME_BYTES:]

    def verdict(self, verdict: Verdict) -> bytes:
        """Target: the last word."""
        self._said += bytes([verdict])
        return bytes([verdict]) + self._proof(b"target")

    def judged(self, answer: bytes) -> Verdict:
        """Writer: the last word, if it is genuine. Raises BadMessage."""
        self._said += answer[:1]
        if not hmac.compare_digest(answer[1:], self._proof(b"target")):
            raise BadMessage("who answers there does not have the cluster key")
        return Verdict(answer[0])

    def keys(self) -> SessionKeys:
        return SessionKeys(self._proof(b"frames"), self._proof(b"answers"))

    def _proof(self, label: bytes) -> bytes:
        return hmac.digest(self._key, label + b"\0" + self._said, "sha256")


class Kind(IntEnum):
    DATA = 1
    CANCEL = 2  # no more of this write; `total` says how much there was
    PING = 3


_HEADER: Final = Struct("<BBHIQQIHxxQ")
HEADER_BYTES: Final = _HEADER.size
_HAS_KEY: Final = 1
_IS_LAST: Final = 2
_ROW: Final = 16  # destination and length
_SLOT_AT: Final = 8


@dataclass(frozen=True, slots=True)
class Head:
    """A frame without its bytes. `total` is the whole write's size, said by its last frame."""

    kind: Kind
    write: int = 0
    key: Key | None = None
    is_last: bool = False
    total: int = 0
    runs: int = 0
    payload: int = 0
    slot: int = 0  # bytes

    @property
    def rest(self) -> int:
        """How many bytes follow the header, before the payload."""
        return self.runs * _ROW + (self.slot and self.slot + _SLOT_AT) + _MAC


class FrameBuffer:
    """One frame at a time, header to MAC, in a place of its own; either side has one."""

    def __init__(self, key: bytes) -> None:
        size = _COUNT + HEADER_BYTES + MAX_RUNS * _ROW + _SLOT_AT + MAX_SLOT + _MAC
        self.array = np.zeros(size, dtype=np.uint8)
        self.view = memoryview(self.array.data)
        self.sent_at = _COUNT  # where in the array the sent bytes begin
        self._key = key
        table = self.array[_COUNT + HEADER_BYTES :][: MAX_RUNS * _ROW]
        self._table: Areas = table.view("<i8").reshape(-1, 2)
        self._number = 0

    def pack(self, head: Head, runs: Runs | None = None, slot: SlotWrite | None = None) -> int:
        """Fill the buffer; how many bytes from `sent_at` on are to be sent."""
        room, attempt = head.key or (0, 0)
        flags = (_HAS_KEY if head.key else 0) | (_IS_LAST if head.is_last else 0)
        sizes = (flags, head.runs, head.payload)
        rest = (head.write, room, attempt, head.slot, head.total)
        _HEADER.pack_into(self.view, _COUNT, head.kind, *sizes, *rest)
        if runs is not None:
            self._table[: head.runs] = runs[:, 1:]
        end = _COUNT + HEADER_BYTES + head.rest - _MAC
        if slot:
            at = end - len(slot.data)
            self.view[at - _SLOT_AT : at] = slot.at.to_bytes(_SLOT_AT, "little")
            self.view[at:end] = slot.data
        self.view[end : end + _MAC] = self._mac(end)
        return end + _MAC - _COUNT

    @property
    def header(self) -> memoryview:
        """Where the next frame's header is to be read into."""
        return self.view[_COUNT : _COUNT + HEADER_BYTES]

    def head(self) -> Head:
        """The header that was read. Raises BadMessage for what cannot be one."""
        kind, flags, runs, payload, write, room, attempt, slot, total = _HEADER.unpack_from(
            self.view, _COUNT
        )
        if kind not in (1, 2, 3) or runs > MAX_RUNS or payload > MAX_PAYLOAD or slot > MAX_SLOT:
            raise BadMessage("no frame")
        key = (room, attempt) if flags & _HAS_KEY else None
        return Head(Kind(kind), write, key, bool(flags & _IS_LAST), total, runs, payload, slot)

    def rest(self, head: Head) -> memoryview:
        """Where what follows the header is to be read into."""
        begin = _COUNT + HEADER_BYTES
        return self.view[begin : begin + head.rest]

    def table(self, head: Head) -> tuple[Areas, SlotWrite | None]:
        """Where the payload shall go, and the slot after it. Raises BadMessage if it is forged."""
        end = _COUNT + HEADER_BYTES + head.rest - _MAC
        if not hmac.compare_digest(self.view[end : end + _MAC], self._mac(end)):
            raise BadMessage("a frame with a wrong MAC")
        areas = self._table[: head.runs]
        if not head.slot:
            return areas, None
        at = end - head.slot
        slot_at = int.from_bytes(self.view[at - _SLOT_AT : at], "little", signed=True)
        return areas, SlotWrite(slot_at, bytes(self.view[at:end]))

    def _mac(self, end: int) -> bytes:
        self.view[:_COUNT] = self._number.to_bytes(_COUNT, "little")
        self._number += 1
        return hmac.digest(self._key, self.view[:end], "sha256")[:_MAC]


class Status(IntEnum):
    PLACED = 0  # over: all of it has landed, the slot last
    FAILED = 1  # over: nothing of it lands any more
    STOP = 2  # it will fail: send no more of it
    PONG = 3


@dataclass(frozen=True, slots=True)
class Answer:
    status: Status
    write: int = 0
    text: str = ""


_ANSWER: Final = Struct("<BQH")


class Answers:
    """The answers of one connection, in order: packed by one side, parsed by the other."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0
        self._pending = b""

    def pack(self, answer: Answer) -> bytes:
        text = answer.text.encode(errors="replace")[:MAX_TEXT]
        words = _ANSWER.pack(answer.status, answer.write, len(text)) + text
        return words + self._mac(words)

    def parse(self, data: bytes) -> list[Answer]:
        """Answers that are complete now. Raises BadMessage for what is none."""
        self._pending += data
        found = []
        while len(self._pending) >= _ANSWER.size:
            status, write, length = unpack_from("<BQH", self._pending)
            end = _ANSWER.size + length
            if length > MAX_TEXT or status not in (0, 1, 2, 3):
                raise BadMessage("no answer")
            if len(self._pending) < end + _MAC:
                break
            words, mac = self._pending[:end], self._pending[end : end + _MAC]
            if not hmac.compare_digest(mac, self._mac(words)):
                raise BadMessage("an answer with a wrong MAC")
            text = words[_ANSWER.size :].decode(errors="replace")
            found.append(Answer(Status(status), write, text))
            self._pending = self._pending[end + _MAC :]
        return found

    def _mac(self, words: bytes) -> bytes:
        number = self._number.to_bytes(_COUNT, "little")
        self._number += 1
        return hmac.digest(self._key, number + words, "sha256")[:_MAC]
