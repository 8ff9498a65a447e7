"""A group's transfers as one: its scheduler sees one rank, whatever its size.

Each rank of an instance has transfers of its own for the same attempts. The promises: what the
scheduler wants goes to all ranks in the same order, and of blocks to be sent each context-parallel
rank gets its share, all of which are the whole; an attempt is told once that it may go on,
when all ranks may, and once that it failed, at the first; SendEnded and Quiet come once, when
the last rank is done with the memory. Pure: no socket, no clock; nothing is kept of what is over.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field, replace
from typing import Final, assert_never

from pdrt.data.commands import (
    AbortReceiver,
    AbortSend,
    AdmitReceiver,
    ExpectHandshakes,
    OpenReceiver,
    SendBlocks,
    TellFirsts,
    TellStarted,
    TransferCommand,
)
from pdrt.data.events import (
    FirstTokens,
    PromptStarted,
    Quiet,
    Received,
    ReceiveFailed,
    ReceiverReady,
    SendEnded,
    SenderReady,
    SendFailed,
    SlotRecord,
    TransferEvent,
)
from pdrt.data.metadata import disagreement
from pdrt.data.transfer import Key
from pdrt.errors import TransferFailed
from pdrt.messages import Problem

_SIBLING: Final = "another rank of the group failed"


@dataclass(slots=True)
class _Send:
    """An attempt that the ranks send, until the last of them has ended."""

    first_blocks: dict[int, int] = field(default_factory=dict)  # of the ranks that are ready
    ended: set[int] = field(default_factory=set)
    problem: Problem | None = None


@dataclass(slots=True)
class _Receive:
    """An attempt that the ranks receive, until it is received or nobody writes it any more."""

    ready: set[int] = field(default_factory=set)
    is_admitted: bool = False
    has_started: bool = False
    is_over: bool = False  # failed or aborted; its memory may still be written
    records: dict[int, SlotRecord] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    quiet: set[int] = field(default_factory=set)


class Group:
    """Tell it commands and what the ranks say; read `orders` (rank, command) and `events`."""

    def __init__(self, size: int, cp: int = 1) -> None:
        """Of `size` ranks, tp varying fastest, the first size / cp are those of cp 0."""
        self._size, self._cp = size, cp
        self.orders: deque[tuple[int, TransferCommand]] = deque()
        self.events: deque[TransferEvent] = deque()
        self.counters: Counter[str] = Counter()
        self._sends: dict[Key, _Send] = {}
        self._receives: dict[Key, _Receive] = {}

    def __len__(self) -> int:
        """Attempts that are not over on all ranks."""
        return len(self._sends) + len(self._receives)

    # What the scheduler wants.

    def command(self, command: TransferCommand) -> None:
        key = command.room, command.attempt
        if self._size > 1 and not self._book(key, command):
            self.events.append(Quiet(*key))
            return
        # First tokens are drawn by tp 0 and heard by tp 0: no other rank has a part in them.
        ranks = 1 if isinstance(command, TellFirsts) else self._size
        self.orders.extend((rank, self._share(rank, command)) for rank in range(ranks))

    def _share(self, rank: int, command: TransferCommand) -> TransferCommand:
        """Cp ranks hold the same blocks: each sends a run of them, and each ends with its slot."""
        if not isinstance(command, SendBlocks) or self._cp == 1:
            return command
        cp_rank, count = rank * self._cp // self._size, len(command.blocks)
        first, end = (count * each // self._cp for each in (cp_rank, cp_rank + 1))
        blocks = command.blocks[first:end]
        return replace(command, blocks=blocks, first_block=command.first_block + first)

    def _book(self, key: Key, command: TransferCommand) -> bool:
        """False for the admission of what has failed: no rank was told the blocks, none will be."""
        match command:
            case ExpectHandshakes():
                self._sends[key] = _Send()
            case AbortSend(problem=problem):
                if send := self._sends.get(key):
                    send.problem = send.problem or problem
            case OpenReceiver():
                self._receives[key] = _Receive()
            case AdmitReceiver():
                if key not in self._receives:
                    return False
                self._receives[key].is_admitted = True
            case AbortReceiver():
                if receive := self._receives.get(key):
                    self._end(key, receive)
            case TellStarted() | TellFirsts() | SendBlocks():
                pass
            case _:
                assert_never(command)
        return True

    # What a rank tells.

    def heard(self, rank: int, event: TransferEvent) -> None:
        key = event.room, event.attempt
        if self._size == 1:
            self.events.append(event)
        elif isinstance(event, SenderReady | SendFailed | SendEnded):
            if send := self._sends.get(key):
                self._of_send(rank, event, key, send)
            else:
                self.counters["late"] += 1
        elif receive := self._receives.get(key):
            self._of_receive(rank, event, key, receive)
        else:
            self.counters["late"] += 1

    def _of_send(
        self, rank: int, event: SenderReady | SendFailed | SendEnded, key: Key, send: _Send
    ) -> None:
        match event:
            case SenderReady():
                send.first_blocks[rank] = event.first_block
                if len(send.first_blocks) == self._size and send.problem is None:
                    first = min(send.first_blocks.values())
                    self.events.append(SenderReady(*key, first))
            case SendFailed():
                self._break_send(rank, event.problem, key, send)
            case SendEnded():
                send.ended.add(rank)
                if event.problem is not None:
                    self._break_send(rank, event.problem, key, send)
                if len(send.ended) == self._size:
                    del self._sends[key]
                    self.events.append(SendEnded(*key, send.problem))
            case _:
                assert_never(event)

    def _break_send(self, failed: int, problem: Problem, key: Key, send: _Send) -> None:
        if send.problem is not None:
            return
        send.problem = problem
        self.events.append(SendFailed(*key, problem))
        for rank in range(self._size):
            if rank != failed and rank not in send.ended:
                self.orders.append((rank, AbortSend(*key, problem)))

    def _of_receive(
        self,
        rank: int,
        event: ReceiverReady | PromptStarted | FirstTokens | Received | ReceiveFailed | Quiet,
        key: Key,
        receive: _Receive,
    ) -> None:
        match event:
            case ReceiverReady():
                receive.ready.add(rank)
                if len(receive.ready) == self._size:
                    self.events.append(event)
            case PromptStarted():
                if not receive.has_started and not receive.is_over:
                    self.events.append(event)
                receive.has_started = True
            case FirstTokens():
                if rank == 0 and not receive.is_over:
                    self.events.append(event)
            case Received():
                receive.records[rank] = event.record
                self._received(rank, key, receive)
            case ReceiveFailed():
                receive.failed.add(rank)
                self._break_receive(event, key, receive)
            case Quiet():
                self._quiet(rank, key, receive)
            case _:
                assert_never(event)

    def _received(self, rank: int, key: Key, receive: _Receive) -> None:
        """Nothing is written to this rank later, which is as good as its Quiet."""
        if receive.is_over:
            self._quiet(rank, key, receive)
        elif len(receive.records) == self._size:
            del self._receives[key]
            if differ := _differ(receive.records):
                self.events.append(ReceiveFailed(*key, differ))
                self.events.append(Quiet(*key))
            else:
                self.events.append(Received(*key, receive.records[0]))

    def _break_receive(self, failed: ReceiveFailed, key: Key, receive: _Receive) -> None:
        if receive.is_over:
            return
        self.events.append(failed)
        for rank in range(self._size):
            if rank not in receive.failed and rank not in receive.records:
                self.orders.append((rank, AbortReceiver(*key, _SIBLING)))
        self._end(key, receive)

    def _end(self, key: Key, receive: _Receive) -> None:
        """What was admitted is kept until no rank's memory can be written any more."""
        if not receive.is_admitted:
            del self._receives[key]
            return
        receive.is_over = True
        receive.quiet |= receive.records.keys()
        self._settle(key, receive)

    def _quiet(self, rank: int, key: Key, receive: _Receive) -> None:
        receive.quiet.add(rank)
        self._settle(key, receive)

    def _settle(self, key: Key, receive: _Receive) -> None:
        if receive.is_over and len(receive.quiet) == self._size:
            del self._receives[key]
            self.events.append(Quiet(*key))


def _differ(records: dict[int, SlotRecord]) -> Problem | None:
    """What is wrong when the ranks' slots vouch for different things."""
    cause = disagreement({f"tp {rank}": record for rank, record in sorted(records.items())})
    if not cause:
        return None
    first = records[0]
    told = f"room {first.room} attempt {first.attempt}: the slots of {cause}"
    return Problem.of(TransferFailed(told), "transfer")
