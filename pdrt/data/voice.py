"""What a prefill rank says of its attempts to the decode workers."""

from __future__ import annotations

from collections import deque

from pdrt.data.commands import TellFirsts
from pdrt.data.outward import Outward, Tell
from pdrt.data.sessions import Session
from pdrt.data.transfer import Key
from pdrt.messages import (
    Accepted,
    Failed,
    Firsts,
    FromPrefill,
    Left,
    Problem,
    Process,
    Progress,
    Quiesced,
    Rank,
    Started,
    pack_ids,
    pack_logprobs,
)


class Voice:
    """One sentence a method, to one session."""

    def __init__(self, rank: Rank, outbox: deque[Outward]) -> None:
        self._rank, self._outbox = rank, outbox

    def accepted(self, to: Session, key: Key) -> None:
        room, attempt = key
        self._say(to, Accepted(session=to.name, room=room, attempt=attempt, rank=self._rank))

    def started(self, to: Session, key: Key) -> None:
        room, attempt = key
        self._say(to, Started(session=to.name, room=room, attempt=attempt, rank=self._rank))

    def firsts(self, to: Session, told: TellFirsts) -> None:
        message = Firsts(
            session=to.name,
            room=told.room,
            attempt=told.attempt,
            rank=self._rank,
            tokens=pack_ids(told.tokens),
            logprobs=pack_logprobs(told.logprobs),
            tops=told.tops,
            cached_tokens=told.cached_tokens,
        )
        self._say(to, message)

    def progress(self, to: Session, key: Key, done_bytes: int, complete: bool = False) -> None:
        message = Progress(
            session=to.name,
            room=key[0],
            attempt=key[1],
            rank=self._rank,
            done_bytes=done_bytes,
            complete=complete,
        )
        self._say(to, message)

    def failed(self, to: Session, key: Key, problem: Problem) -> None:
        message = Failed(
            session=to.name, room=key[0], attempt=key[1], rank=self._rank, problem=problem
        )
        self._say(to, message)

    def quiesced(self, to: Session, key: Key) -> None:
        room, attempt = key
        self._say(to, Quiesced(session=to.name, room=room, attempt=attempt, rank=self._rank))

    def left(self, to: Session, process: Process) -> None:
        self._say(to, Left(session=to.name, process=process))

    def _say(self, to: Session, message: FromPrefill) -> None:
        self._outbox.append(Tell(to.endpoint, message))
