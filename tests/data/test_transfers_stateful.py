"""Two peers, any order of events: the promises of the data plane as invariants (CASES 61)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final

from hypothesis import HealthCheck, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pdrt.data.checksums import Corrupt
from pdrt.data.events import Quiet, Received, ReceiveFailed, ReceiverReady, SenderReady
from pdrt.data.limits import Limits
from pdrt.data.transfer import TERMINAL, Key, Receiver, Sender, State
from tests.data.rig import Rig, record

BLOCKS: Final = 3
TOKENS: Final = 12  # three blocks of four


class World:
    """What may happen next; each method takes two numbers that say to whom and how."""

    def __init__(self, checksums: bool) -> None:
        limits = Limits(rooms_per_peer=3, outcomes=6)
        self.rig = Rig(blocks=24, limits=limits, checksums=checksums)
        self.next_room = 1
        self.computed: dict[Key, int] = {}  # attempt -> blocks that prefill has sent
        self.late: list[Key] = []  # prefill legs that are still on their way
        self.request_comes(0, 0)
        self.all_messages_arrive(0, 0)  # the two are attached

    # The two legs of a request.

    def request_comes(self, order: int, deadline: int) -> None:
        key = (self.next_room, 0)
        self.next_room += 1
        seconds = 3.0 if deadline == 5 else 60.0
        if order != 1:  # 1: the prefill leg is late; 2: there is none; 3: no decode leg
            self.rig.expect(key, TOKENS, seconds) if order != 2 and self.rig.ps[
                0
            ].is_alive else None
            self.computed[key] = 0
        else:
            self.late.append(key)
        if order != 3:
            self.rig.open(key, seconds)

    def late_leg_comes(self, _a: int, _b: int) -> None:
        if self.late and self.rig.ps[0].is_alive:
            key = self.late.pop(0)
            self.computed[key] = 0
            self.rig.expect(key, TOKENS)

    def decode_admits(self, first_block: int, _b: int) -> None:
        over = {(e.room, e.attempt) for e in self.rig.heard if isinstance(e, ReceiveFailed | Quiet)}
        for ready in [e for e in self.rig.heard if isinstance(e, ReceiverReady)]:
            key = ready.room, ready.attempt
            if key in over or key in self.rig.ds[0].books.kept or key not in self.rig.d.rooms:
                continue
            if len(self.rig.ds[0].books.free) >= BLOCKS and self.rig.ds[0].books.slots:
                self.rig.admit(key, TOKENS, first_block % BLOCKS)
                return

    def goes_as_far_as_transfer(self, first_block: int, _b: int) -> None:
        self.request_comes(0, 0)
        self.all_messages_arrive(0, 0)
        self.decode_admits(first_block if first_block < 3 else 0, 0)
        self.all_messages_arrive(0, 0)

    def prefill_computes(self, pick: int, size: int) -> None:
        keys = [
            key
            for key, done in self.computed.items()
            if done < BLOCKS and key in self.rig.p.rooms and self.rig.has(SenderReady, key)
        ]
        if keys and self.rig.ps[0].is_alive:
            key = keys[pick % len(keys)]
            done = self.computed[key]
            self.computed[key] = min(BLOCKS, done + 1 + size % 3)
            src = list(range(done, self.computed[key]))
            last = record(key, TOKENS) if self.computed[key] == BLOCKS else None
            self.rig.send(key, src, done, last)

    # Somebody changes his mind.

    def decode_aborts(self, pick: int, _b: int) -> None:
        if keys := list(self.rig.d.rooms):
            self.rig.abort_receive(keys[pick % len(keys)])

    def prefill_aborts(self, pick: int, _b: int) -> None:
        if keys := list(self.rig.p.rooms):
            self.rig.abort_send(keys[pick % len(keys)])

    def decode_finishes(self, _a: int, _b: int) -> None:
        for key in list(self.rig.ds[0].books.kept):
            if self.rig.has(Received, key) and key not in self.rig.ds[0].quarantine:
                self.rig.finish(key)

    # Messages.

    def all_messages_arrive(self, _a: int, _b: int) -> None:
        self.rig.flow()

    def prefill_hears(self, at: int, copies: int) -> None:
        if wire := self.rig.to_p:
            at %= len(wire)
            wire.extend([wire[at]] * (copies == 5))
            self.rig.hear_p(at)

    def decode_hears(self, at: int, copies: int) -> None:
        if wire := self.rig.to_d:
            at %= len(wire)
            wire.extend([wire[at]] * (copies == 5))
            self.rig.hear_d(at)

    def message_is_lost(self, at: int, to_p: int) -> None:
        if wire := self.rig.to_p if to_p % 2 else self.rig.to_d:
            del wire[at % len(wire)]

    def question_is_answered(self, _a: int, _b: int) -> None:
        if self.rig.ps[0].attaching:
            self.rig.answer_attach()
        if self.rig.ds[0].wishes:
            self.rig.answer_route()

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

    def blocks_are_verified(self, pick: int, bad: int) -> None:
        if verifying := self.rig.ds[0].verifying:
            record = verifying.pop(pick % len(verifying)).record
            corrupt = Corrupt(1, 0, 0, 0) if bad == 5 else None
            self.rig.d.verified(record, corrupt, self.rig.now)
            self.rig.settle()

    # Time and death.

    def time_passes(self, steps: int, _b: int) -> None:
        for _ in range(steps):
            self.rig.pass_time(0.4)
            self.rig.flow()

    def silence(self, _a: int, _b: int) -> None:
        self.rig.pass_time(0.5)

    def prefill_dies(self, _a: int, _b: int) -> None:
        if self.rig.ps[0].is_alive:
            self.rig.kill_p()
            self.computed.clear()

    def death_is_known(self, _a: int, _b: int) -> None:
        if not self.rig.ps[0].is_alive:
            self.rig.hear_of_death()

    def ends_well(self) -> None:
        """When the world is kind again, all is over within the longest deadline."""
        self.death_is_known(0, 0)
        for _ in range(45):
            self.rig.flow()
            self.prefill_computes(0, 2)
            self.rig.land_all()
            self.rig.scan()
            while self.rig.ds[0].verifying:
                self.blocks_are_verified(0, 0)
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
    World.prefill_computes: 16,
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
    World.blocks_are_verified: 3,
    World.time_passes: 2,
    World.silence: 1,
    World.prefill_dies: 1,
    World.death_is_known: 1,
}
ACTS: Final = [act for act, weight in WEIGHTS.items() for _ in range(weight)]


class TwoPeers(RuleBasedStateMachine):
    """Handshakes, chunks, aborts and deaths; messages late, doubled, lost and out of order.

    One rule with weights instead of a rule each: hypothesis leaves rules out at random, and a
    run without its rarest step would never see a transfer.
    """

    @initialize(checksums=st.booleans())
    def start(self, checksums: bool) -> None:
        self.world = World(checksums)
        self.rig = self.world.rig
        self.over: dict[int, tuple[Sender | Receiver, State]] = {}

    @rule(act=st.sampled_from(ACTS), a=st.integers(0, 5), b=st.integers(0, 5))
    def something_happens(self, act: Act, a: int, b: int) -> None:
        act(self.world, a, b)

    @invariant()
    def every_block_and_slot_has_one_owner(self) -> None:
        held = [block for blocks, _ in self.rig.ds[0].books.kept.values() for block in blocks]
        assert sorted(held + self.rig.ds[0].books.free) == list(range(24))
        slots = [slot for _, slot in self.rig.ds[0].books.kept.values()]
        assert sorted(slots + self.rig.ds[0].books.slots) == list(range(8))

    @invariant()
    def what_a_peer_may_still_write_is_kept_for_it(self) -> None:
        for flight in self.rig.flights.values():
            if not flight.has_landed:
                self.rig.check_flight(flight)

    @invariant()
    def sources_are_pinned_while_they_are_read(self) -> None:
        assert {flight.key for flight in self.rig.flights.values()} <= self.rig.ps[0].sources

    @invariant()
    def a_terminal_state_is_never_left(self) -> None:
        rooms: list[Sender | Receiver] = list(self.rig.p.rooms.values())
        for room in rooms + list(self.rig.d.rooms.values()):
            before = self.over.get(id(room))
            assert before is None or before[1] is room.state
            if room.state in TERMINAL:
                self.over[id(room)] = room, room.state

    @invariant()
    def tables_that_peers_fill_are_bounded(self) -> None:
        assert len(self.rig.p.early) <= 3

    def teardown(self) -> None:
        kinds = Counter(type(one).__name__ for one in self.rig.heard)
        for kind in kinds:
            event(f"{kind}: {min(kinds[kind], 3)}")
        self.world.ends_well()


TwoPeers.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
test_two_peers = TwoPeers.TestCase
