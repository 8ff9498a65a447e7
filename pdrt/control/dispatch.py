"""The dispatcher of a leader: one request to one worker, one stream of outputs back.

The promise: a request for a worker that is not connected is refused, never dropped; a stream
always ends, with the worker's last word, the worker's loss or the reader's leaving; a room is
forgotten at that end. Booking and telling happen in one breath, and one output costs O(1).
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, Self, TypeVar

from pdrt.control.affinity import Affinity, prefix_keys
from pdrt.errors import (
    BadRequest,
    Cancelled,
    Conflict,
    Draining,
    NotFound,
    Overloaded,
    PdrtError,
    PeerLost,
)
from pdrt.messages import (
    AbortRoom,
    Drain,
    Output,
    Outputs,
    Problem,
    Rank,
    Ready,
    Rebind,
    ResumeLocally,
    Submit,
    ToWorker,
)

STAGE: Final = "dispatch"
# A rank that knows a prompt's beginning may have so many times the least that any has in hand, and
# so many times the least that any was given of late, plus so many times the request's own tokens.
_SLACK: Final = 4.0
_EVEN: Final = 1.3
_SPARE: Final = 12
_FADING: Final = 1 - 1 / 1024  # "of late" is about so many requests
E = TypeVar("E", bound=PdrtError)


class WorkerLink(Protocol):
    """One dp rank's worker, as its supervisor sees it; `ready` is None while it is not there."""

    @property
    def rank(self) -> Rank: ...

    @property
    def ready(self) -> Ready | None: ...

    def tell(self, message: ToWorker) -> None:
        """Never waits. Raises PeerLost or Overloaded."""
        ...


@dataclass(frozen=True, slots=True)
class RankLoad:
    dp_rank: int
    is_connected: bool
    rooms: int
    tokens: int  # prompts, and the most that may follow them


@dataclass(frozen=True, slots=True)
class Load:
    rooms: int
    most_rooms: int  # high-water mark
    oldest_s: float
    ranks: tuple[RankLoad, ...]
    counters: Mapping[str, int]


class Stream:
    """The outputs of one room, for one reader; leaving the `with` early aborts the room.

    What the reader has not taken is kept whole, at most max_tokens tokens of each of its n
    sequences, so that a slow reader costs no more than its answer. Each read takes all of a
    sequence as one Output.
    """

    def __init__(
        self, submit: Submit, dp_rank: int, now: float, leave: Callable[[int, str, int], None]
    ) -> None:
        self.room, self.dp_rank, self.since = submit.room, dp_rank, now
        self.first_attempt = self.attempt = submit.attempt
        self.weight = weight_of(submit)
        self._left = _tokens_left(submit)  # of each sequence that goes on
        self._leave = leave
        self._kept: dict[int, list[Output]] = {}
        self._news = asyncio.Event()
        # Its worker goes on from there by itself, whoever prefills.
        self.has_said = bool(submit.said)

    @property
    def is_over(self) -> bool:
        """Nothing more comes."""
        return not self._left

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self, reason: str = "client_gone") -> None:
        """The reader leaves: the room is aborted unless it has ended. Twice is once."""
        if not self.is_over:
            self._leave(self.room, reason, -1)
        self._kept.clear()

    def stop(self, index: int, reason: str = "stop") -> None:
        """The reader wants no more of one sequence; with the last one the room ends."""
        if index in self._left:
            is_last = len(self._left) == 1
            if not is_last:
                del self._left[index]
            self._leave(self.room, reason, -1 if is_last else index)
        self._kept.pop(index, None)

    def __aiter__(self) -> AsyncIterator[Output]:
        return self

    async def __anext__(self) -> Output:
        """What a sequence gained since the last read; its last has `finish`, or all `problem`."""
        while not self._kept:
            if self.is_over:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        kept = self._kept.pop(next(iter(self._kept)))
        return kept[0] if len(kept) == 1 else _joined(kept)

    def put(self, output: Output) -> bool:
        """Take what the worker said; False when that is more than was asked for."""
        if output.problem is not None and output.index not in self._left:
            self.fail(output.problem)  # it ends all that go on
            return True
        left = self._left.get(output.index)
        if left is None:
            return True  # of a sequence that was stopped
        left -= len(output.tokens)
        if left < 0:
            return False
        self._left[output.index] = left
        self.has_said = self.has_said or bool(output.tokens)
        if output.problem is not None or output.finish == "prefilled":
            self._left.clear()
        elif output.finish is not None:
            del self._left[output.index]
        self._keep(output)
        return True

    def fail(self, problem: Problem) -> None:
        """All that goes on ends so."""
        index = next(iter(self._left), 0)
        self._left.clear()
        self._keep(Output(room=self.room, problem=problem, attempt=self.attempt, index=index))

    def _keep(self, output: Output) -> None:
        self._kept.setdefault(output.index, []).append(output)
        self._news.set()


@dataclass(slots=True)
class _Lane:
    """One worker and what it has in hand."""

    link: WorkerLink
    rooms: dict[int, Stream] = field(default_factory=dict)
    tokens: int = 0
    given: float = 0.0  # tokens, of late: conversations that stay come back with more of them
    owed: deque[AbortRoom | Drain] = field(default_factory=deque)  # its mailbox was full


class DPDispatcher:
    """All rooms of one leader, on the dp ranks of its instance. Call `catch_up` on a timer."""

    def __init__(
        self,
        links: Sequence[WorkerLink],
        clock: Callable[[], float],
        max_rooms: int = 65536,
        *,
        is_prefill: bool = False,
    ) -> None:
        self._lanes = {link.rank.dp: _Lane(link) for link in links}
        self._clock, self._max_rooms, self._is_prefill = clock, max_rooms, is_prefill
        self._streams: dict[int, Stream] = {}  # by room, oldest first
        self._affinity = Affinity()
        self._most_rooms = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.is_draining = False
        self.counters: Counter[str] = Counter()

    @property
    def rooms(self) -> int:
        """How many are in flight."""
        return len(self._streams)

    @property
    def tokens(self) -> int:
        """Of what is in flight; of answers the most that may follow, but none in prefill."""
        return sum(lane.tokens for lane in self._lanes.values())

    @property
    def is_full(self) -> bool:
        return len(self._streams) >= self._max_rooms

    @property
    def is_idle(self) -> bool:
        return not self._streams

    def is_idle_on(self, dp_ranks: Iterable[int]) -> bool:
        """Whether none of these ranks has a room."""
        return not any(self._lanes[dp].rooms for dp in dp_ranks)

    def is_in_flight(self, room: int) -> bool:
        return room in self._streams

    def submit(self, submit: Submit, dp_rank: int | None = None) -> Stream:
        """Give the request to its worker; when none is named, to the one that knows its beginning
        unless that has much more in hand than the least loaded one, which is next.

        Raises Draining, BadRequest (no such rank), Conflict (this attempt or a newer one is in
        flight), Overloaded or PeerLost, and then the worker has not got it. A newer attempt of
        a room takes the place of the older one, whose stream ends with a conflict.
        """
        older = self._streams.get(submit.room)
        if self.is_draining:
            raise self._refused(Draining("this instance is draining"))
        if older is not None and older.attempt >= submit.attempt:
            raise self._refused(Conflict(f"room {submit.room} is in flight already"))
        if older is None and self.is_full:
            raise self._refused(Overloaded(f"{len(self._streams)} requests are in flight"))
        keys = prefix_keys(submit.tokens, submit.salt) if len(self._lanes) > 1 else []
        lane = self._least(submit, keys) if dp_rank is None else self._lane(dp_rank)
        if older is not None:
            self._end(older, Conflict(f"attempt {submit.attempt} of this room took its place"))
        self._tell(lane, submit)
        stream = Stream(submit, lane.link.rank.dp, self._clock(), self._leave)
        if self._is_prefill:
            stream.weight = len(submit.tokens) // 4
        self._book(lane, stream)
        self._affinity.note(keys, stream.dp_rank)
        return stream

    def deliver(self, dp_rank: int, outputs: Outputs) -> None:
        """What a worker said of its rooms; what concerns none of them is counted and dropped."""
        lane = self._lanes[dp_rank]
        for output in outputs.items:
            stream = lane.rooms.get(output.room)
            if stream is None:
                self.counters["late_outputs"] += 1
            elif 0 <= output.attempt < stream.first_attempt:
                self.counters["stale_outputs"] += 1
            elif not stream.put(output):
                self._end(stream, PdrtError("the worker said more than max_tokens"))
            elif stream.is_over:
                self._forget(stream)
        self._pay(lane)

    def worker_lost(self, dp_rank: int, problem: Problem, *, is_head_alive: bool = False) -> None:
        """A worker of the rank is gone: all its rooms end now and may be tried again.

        When that was not tp 0, this may live on, and must let go of them.
        """
        lane = self._lanes[dp_rank]
        if not is_head_alive:
            lane.owed.clear()
        self.counters["rooms_lost"] += len(lane.rooms)
        for stream in list(lane.rooms.values()):
            self._forget(stream)
            stream.fail(_retryable(problem))
            if is_head_alive:
                self._owe(lane, AbortRoom(room=stream.room, reason="worker_lost"))

    def abort(self, room: int, reason: str) -> None:
        """End a room early. A room that is not in flight is no error."""
        if stream := self._streams.get(room):
            self.counters["aborted"] += 1
            self._end(stream, Cancelled(reason), reason)

    def _leave(self, room: int, reason: str, index: int) -> None:
        """A stream's reader wants no more of it, or of one of its sequences."""
        if index < 0:
            self.abort(room, reason)
        elif stream := self._streams.get(room):
            self.counters["stopped"] += 1
            abort = AbortRoom(room=room, reason=reason, index=index)
            self._owe(self._lanes[stream.dp_rank], abort)

    def rebind(self, message: Rebind) -> None:
        """The prefill side of a room is tried again. Raises NotFound, Conflict, PeerLost."""
        stream = self._stream(message.room)
        if message.attempt <= stream.attempt:
            raise Conflict(f"room {message.room} is at attempt {stream.attempt} already")
        if stream.has_said:
            raise Conflict(f"room {message.room} has its first token: decode asks for itself")
        self._tell(self._lanes[stream.dp_rank], message)
        stream.attempt = message.attempt

    def resume_locally(self, room: int, of_room: int = -1) -> None:
        """Nobody else will prefill this retracted room, or this sequence's part of one.

        Raises NotFound, PeerLost.
        """
        stream = self._stream(room if of_room < 0 else of_room)
        self._tell(self._lanes[stream.dp_rank], ResumeLocally(room=room))

    def drain(self) -> None:
        """Nothing new from now on; what is in flight goes on."""
        if not self.is_draining:
            self.is_draining = True
            for lane in self._lanes.values():
                self._owe(lane, Drain())

    async def idle(self) -> None:
        """Until no room is in flight."""
        await self._idle.wait()

    def catch_up(self) -> None:
        """Tell workers again what their full mailboxes did not take."""
        for lane in self._lanes.values():
            self._pay(lane)

    def load(self) -> Load:
        oldest = next(iter(self._streams.values()), None)
        return Load(
            rooms=len(self._streams),
            most_rooms=self._most_rooms,
            oldest_s=self._clock() - oldest.since if oldest else 0.0,
            ranks=tuple(
                RankLoad(dp, lane.link.ready is not None, len(lane.rooms), lane.tokens)
                for dp, lane in self._lanes.items()
            ),
            counters=dict(self.counters),
        )

    def _least(self, submit: Submit, keys: list[bytes]) -> _Lane:
        connected = [lane for lane in self._lanes.values() if lane.link.ready is not None]
        if not connected:
            raise self._refused(PeerLost("no worker of this instance is connected"))
        weight, fewest = weight_of(submit), min(lane.tokens for lane in connected)
        near = (lane for lane in connected if lane.tokens <= fewest + weight)
        least = min(near, key=lambda lane: lane.given)
        rank = self._affinity.find(keys)
        if rank is None or self._lanes[rank].link.ready is None:
            return least
        known, spare = self._lanes[rank], _SPARE * weight
        now = known.tokens <= _SLACK * fewest + spare
        late = known.given <= _EVEN * min(lane.given for lane in connected) + spare
        return known if now and late else least

    def _lane(self, dp_rank: int) -> _Lane:
        lane = self._lanes.get(dp_rank)
        if lane is None:
            raise self._refused(
                BadRequest(f"disagg_prefill_dp_rank: {dp_rank}; there are {len(self._lanes)} ranks")
            )
        if lane.link.ready is None:
            raise self._refused(PeerLost(f"the worker of dp rank {dp_rank} is not connected"))
        return lane

    def _stream(self, room: int) -> Stream:
        stream = self._streams.get(room)
        if stream is None:
            raise NotFound(f"room {room} is not in flight here")
        return stream

    def _book(self, lane: _Lane, stream: Stream) -> None:
        self._streams[stream.room] = lane.rooms[stream.room] = stream
        lane.tokens += stream.weight
        self._note_given(lane, stream.weight)
        self._most_rooms = max(self._most_rooms, len(self._streams))
        self._idle.clear()

    def _note_given(self, lane: _Lane, tokens: int) -> None:
        """One that is away counts as if it had as much as others: back, it is not flooded."""
        lanes = self._lanes.values()
        for each in lanes:
            each.given *= _FADING
        lane.given += tokens
        fair = max(each.given for each in lanes)
        for each in lanes:
            if each.link.ready is None:
                each.given = fair

    def _forget(self, stream: Stream) -> None:
        lane = self._lanes[stream.dp_rank]
        del self._streams[stream.room], lane.rooms[stream.room]
        lane.tokens -= stream.weight
        if not self._streams:
            self._idle.set()

    def _end(self, stream: Stream, error: PdrtError, reason: str = "") -> None:
        """End a room on our side and make its worker end it too."""
        self._forget(stream)
        stream.fail(Problem.of(error, STAGE))
        abort = AbortRoom(room=stream.room, reason=reason or error.code)
        self._owe(self._lanes[stream.dp_rank], abort)

    def _tell(self, lane: _Lane, message: Submit | Rebind | ResumeLocally) -> None:
        """Abort first what is owed, or it would hit the room's next attempt.

        A mailbox that does not take the abort does not take this message either: no time passes.
        """
        self._pay(lane)
        try:
            lane.link.tell(message)
        except (Overloaded, PeerLost) as error:
            raise self._refused(error) from None

    def _owe(self, lane: _Lane, message: AbortRoom | Drain) -> None:
        lane.owed.append(message)
        self._pay(lane)

    def _pay(self, lane: _Lane) -> None:
        while lane.owed:
            try:
                lane.link.tell(lane.owed[0])
            except PeerLost:
                lane.owed.clear()  # its rooms died with it
            except Overloaded:
                return
            else:
                lane.owed.popleft()

    def _refused(self, error: E) -> E:
        self.counters[f"refused_{error.code}"] += 1
        return error


def weight_of(submit: Submit) -> int:
    """Tokens: of the prompt, and the most that may follow it."""
    return len(submit.tokens) // 4 + submit.sampling.n * submit.sampling.max_tokens


def _tokens_left(submit: Submit) -> dict[int, int]:
    """The most that each sequence may still say; those that ended elsewhere are not there."""
    most = submit.sampling.max_tokens
    if not submit.said:
        return dict.fromkeys(range(submit.sampling.n), most)
    return {said.index: max(most - len(said.tokens) // 4, 0) for said in submit.said}


def _joined(kept: Sequence[Output]) -> Output:
    last = kept[-1]
    return Output(
        room=last.room,
        tokens=tuple(token for output in kept for token in output.tokens),
        logprobs=tuple(value for output in kept for value in output.logprobs),
        finish=last.finish,
        problem=last.problem,
        cached_tokens=max(output.cached_tokens for output in kept),
        attempt=last.attempt,
        index=last.index,
        tops=b"".join(output.tops for output in kept),
        scored=b"".join(output.scored for output in kept),
        spent_ms=next((output.spent_ms for output in reversed(kept) if output.spent_ms), ()),
    )


def _retryable(problem: Problem) -> Problem:
    """The reason for a loss, with a code that says: try again."""
    if problem.is_retryable:
        return problem
    message = f"{problem.code}: {problem.message}"
    return Problem(code=PeerLost.code, message=message, stage=problem.stage or STAGE)
