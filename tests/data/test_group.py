"""What a scheduler sees of a group's transfers, however its ranks interleave."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pdrt.data.commands import (
    AbortReceiver,
    AbortSend,
    AdmitReceiver,
    ExpectHandshakes,
    OpenReceiver,
    SendBlocks,
    TellStarted,
    TransferCommand,
)
from pdrt.data.events import (
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
from pdrt.data.group import Group
from pdrt.data.transfer import Key
from pdrt.messages import Problem, Source

KEY: Final = (7, 0)
LOST = Problem(code="peer_lost", message="a peer died")
WORSE = Problem(code="transfer_failed", message="a write failed")
STOPPED = Problem(code="cancelled", message="the client left")
RECORD = SlotRecord(room=7, attempt=0, status=1, kv_len=5, cached_tokens=0, token=42, logprob=-1.0)
EXPECT = ExpectHandshakes(*KEY, 5, b"", 9.0)
OPEN = OpenReceiver(*KEY, Source(host="127.0.0.1", port=1), 9.0)
ADMIT = AdmitReceiver(*KEY, (1, 2), 0, 3, 5, b"", 9.0)
QUIET = Quiet(*KEY)


class Rig:
    """A group of two: what each rank is ordered, and what the scheduler hears."""

    def __init__(self, *commands: TransferCommand) -> None:
        self.group = Group(2)
        for command in commands:
            self.group.command(command)
        self.take()

    def hear(self, rank: int, told: TransferEvent) -> list[TransferEvent]:
        self.group.heard(rank, told)
        return self.take()

    def command(self, command: TransferCommand) -> list[TransferEvent]:
        self.group.command(command)
        return self.take()

    def take(self) -> list[TransferEvent]:
        events, self.orders = list(self.group.events), list(self.group.orders)
        self.group.events.clear()
        self.group.orders.clear()
        return events


def test_a_command_goes_to_every_rank_in_the_same_order() -> None:
    commands: list[TransferCommand] = [
        EXPECT,
        TellStarted(*KEY),
        SendBlocks(*KEY, (1,), 0),
        AbortSend(*KEY, STOPPED),
    ]
    rig = Rig()
    for command in commands:
        rig.group.command(command)
    for rank in (0, 1):
        assert [c for to, c in rig.group.orders if to == rank] == commands


@given(
    blocks=st.lists(st.integers(0, 99), max_size=9).map(tuple),
    first=st.integers(0, 5),
    cp=st.integers(1, 4),
    tp=st.integers(1, 3),
)
def test_of_blocks_each_cp_rank_sends_a_run_and_all_end_with_their_slots(
    blocks: tuple[int, ...], first: int, cp: int, tp: int
) -> None:
    """The ranks of one cp rank send the same ones, each its own heads of them."""
    group, whole = Group(cp * tp, cp), SendBlocks(*KEY, blocks, first, RECORD)
    group.command(whole)
    shares = [command for _, command in group.orders]
    assert [rank for rank, _ in group.orders] == list(range(cp * tp))
    told = [share for share in shares if isinstance(share, SendBlocks)]
    assert told == [told[rank // tp * tp] for rank in range(cp * tp)]
    sent = [(s.first_block + n, block) for s in told[::tp] for n, block in enumerate(s.blocks)]
    assert sent == [(first + n, block) for n, block in enumerate(blocks)]
    assert {share.last for share in told} == {RECORD}
    assert max(len(s.blocks) for s in told) - min(len(s.blocks) for s in told) <= 1


def test_a_prompt_may_be_computed_when_all_ranks_shook_hands() -> None:
    rig = Rig(EXPECT)
    assert rig.hear(1, SenderReady(*KEY, 3)) == []
    assert rig.hear(0, SenderReady(*KEY, 2)) == [SenderReady(*KEY, 2)]


def test_a_send_ends_with_its_last_rank() -> None:
    rig = Rig(EXPECT)
    assert rig.hear(0, SendEnded(*KEY, None)) == []
    assert rig.hear(1, SendEnded(*KEY, None)) == [SendEnded(*KEY, None)]
    assert len(rig.group) == 0


def test_the_first_rank_that_fails_stops_the_others_and_names_the_reason() -> None:
    rig = Rig(EXPECT)
    rig.hear(1, SenderReady(*KEY, 0))
    assert rig.hear(0, SendFailed(*KEY, LOST)) == [SendFailed(*KEY, LOST)]
    assert rig.orders == [(1, AbortSend(*KEY, LOST))]
    assert rig.hear(0, SendEnded(*KEY, LOST)) == []
    assert rig.hear(1, SendFailed(*KEY, WORSE)) == []
    assert rig.hear(1, SendEnded(*KEY, WORSE)) == [SendEnded(*KEY, LOST)]


def test_a_rank_that_had_sent_all_is_not_stopped_when_another_fails() -> None:
    rig = Rig(EXPECT)
    rig.hear(0, SendEnded(*KEY, None))
    assert rig.hear(1, SendFailed(*KEY, LOST)) == [SendFailed(*KEY, LOST)]
    assert rig.orders == []
    assert rig.hear(1, SendEnded(*KEY, LOST)) == [SendEnded(*KEY, LOST)]


def test_an_end_with_a_problem_stops_the_others_too() -> None:
    rig = Rig(EXPECT)
    assert rig.hear(0, SendEnded(*KEY, LOST)) == [SendFailed(*KEY, LOST)]
    assert rig.orders == [(1, AbortSend(*KEY, LOST))]


def test_what_the_scheduler_stopped_has_its_reason() -> None:
    rig = Rig(EXPECT)
    rig.command(AbortSend(*KEY, STOPPED))
    assert rig.hear(1, SendFailed(*KEY, LOST)) == []
    rig.hear(1, SendEnded(*KEY, LOST))
    assert rig.hear(0, SendEnded(*KEY, STOPPED)) == [SendEnded(*KEY, STOPPED)]


def test_a_request_is_received_when_it_is_on_all_ranks() -> None:
    rig = Rig(OPEN)
    assert rig.hear(0, ReceiverReady(*KEY)) == []
    assert rig.hear(1, ReceiverReady(*KEY)) == [ReceiverReady(*KEY)]
    rig.command(ADMIT)
    assert rig.hear(1, PromptStarted(*KEY)) == [PromptStarted(*KEY)]
    assert rig.hear(0, PromptStarted(*KEY)) == []
    assert rig.hear(1, Received(*KEY, RECORD)) == []
    assert rig.hear(0, Received(*KEY, RECORD)) == [Received(*KEY, RECORD)]
    assert len(rig.group) == 0


def test_slots_that_disagree_are_a_failed_transfer_whose_memory_is_free() -> None:
    rig = Rig(OPEN, ADMIT)
    rig.hear(0, Received(*KEY, RECORD))
    failed, quiet = rig.hear(1, Received(*KEY, replace(RECORD, token=43)))
    assert isinstance(failed, ReceiveFailed)
    assert failed.problem.code == "transfer_failed"
    assert "the slots of tp 0 and tp 1 disagree: token 42 and 43" in failed.problem.message
    assert quiet == QUIET


def test_the_first_rank_that_fails_makes_the_others_quiet_too() -> None:
    rig = Rig(OPEN, ADMIT)
    assert rig.hear(1, ReceiveFailed(*KEY, LOST)) == [ReceiveFailed(*KEY, LOST)]
    assert [(to, type(c)) for to, c in rig.orders] == [(0, AbortReceiver)]
    assert rig.hear(1, QUIET) == []
    assert rig.hear(0, ReceiveFailed(*KEY, WORSE)) == []  # it failed by itself
    assert rig.hear(0, PromptStarted(*KEY)) == []
    assert rig.hear(0, QUIET) == [QUIET]


def test_what_a_rank_has_received_is_quiet() -> None:
    rig = Rig(OPEN, ADMIT)
    rig.hear(0, Received(*KEY, RECORD))
    assert rig.hear(1, ReceiveFailed(*KEY, LOST)) == [ReceiveFailed(*KEY, LOST)]
    assert rig.orders == []
    assert rig.hear(1, QUIET) == [QUIET]


def test_what_a_rank_receives_after_the_end_is_quiet_then() -> None:
    rig = Rig(OPEN, ADMIT)
    assert rig.command(AbortReceiver(*KEY, "client_gone")) == []
    assert rig.hear(0, Received(*KEY, RECORD)) == []
    assert rig.hear(1, QUIET) == [QUIET]
    assert rig.hear(0, QUIET) == []  # it says so too
    assert len(rig.group) == 0


def test_what_failed_before_it_was_admitted_is_told_and_forgotten() -> None:
    rig = Rig(OPEN)
    rig.hear(0, ReceiverReady(*KEY))
    assert rig.hear(1, ReceiveFailed(*KEY, LOST)) == [ReceiveFailed(*KEY, LOST)]
    assert [(to, type(c)) for to, c in rig.orders] == [(0, AbortReceiver)]
    assert len(rig.group) == 0
    assert rig.command(ADMIT) == [QUIET]  # the scheduler had not read it yet
    assert rig.orders == []


def test_what_was_received_while_the_scheduler_gave_it_up_stays_received() -> None:
    rig = Rig(OPEN, ADMIT)
    rig.hear(1, Received(*KEY, replace(RECORD, logprob=float("nan"))))
    assert rig.hear(0, Received(*KEY, RECORD)) == [Received(*KEY, RECORD)]
    assert rig.command(AbortReceiver(*KEY, "client_gone")) == []
    assert rig.hear(0, QUIET) == []
    assert rig.hear(1, QUIET) == []


def test_a_group_of_one_hears_exactly_what_its_rank_says() -> None:
    group = Group(1)
    told: list[TransferEvent] = [
        QUIET,
        Received(*KEY, RECORD),
        SendEnded(*KEY, LOST),
        SendFailed(*KEY, LOST),
    ]
    for each in told:
        group.heard(0, each)
    group.command(ADMIT)
    assert list(group.events) == told
    assert list(group.orders) == [(0, ADMIT)]
    assert len(group) == 0


# Any interleaving.


@dataclass(slots=True)
class Receiving:
    """One attempt on a decode rank, as `receivers` has it."""

    state: str = "open"  # open, ready, admitted, failed
    has_started: bool = False


@dataclass(slots=True)
class FakeRank:
    """What `Senders` and `Receivers` promise of one rank, decided by the test."""

    inbox: deque[TransferCommand] = field(default_factory=deque)
    said: deque[TransferEvent] = field(default_factory=deque)
    sends: dict[Key, Problem | None] = field(default_factory=dict)  # value: why it is over
    shook: set[Key] = field(default_factory=set)
    receives: dict[Key, Receiving] = field(default_factory=dict)
    done: set[Key] = field(default_factory=set)

    def read(self) -> None:
        command = self.inbox.popleft()
        key = command.room, command.attempt
        match command:
            case ExpectHandshakes():
                self.sends[key] = None
            case AbortSend(problem=problem):
                if key in self.sends:
                    self.sends[key] = self.sends[key] or problem
            case OpenReceiver():
                self.receives[key] = Receiving()
            case AdmitReceiver():
                self._admit(key)
            case AbortReceiver():
                self._abort(key)
            case _:
                pass

    def _admit(self, key: Key) -> None:
        if (receiving := self.receives.get(key)) is None:
            self.said.append(Quiet(*key))  # it has failed; nobody was told the blocks
        else:
            receiving.state = "admitted"

    def _abort(self, key: Key) -> None:
        receiving = self.receives.get(key)
        if receiving is None:
            if key in self.done:
                self.done.discard(key)
                self.said.append(Quiet(*key))
        elif receiving.state == "admitted":
            receiving.state = "failed"
        elif receiving.state != "failed":
            del self.receives[key]

    def move_send(self, key: Key, how: int) -> None:
        problem = self.sends[key]
        if how == 0 and problem is None:
            if key not in self.shook:
                self.shook.add(key)
                self.said.append(SenderReady(*key, how))
        elif how == 1 and problem is None:
            self.sends[key] = LOST
            self.said.append(SendFailed(*key, LOST))
        elif problem is not None or key in self.shook:
            del self.sends[key]
            self.shook.discard(key)
            self.said.append(SendEnded(*key, problem))

    def move_receive(self, key: Key, how: int) -> None:
        receiving = self.receives[key]
        match receiving.state, how:
            case "open", 0:
                receiving.state = "ready"
                self.said.append(ReceiverReady(*key))
            case (("open" | "ready"), 1):
                del self.receives[key]
                self.said.append(ReceiveFailed(*key, LOST))
            case "admitted", 0 if not receiving.has_started:
                receiving.has_started = True
                self.said.append(PromptStarted(*key))
            case "admitted", 1:
                receiving.state = "failed"
                self.said.append(ReceiveFailed(*key, LOST))
            case "admitted", _:
                del self.receives[key]
                self.done.add(key)
                self.said.append(Received(*key, replace(RECORD, room=key[0])))
            case "failed", _:
                del self.receives[key]
                self.said.append(Quiet(*key))
            case _:
                pass


@dataclass(slots=True)
class Told:
    """All that the scheduler was told of one attempt, and what it did."""

    is_send: bool
    counts: Counter[type] = field(default_factory=Counter)
    is_admitted: bool = False
    has_aborted: bool = False
    has_read_end: bool = False

    def check_end(self) -> None:
        counts = self.counts
        if self.is_send:
            assert counts[SendEnded] == 1
        elif self.is_admitted:
            assert counts[Received] + counts[Quiet] == 1
            assert counts[Received] or counts[ReceiveFailed] or self.has_aborted
        else:
            assert counts[ReceiveFailed] or self.has_aborted


class World:
    """Some ranks, their queues to and from the group, and a scheduler that reads late."""

    def __init__(self, size: int) -> None:
        self.group = Group(size)
        self.ranks = [FakeRank() for _ in range(size)]
        self.told: dict[Key, Told] = {}

    def command(self, command: TransferCommand) -> None:
        self.group.command(command)
        self.hand_over()

    def hand_over(self) -> None:
        while self.group.orders:
            rank, command = self.group.orders.popleft()
            self.ranks[rank].inbox.append(command)

    # What may happen next; two numbers say to whom and how.

    def request_comes(self, is_send: int, _b: int) -> None:
        key = len(self.told) + 1, 0
        self.told[key] = Told(bool(is_send % 2))
        self.command(replace(EXPECT if is_send % 2 else OPEN, room=key[0]))

    def scheduler_gives_up(self, pick: int, _b: int) -> None:
        if keys := [key for key, t in self.told.items() if not t.has_aborted | t.has_read_end]:
            key = keys[pick % len(keys)]
            told = self.told[key]
            told.has_aborted = True
            self.command(AbortSend(*key, STOPPED) if told.is_send else AbortReceiver(*key, "x"))

    def rank_reads(self, pick: int, count: int) -> None:
        rank = self.ranks[pick % len(self.ranks)]
        for _ in range(min(count, len(rank.inbox))):
            rank.read()

    def transfer_goes_on(self, pick: int, how: int) -> None:
        rank = self.ranks[pick % len(self.ranks)]
        if keys := [*rank.sends, *rank.receives]:
            key = keys[how % len(keys)]
            rank.move_send(key, how % 3) if key in rank.sends else rank.move_receive(key, how % 3)

    def transfers_go_well(self, _a: int, _b: int) -> None:
        """On all ranks, one step each."""
        for rank in self.ranks:
            for key in list(rank.sends):
                rank.move_send(key, 2 if key in rank.shook else 0)
            for key in list(rank.receives):
                rank.move_receive(key, 2 if rank.receives[key].state == "admitted" else 0)

    def group_hears(self, pick: int, count: int) -> None:
        number = pick % len(self.ranks)
        for _ in range(min(count, len(self.ranks[number].said))):
            self.group.heard(number, self.ranks[number].said.popleft())
            self.hand_over()

    def all_is_read(self, _a: int, _b: int) -> None:
        for number, rank in enumerate(self.ranks):
            self.rank_reads(number, len(rank.inbox))
            self.group_hears(number, len(rank.said))

    def scheduler_reads(self, _a: int, _b: int) -> None:
        while self.group.events:
            self.read(self.group.events.popleft())

    def read(self, heard: TransferEvent) -> None:
        key = heard.room, heard.attempt
        told = self.told[key]
        told.counts[type(heard)] += 1
        ends = (SendFailed, SendEnded, Received, ReceiveFailed)
        told.has_read_end |= isinstance(heard, ends)
        if isinstance(heard, SendEnded):
            assert not any(key in rank.sends for rank in self.ranks)
        if isinstance(heard, Quiet | Received):  # whatever a rank's peers could still write
            held = [rank.receives[key].state for rank in self.ranks if key in rank.receives]
            assert not {"admitted", "failed"} & set(held), f"{heard} while a rank may be written"
        if isinstance(heard, ReceiverReady) and not told.has_aborted and not told.has_read_end:
            told.is_admitted = True
            self.command(replace(ADMIT, room=key[0]))

    def is_busy(self) -> bool:
        return bool(self.group.events) or any(
            rank.inbox or rank.said or rank.sends or rank.receives for rank in self.ranks
        )

    def ends_well(self) -> None:
        """When all is said and done, each attempt has its end and nothing is kept."""
        for _ in range(40):
            self.all_is_read(0, 0)
            self.scheduler_reads(0, 0)
            self.transfers_go_well(0, 0)
        assert not self.is_busy()
        for told in self.told.values():
            told.check_end()
        assert len(self.group) == 0


Act = Callable[[World, int, int], None]
WEIGHTS: Final[dict[Act, int]] = {
    World.request_comes: 3,
    World.scheduler_gives_up: 2,
    World.rank_reads: 5,
    World.transfer_goes_on: 12,
    World.transfers_go_well: 2,
    World.group_hears: 8,
    World.all_is_read: 2,
    World.scheduler_reads: 5,
}
ACTS: Final = [act for act, weight in WEIGHTS.items() for _ in range(weight)]


class Ranks(RuleBasedStateMachine):
    """One rule with weights: hypothesis leaves rules out at random, and all are needed here."""

    @initialize(size=st.integers(2, 4))
    def start(self, size: int) -> None:
        self.world = World(size)

    @rule(act=st.sampled_from(ACTS), a=st.integers(0, 11), b=st.integers(0, 11))
    def something_happens(self, act: Act, a: int, b: int) -> None:
        act(self.world, a, b)

    @invariant()
    def nothing_is_told_twice(self) -> None:
        for told in self.world.told.values():
            assert not [kind for kind, count in told.counts.items() if count > 1]

    @invariant()
    def a_receive_has_one_end(self) -> None:
        for told in self.world.told.values():
            assert not (told.counts[Received] and told.counts[ReceiveFailed])
            assert not (told.counts[Quiet] and not told.is_admitted)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.ends_well()
            for told in self.world.told.values():
                event(f"{sorted(kind.__name__ for kind in told.counts)}")


TestRanks = pytest.mark.timeout(60)(Ranks.TestCase)
TestRanks.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
