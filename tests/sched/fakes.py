"""A device, a transfer side and a rig that drive a scheduler without anything real.

The device keeps the token of each position in its pool and draws from what it reads back there,
so that a block with two owners, a wrong table or a lost chunk changes an answer.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from pdrt.data.commands import AdmitReceiver
from pdrt.data.events import SLOT_COMPLETE, FirstTokens, Received, SlotRecord, TransferEvent
from pdrt.device.batch import Draw, Drawn, SeqStep
from pdrt.device.chance import seed_of
from pdrt.device.moves import Moves
from pdrt.messages import Output, Sampling, Source, Submit, pack_ids, pack_tops
from pdrt.sched.admission import reserve
from pdrt.sched.blocks import Quarantine
from pdrt.sched.book import Book, SchedStats
from pdrt.sched.effects import Effect, Say
from pdrt.sched.events import Order
from pdrt.sched.plan import Plan
from pdrt.sched.request import State

EOS = 0
HOME = Source(host="127.0.0.1", port=18800, dp_rank=0)
AWAY = Source(host="127.0.0.2", port=18800, dp_rank=0)
VOCABULARY = 97


def next_token(tokens: Sequence[int], seed: int = 0) -> int:
    """A pure function of all tokens so far; never EOS, so that lengths are known."""
    return 1 + (zlib.crc32(pack_ids(list(tokens))) + seed) % (VOCABULARY - 1)


def answer(prompt: Sequence[int], count: int, seed: int = 0) -> list[int]:
    """What a client must get, whatever happened on the way."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, seed))
    return tokens[len(prompt) :]


def answers(prompt: Sequence[int], count: int, n: int, seed: int = 0) -> list[list[int]]:
    """The same of each of its sequences."""
    return [answer(prompt, count, seed_of(seed, index)) for index in range(n)]


def submit(
    room: int,
    prompt: Sequence[int],
    *,
    attempt: int = 0,
    max_tokens: int = 4,
    time_left: float = 100.0,
    source: Source | None = HOME,
    said: Sequence[int] = (),
    salt: str = "",
    ignore_eos: bool = True,
    stop: tuple[int, ...] = (),
    top: int = 0,
    n: int = 1,
    seed: int = 0,
) -> Submit:
    return Submit(
        room=room,
        attempt=attempt,
        request_id=f"r{room}",
        tokens=pack_ids([*prompt, *said]),
        prompt_tokens=len(prompt),
        sampling=Sampling(
            max_tokens=max_tokens,
            temperature=0 if n == 1 else 1,
            ignore_eos=ignore_eos,
            stop_token_ids=stop,
            top_logprobs=top,
            n=n,
            seed=seed,
        ),
        time_left=time_left,
        source=source,
        salt=salt,
    )


class FakeDevice:
    """Executes steps; `script` overrides what is drawn at a position (room-independent)."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self.pool = [[-1] * block_size for _ in range(blocks)]
        self.host = dict[int, list[int]]()
        self.broken = set[int]()  # keys whose moves fail
        self.block_size = block_size
        self.script: dict[int, int] = {}
        self.batches: list[tuple[SeqStep, ...]] = []

    def read(self, blocks: Sequence[int], count: int) -> list[int]:
        return [self.pool[blocks[i // self.block_size]][i % self.block_size] for i in range(count)]

    def write(self, blocks: Sequence[int], start: int, tokens: Iterable[int]) -> None:
        for i, token in enumerate(tokens, start):
            self.pool[blocks[i // self.block_size]][i % self.block_size] = token

    def copy_from(self, other: FakeDevice, theirs: int, mine: int) -> None:
        """What a transfer does to one block."""
        self.pool[mine] = list(other.pool[theirs])

    def move(self, moves: Moves) -> set[int]:
        """What must be done before the step; the keys of those that failed."""
        for move in moves.saves:
            for block, place in zip(move.sources, move.targets, strict=True):
                self.host[place] = [] if move.key in self.broken else list(self.pool[block])
        for move in moves.loads:
            for place, block in zip(move.sources, move.targets, strict=True):
                self.pool[block] = (
                    [-2] * self.block_size if move.key in self.broken else list(self.host[place])
                )
        return {m.key for m in (*moves.saves, *moves.loads)} & self.broken

    def execute(self, batch: Sequence[SeqStep]) -> list[Drawn]:
        self.batches.append(tuple(batch))
        for step in batch:
            if step.copy_from >= 0:
                own = step.blocks[step.start // self.block_size]
                self.pool[own] = list(self.pool[step.copy_from])
        for step in batch:
            self.write(step.blocks, step.start, step.tokens)
        return [self._drawn(step, step.draw) for step in batch if step.draw is not None]

    def _drawn(self, step: SeqStep, draw: Draw) -> Drawn:
        further = tuple(self._draw(step, other) for other in step.further)
        return replace(self._draw(step, draw), further=further)

    def _draw(self, step: SeqStep, draw: Draw) -> Drawn:
        count = step.start + len(step.tokens)
        drawn = next_token(self.read(step.blocks, count), draw.sampling.seed)
        token = self.script.get(count, drawn)
        top = ((token, -0.5),) if draw.sampling.top_logprobs else ()
        return Drawn(step.key, token, -0.5, top)


class AnyScheduler(Protocol):
    """The shape all three have for the worker."""

    book: Book

    def submit(self, submit: Submit, now: float) -> None: ...
    def feed(self, event: TransferEvent | Order, now: float) -> None: ...
    def plan(self, now: float) -> Plan: ...
    def commit(
        self, plan: Plan, drawn: Sequence[Drawn], now: float, lost: Collection[int] = ()
    ) -> None: ...
    def next_timer(self) -> float | None: ...
    def drain(self) -> None: ...
    def stats(self) -> SchedStats: ...
    @property
    def is_idle(self) -> bool: ...


class Rig:
    """A scheduler with its device and clock; Says are collected, other effects kept in order."""

    def __init__(self, sched: AnyScheduler, device: FakeDevice) -> None:
        self.sched, self.device, self.now = sched, device, 0.0
        self.book = sched.book
        self.said: dict[int, list[int]] = {}
        self.ends: dict[int, list[str]] = {}
        self.sequences: dict[tuple[int, int], list[int]] = {}  # room, index: what it said
        self.finished: dict[tuple[int, int], list[str]] = {}
        self.outputs: list[Output] = []
        self.effects: list[Effect] = []

    def submit(self, message: Submit) -> None:
        self.sched.submit(message, self.now)
        self.drain()

    def feed(self, event: TransferEvent | Order) -> None:
        self.sched.feed(event, self.now)
        self.drain()

    def step(self) -> Plan:
        """One whole step."""
        plan = self.plan()
        self.commit(plan)
        return plan

    def plan(self) -> Plan:
        plan = self.sched.plan(self.now)
        self.drain()
        return plan

    def commit(self, plan: Plan) -> None:
        if plan.is_for_device:
            self._check_writes(plan)
            lost = self.device.move(plan.moves)
            self.sched.commit(plan, self.device.execute(plan.batch), self.now, lost)
            self.drain()

    def _check_writes(self, plan: Plan) -> None:
        """Nothing is computed into a block that others read or may find."""
        size = self.device.block_size
        for step in plan.batch:
            if step.key in self.book.requests:
                last = (step.start + len(step.tokens) - 1) // size
                self._check_own(step.blocks[step.start // size : last + 1])

    def _check_own(self, blocks: Iterable[int]) -> None:
        """One that only waits to be copied is as good as alone."""
        pool = self.book.blocks
        alive = self.book.requests.values()
        lent = Counter(r.blocks[-1] for r in alive if r.borrows)
        lent.update(r.copy_from for r in alive)
        for block in blocks:
            assert pool.owners(block) - lent[block] == 1, block
            assert not pool.cache.knows(block), block

    def drain(self) -> None:
        while self.book.outbox:
            effect = self.book.outbox.popleft()
            if isinstance(effect, AdmitReceiver):
                self._check_own(effect.blocks)
            if isinstance(effect, Say):
                self._hear(effect.output)
            else:
                self.effects.append(effect)

    def _hear(self, output: Output) -> None:
        assert output.attempt >= 0, "an output says which attempt it is of"
        self.outputs.append(output)
        key = output.room, output.index
        self.sequences.setdefault(key, []).extend(output.tokens)
        if output.finish is not None:
            self.finished.setdefault(key, []).append(output.finish)
        if output.index and output.problem is None:
            return
        self.said.setdefault(output.room, []).extend(output.tokens)
        if output.problem is not None:
            self.ends.setdefault(output.room, []).append(output.problem.code)
        elif output.finish is not None:
            self.ends.setdefault(output.room, []).append(output.finish)

    def take(self, kind: type[Effect]) -> list[Effect]:
        """Effects of a kind so far; they are gone from the list then."""
        found = [e for e in self.effects if isinstance(e, kind)]
        self.effects = [e for e in self.effects if not isinstance(e, kind)]
        return found

    def state(self, room: int) -> State | None:
        request = self.book.rooms.get(room)
        return request.state if request else None


def received(
    room: int, attempt: int, tokens: Sequence[int], token: int | None = None, seed: int = 0
) -> Received:
    """The slot as an honest prefill rank writes it."""
    drawn = next_token(tokens, seed) if token is None else token
    record = SlotRecord(room, attempt, SLOT_COMPLETE, len(tokens), 0, drawn, -0.5)
    return Received(room, attempt, record)


def first_tokens(
    room: int, attempt: int, tokens: Sequence[int], top: int = 0, n: int = 1, seed: int = 0
) -> FirstTokens:
    """What an honest prefill rank tells as soon as it has drawn."""
    drawn = tuple(next_token(tokens, seed_of(seed, index)) for index in range(n))
    tops = pack_tops([((token, -0.5),) for token in drawn]) if top else b""
    return FirstTokens(room, attempt, drawn, (-0.5,) * n, tops)


def check_books(book: Book) -> None:
    """Owners are counted right, a slot has one, and only those who may hold something do."""
    blocks = [b for r in book.requests.values() for b in r.blocks]
    blocks += [r.copy_from for r in book.requests.values() if r.copy_from >= 0]
    slots = [r.slot for r in book.requests.values() if r.slot is not None]
    for _, held in book.quarantine:
        blocks += held.blocks
        slots += [held.slot] if held.slot is not None else []
    owners = Counter(blocks)
    assert [book.blocks.owners(b) for b in range(book.blocks.total)] == [
        owners[b] for b in range(book.blocks.total)
    ]
    assert book.blocks.used == len(owners)
    for block in range(book.blocks.total):
        cached = book.blocks.cache.is_idle(block)
        assert not cached or (book.blocks.cache.knows(block) and not owners[block])
    assert len(slots) == len(set(slots)) == book.slots.used
    copies = [b for r in book.requests.values() for b in r.host_blocks]
    assert len(copies) == len(set(copies)) == book.host.used
    assert book.quarantine.blocks == sum(len(h.blocks) for _, h in book.quarantine)
    holding = {State.TRANSFERRING, State.RUNNING, State.INFLIGHT}
    for key, request in book.requests.items():
        story = list(request.story)
        assert bool(request.blocks) == (request.state in holding), story
        assert (request.slot is not None) == (request.state is State.TRANSFERRING), story
        assert book.queues[request.state][key] is request
        assert book.timers.at(key) == request.due, story
        assert bool(request.host_blocks) == (request.state is State.SWAPPED), story
        in_line = request.state in (State.QUEUED, State.WAITING, State.SWAPPED)
        assert (request in list(book.line)) == in_line
    assert sum(len(q) for q in book.queues.values()) == len(book.requests) == len(book.rooms)
    assert len(book.timers) == len(book.requests)
    _check_reserve(book)
    for room, group in book.groups.items():
        assert all(book.requests[key] is r and r.of_room == room for key, r in group.items())
    assert sum(map(len, book.groups.values())) == sum(
        r.of_room is not None for r in book.requests.values()
    )


def _check_reserve(book: Book) -> None:
    """What is kept free is counted along the way, and at most a block more than is needed."""
    growing = [*book.queues[State.RUNNING].values(), *book.queues[State.TRANSFERRING].values()]
    assert book.reserved == sum(r.reserved for r in growing)
    assert book.seats == sum(r.sampling.n for r in growing)
    for request in growing:
        assert 0 <= request.reserved - reserve(request, book.limits) <= 1, list(request.story)


def is_baseline(book: Book) -> bool:
    quarantine: Quarantine = book.quarantine
    return not (
        book.blocks.used
        or book.slots.used
        or book.host.used
        or book.requests
        or book.rooms
        or book.groups
        or len(quarantine)
    )
