"""Peers of one or two ranks, any order of events: the data plane's promises (CASES 61)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final

import pytest
from hypothesis import HealthCheck, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pdrt.data.events import ReceiverReady
from pdrt.data.limits import Limits
from pdrt.data.transfer import TERMINAL, Key, Receiver, Sender, State
from pdrt.messages import pack_tops
from tests.data.ranks import DecodeRank, PrefillRank, Shape
from tests.data.rig import PROBLEM, Rig, record

BLOCKS: Final = 3
TOKENS: Final = 12  # three blocks of four
POOL: Final = 24
EARLY: Final = 3
SHAPES: Final = [
    Shape(),
    Shape(2, 1, heads=2, writers=2),
    Shape(2, 1, heads=1, writers=1),  # replicas: one writes
    Shape(1, 2, heads=2),
    Shape(2, 2, heads=2, writers=3),
    Shape(2, 2, heads=1),
]
SEQUENCES: Final = [(1, 0), (2, 0), (1, 1)]  # of a request, and the likeliest tokens beside each
WAYS: Final = [("shm",), ("tcp",), ("shm", "tcp")]


def sequences_of(key: Key) -> tuple[int, int]:
    return SEQUENCES[key[0] % len(SEQUENCES)]


class World:
    """What may happen next; each method takes two numbers that say to whom and how."""

    def __init__(self, shape: Shape = SHAPES[0], ways: tuple[str, ...] = WAYS[0]) -> None:
        limits = Limits(rooms_per_peer=EARLY, outcomes=6)
        self.rig = Rig(blocks=POOL, limits=limits, shape=shape, ways=ways)
        self.next_room = 1
        self.computed: dict[tuple[int, Key], int] = {}  # (rank, attempt) -> blocks that it sent
        self.late: list[tuple[PrefillRank, Key]] = []  # prefill legs that are still on their way
        self.request_comes(0, 0)
        self.all_messages_arrive(0, 0)  # all are attached

    def prefill(self, number: int) -> PrefillRank:
        return self.rig.ps[number % len(self.rig.ps)]

    def decode(self, number: int) -> DecodeRank:
        return self.rig.ds[number % len(self.rig.ds)]

    # The two legs of a request.

    def request_comes(self, order: int, deadline: int) -> None:
        key = (self.next_room, 0)
        self.next_room += 1
        seconds = 3.0 if deadline == 5 else 60.0
        for p in self.rig.ps:
            if order == 1 or (order == 4 and p.tp == 1):  # 1: all are late; 4: the second is
                self.late.append((p, key))
            elif order != 2:  # 2: there is none; 3: no decode leg
                self.expect(p, key, seconds)
        if order != 3:
            self.rig.open(key, seconds)

    def expect(self, p: PrefillRank, key: Key, seconds: float) -> None:
        if p.is_alive:
            self.rig.expect_at(p, key, TOKENS, seconds)
            self.computed[p.tp, key] = 0

    def late_leg_comes(self, _a: int, _b: int) -> None:
        if self.late:
            self.expect(*self.late.pop(0), 60.0)

    def decode_admits(self, first_block: int, pick: int) -> None:
        for d in self.rig.ds if pick < 4 else [self.decode(pick)]:
            self.admit(d, (first_block + d.tp) % BLOCKS)

    def admit(self, d: DecodeRank, first_block: int) -> None:
        for ready in [e for e in d.heard if isinstance(e, ReceiverReady)]:
            key = ready.room, ready.attempt
            is_over = d.told["ReceiveFailed", key] or d.told["Quiet", key]
            if is_over or key in d.books.kept or key not in d.desk.rooms:
                continue
            if len(d.books.free) >= BLOCKS and d.books.slots:
                sequences, top = sequences_of(key)
                self.rig.admit_at(d, key, TOKENS, first_block, sequences=sequences, top=top)
                return

    def goes_as_far_as_transfer(self, first_block: int, _b: int) -> None:
        self.request_comes(0, 0)
        self.all_messages_arrive(0, 0)
        self.decode_admits(first_block if first_block < 3 else 0, 0)
        self.all_messages_arrive(0, 0)

    def prefill_computes(self, pick: int, size: int) -> None:
        legs = [
            (p, key)
            for (tp, key), done in self.computed.items()
            if done < BLOCKS
            and (p := self.rig.ps[tp]).is_alive
            and key in p.desk.rooms
            and p.told["SenderReady", key]
        ]
        if legs:
            p, key = legs[pick % len(legs)]
            done = self.computed[p.tp, key]
            end = self.computed[p.tp, key] = min(BLOCKS, done + 1 + size % 3)
            last = record(key, TOKENS) if end == BLOCKS else None
            if last is not None and p.tp == 0:
                self.tell_firsts(key)
            self.rig.send_at(p, key, list(range(done, end)), done, last)

    def tell_firsts(self, key: Key) -> None:
        count, top = sequences_of(key)
        tops = pack_tops([((42, -0.5),)] * count) if top else b""
        self.rig.tell_firsts(key, (42,) * count, tops)

    def all_prefill_ranks_compute(self, size: int, _b: int) -> None:
        for _ in self.rig.ps:
            self.prefill_computes(0, size)

    # Somebody changes his mind.

    def decode_aborts(self, pick: int, rank: int) -> None:
        d = self.decode(rank)
        if keys := list(d.desk.rooms):
            self.rig.abort_receive_at(d, keys[pick % len(keys)], is_served=rank > 3)

    def prefill_aborts(self, pick: int, rank: int) -> None:
        p = self.prefill(rank)
        if keys := list(p.desk.rooms):
            p.desk.abort(keys[pick % len(keys)], PROBLEM)
            self.rig.settle()

    def decode_finishes(self, _a: int, _b: int) -> None:
        for d in self.rig.ds:
            for key in list(d.books.kept):
                if d.told["Received", key] and key not in d.quarantine:
                    d.books.give(key)

    # Messages.

    def all_messages_arrive(self, _a: int, _b: int) -> None:
        self.rig.flow()

    def prefill_hears(self, at: int, copies: int) -> None:
        p = self.prefill(at + copies)
        if wire := p.inbox:
            at %= len(wire)
            wire.extend([wire[at]] * (copies == 5))
            self.rig.hear_p(at, p)

    def decode_hears(self, at: int, copies: int) -> None:
        d = self.decode(at + copies)
        if wire := d.inbox:
            at %= len(wire)
            wire.extend([wire[at]] * (copies == 5))
            self.rig.hear_d(at, d)

    def message_is_lost(self, at: int, to: int) -> None:
        rank = self.rig.ranks[to % len(self.rig.ranks)]
        if wire := rank.inbox:
            del wire[at % len(wire)]

    def question_is_answered(self, _a: int, _b: int) -> None:
        for p in self.rig.ps:
            if p.attaching and p.is_alive:
                self.rig.answer_attach(p)
        for d in self.rig.ds:
            if d.wishes:
                self.rig.answer_route(d)

    # The transport.

    def write_lands(self, pick: int, _b: int) -> None:
        if flights := [w for w, f in self.rig.flights.items() if not f.has_landed]:
            self.rig.land(flights[pick % len(flights)])

    def write_ends(self, pick: int, _b: int) -> None:
        if writes := list(self.rig.flights):
            write = writes[pick % len(writes)]
            self.rig.end(write, None if self.rig.flights[write].has_landed else "it broke")

    def all_writes_end_well(self, _a: int, _b: int) -> None:
        self.rig.land_all()

    def decode_looks_at_its_slots(self, _a: int, _b: int) -> None:
        self.rig.scan()

    # Time, death and restart.

    def time_passes(self, steps: int, _b: int) -> None:
        for _ in range(steps):
            self.rig.pass_time(0.4)
            self.rig.flow()

    def silence(self, _a: int, _b: int) -> None:
        self.rig.pass_time(0.5)

    def long_silence(self, _a: int, _b: int) -> None:
        """Beyond the grace time, with nothing heard: whoever holds memory is fenced."""
        self.rig.pass_time(31.0)

    def prefill_dies(self, rank: int, _b: int) -> None:
        p = self.prefill(rank)
        if p.is_alive:
            self.rig.kill_p(p)
            self.computed = {leg: n for leg, n in self.computed.items() if leg[0] != p.tp}

    def death_is_known(self, _a: int, _b: int) -> None:
        for p in self.rig.ps:
            if not p.is_alive:
                self.rig.hear_of_death(p)

    def decode_dies(self, rank: int, _b: int) -> None:
        self.rig.kill_d(self.decode(rank))

    def ends_well(self) -> None:
        """When the world is kind again, all is over within the longest deadline."""
        self.death_is_known(0, 0)
        for _ in range(45):
            self.rig.flow()
            for _ in range(4):
                self.prefill_computes(0, 2)
            self.rig.land_all()
            self.rig.scan()
            self.decode_finishes(0, 0)
            self.rig.pass_time(2.0)
        self.rig.flow()
        self.rig.check_baseline()


Act = Callable[[World, int, int], None]
WEIGHTS: Final[dict[Act, int]] = {
    World.request_comes: 2,
    World.late_leg_comes: 1,
    World.decode_admits: 3,
    World.goes_as_far_as_transfer: 6,
    World.prefill_computes: 12,
    World.all_prefill_ranks_compute: 6,
    World.decode_aborts: 3,
    World.prefill_aborts: 1,
    World.decode_finishes: 3,
    World.all_messages_arrive: 6,
    World.prefill_hears: 8,
    World.decode_hears: 8,
    World.message_is_lost: 1,
    World.question_is_answered: 2,
    World.write_lands: 6,
    World.write_ends: 6,
    World.all_writes_end_well: 6,
    World.decode_looks_at_its_slots: 5,
    World.time_passes: 2,
    World.silence: 1,
    World.long_silence: 1,
    World.prefill_dies: 1,
    World.death_is_known: 1,
    World.decode_dies: 1,
}
ACTS: Final = [act for act, weight in WEIGHTS.items() for _ in range(weight)]


class SeveralPeers(RuleBasedStateMachine):
    """Handshakes, chunks, aborts, deaths; messages and frames late, doubled, lost, out of order.

    One rule with weights instead of a rule each: hypothesis leaves rules out at random, and a
    run without its rarest step would never see a transfer.
    """

    @initialize(shape=st.sampled_from(SHAPES), ways=st.sampled_from(WAYS))
    def start(self, shape: Shape, ways: tuple[str, ...]) -> None:
        self.world = World(shape, ways)
        self.rig = self.world.rig
        self.over: dict[int, tuple[Sender | Receiver, State]] = {}

    @rule(act=st.sampled_from(ACTS), a=st.integers(0, 5), b=st.integers(0, 5))
    def something_happens(self, act: Act, a: int, b: int) -> None:
        act(self.world, a, b)

    @invariant()
    def every_block_and_slot_has_one_owner(self) -> None:
        for d in self.rig.ds:
            held = [block for blocks, _ in d.books.kept.values() for block in blocks]
            assert sorted(held + d.books.free) == list(range(POOL))
            slots = [slot for _, slot in d.books.kept.values()]
            assert sorted(slots + d.books.slots) == list(range(8))

    @invariant()
    def what_a_peer_may_still_write_is_kept_for_it(self) -> None:
        for flight in self.rig.flights.values():
            if not flight.has_landed and self.rig.is_let_in(flight):
                self.rig.check_flight(flight)

    @invariant()
    def what_is_let_in_is_kept_for_it(self) -> None:
        for d in self.rig.ds:
            assert d.admitted.keys() <= d.books.kept.keys()

    @invariant()
    def what_the_slot_cannot_hold_is_told_before_the_kv_is_said_to_be_here(self) -> None:
        d = self.rig.ds[0]
        for (kind, key), times in d.told.items():
            if kind == "Received" and times and sequences_of(key) != (1, 0):
                assert d.told["FirstTokens", key] == 1

    @invariant()
    def sources_are_pinned_while_they_are_read(self) -> None:
        for flight in self.rig.flights.values():
            assert flight.key in flight.source.sources

    @invariant()
    def a_terminal_state_is_never_left(self) -> None:
        rooms: list[Sender | Receiver] = []
        for rank in self.rig.ranks:
            rooms.extend(rank.desk.rooms.values())
        for room in rooms:
            before = self.over.get(id(room))
            assert before is None or before[1] is room.state
            if room.state in TERMINAL:
                self.over[id(room)] = room, room.state

    @invariant()
    def tables_that_peers_fill_are_bounded(self) -> None:
        for p in self.rig.ps:
            assert len(p.desk.early) <= EARLY * len(p.desk.sessions.all())

    def teardown(self) -> None:
        kinds = Counter(type(one).__name__ for one in self.rig.heard)
        for kind in kinds:
            event(f"{kind}: {min(kinds[kind], 3)}")
        self.world.ends_well()


QUICK: Final = settings(
    max_examples=60,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
SeveralPeers.TestCase.settings = QUICK
test_several_peers = SeveralPeers.TestCase


class SeveralPeersForLong(SeveralPeers):
    """The same, with more of everything."""


SeveralPeersForLong.TestCase.settings = settings(QUICK, max_examples=3000, stateful_step_count=120)
test_several_peers_for_long = pytest.mark.soak(
    pytest.mark.timeout(3600)(SeveralPeersForLong.TestCase)
)
