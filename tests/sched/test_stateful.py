"""Whatever happens in whatever order: no block has two owners, no request is lost.

Each machine plays the world around one scheduler with a tiny pool: clients, peers that may write
(or a transport that may read) until they have proven that they stopped, time, and junk.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pdrt.data.commands import AdmitReceiver, ExpectHandshakes, SendBlocks
from pdrt.data.events import (
    PromptStarted,
    Quiet,
    ReceiveFailed,
    ReceiverReady,
    SendEnded,
    SenderReady,
    SendFailed,
    TransferEvent,
)
from pdrt.errors import PdrtError
from pdrt.messages import AskPrefill, Problem
from pdrt.sched.base import Scheduler
from pdrt.sched.decode import DecodeDisaggScheduler
from pdrt.sched.events import Cancelled, Order, Rebound, ResumeLocally, Stopped
from pdrt.sched.limits import Limits
from pdrt.sched.plan import Plan
from pdrt.sched.prefill import PrefillDisaggScheduler
from pdrt.sched.request import State
from tests.sched.fakes import (
    AWAY,
    EOS,
    FakeDevice,
    Rig,
    answers,
    check_books,
    first_tokens,
    is_baseline,
    received,
    submit,
)

B = 2
BLOCKS = 9
LIMITS = Limits(
    block_size=B,
    max_batch_size=3,
    max_prefill_tokens=3,
    reserved_tokens=2,
    adaptive_reserve=True,
    max_waiting=6,
    patience=2,
)
WELL = ("length", "stop", "prefilled")
PROBLEM = Problem(code="peer_lost", message="gone")
HOPELESS = Problem(code="prompt_mismatch", message="no")
SETTINGS = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
picks = st.integers(0, 1 << 16)
attempts = st.integers(0, 3)


class World(RuleBasedStateMachine):
    """What all three have in common: clients, time, steps that may be interrupted."""

    rig: Rig

    def __init__(self) -> None:
        super().__init__()
        self.prompts: dict[int, list[int]] = {}
        self.wanted: dict[int, int] = {}
        self.sizes: dict[int, int] = {}  # sequences of each room
        self.open: Plan | None = None
        self.rooms = 0
        self.tries: dict[int, int] = {}
        self.sched_make()

    def sched_make(self) -> None:
        raise NotImplementedError

    def pick_room(self, pick: int) -> int:
        """Mostly one that lives, else any there ever was, or none."""
        alive = list(self.rig.book.rooms)
        if alive and pick % 8:
            return alive[pick // 8 % len(alive)]
        return pick // 8 % (self.rooms + 1)

    @rule(length=st.integers(0, 14), count=st.integers(1, 8), left=st.sampled_from([2.0, 50.0]))
    def client_comes(self, length: int, count: int, left: float) -> None:
        self.enter(self.rooms, 0, length, count, left)

    @rule(lengths=st.lists(st.integers(1, 8), min_size=3, max_size=5), count=st.integers(1, 8))
    def several_clients_come(self, lengths: list[int], count: int) -> None:
        for length in lengths:
            self.enter(self.rooms, 0, length, count, 50.0)

    @rule(count=st.integers(1, 6))
    def the_world_is_kind(self, count: int) -> None:
        """All that is awaited comes, between steps."""
        if self.open is not None:
            self.step_ends()
        for _ in range(count):
            self.settle()
            self.rig.step()
            check_books(self.rig.book)

    @rule(pick=picks, length=st.integers(1, 6), again=st.integers(0, 3))
    def client_comes_with_a_room_again(self, pick: int, length: int, again: int) -> None:
        """Mostly as a new try; the old one is a mistake that must be refused while it lingers."""
        room = self.pick_room(pick)
        if room <= self.rooms and not self.rig.book.members(room):
            held = {key for key, _ in self.rig.book.quarantine}
            lingers = (room, self.tries.get(room, 0) << 16) in held
            attempt = self.tries.get(room, 0) << 16 if lingers and not again else self.mint(room)
            self.enter(room, attempt, length, 3, 50.0)

    def mint(self, room: int) -> int:
        """The router's next attempt for a room."""
        self.tries[room] = self.tries.get(room, 0) + 1
        return self.tries[room] << 16

    def enter(self, room: int, attempt: int, length: int, count: int, left: float) -> None:
        prompt = [1 + (room % 3 + i) % 90 for i in range(length)]  # some begin alike
        top = room % 3 == 2
        n = self.sequences_of(room)
        message = submit(
            room,
            prompt,
            attempt=attempt,
            max_tokens=count,
            time_left=left,
            top=top,
            n=n,
            seed=room if n > 1 else 0,
        )
        known = bool(self.rig.book.members(room))
        try:
            self.rig.submit(message)
        except PdrtError:
            assert bool(self.rig.book.members(room)) == known
            return
        self.rooms = max(self.rooms, room + 1)
        self.prompts[room], self.wanted[room] = prompt, count
        self.sizes[room] = self.told_of(n)
        self.rig.said[room], self.rig.ends[room] = [], []
        for index in range(self.sizes[room]):
            self.rig.sequences[room, index], self.rig.finished[room, index] = [], []

    def told_of(self, n: int) -> int:
        """So many of n sequences are told their end here."""
        return n

    def sequences_of(self, room: int) -> int:
        return 3 if room % 4 == 1 else 1

    @rule(pick=picks, index=st.integers(0, 3))
    def a_stop_string_ends_one_sequence(self, pick: int, index: int) -> None:
        room = self.pick_room(pick)
        request = self.rig.book.rooms.get(room)
        self.rig.feed(Stopped(request.told_as if request else room, index))

    @rule(pick=picks)
    def client_leaves(self, pick: int) -> None:
        self.rig.feed(Cancelled(self.pick_room(pick), "client_gone"))

    @rule(seconds=st.sampled_from([0.1, 1.0, 3.0]))
    def time_passes(self, seconds: float) -> None:
        self.rig.now += seconds

    @precondition(lambda self: self.open is None)
    @rule()
    def step_begins(self) -> None:
        plan = self.rig.plan()
        self.open = plan if plan.is_for_device else None

    @precondition(lambda self: self.open is not None)
    @rule()
    def step_ends(self) -> None:
        assert self.open is not None
        self.rig.commit(self.open)
        self.open = None

    @rule(count=st.integers(1, 4))
    def steps_pass(self, count: int) -> None:
        if self.open is not None:
            self.step_ends()
        for _ in range(count):
            self.rig.step()

    @invariant()
    def the_books_agree(self) -> None:
        check_books(self.rig.book)

    @invariant()
    def every_request_is_alive_or_was_told_its_end_once(self) -> None:
        for room in self.prompts:
            alive = bool(self.rig.book.members(room))
            ends = [self.rig.finished[room, i] for i in range(self.sizes[room])]
            problems = sum(end not in WELL for end in self.rig.ends[room])
            assert all(len(end) <= 1 for end in ends), room
            assert problems + all(ends) == (not alive), (room, ends, self.rig.ends[room])

    @invariant()
    def queues_are_bounded(self) -> None:
        assert self.rig.book.unserved <= LIMITS.max_waiting + 2 * LIMITS.max_batch_size

    def settle(self) -> None:
        """One round of an outside world that answers everything."""

    def teardown(self) -> None:
        if self.open is not None:
            self.step_ends()
        for _ in range(400):
            self.settle()
            if is_baseline(self.rig.book):
                break
            self.rig.step()
            check_books(self.rig.book)
        self.every_request_is_alive_or_was_told_its_end_once()
        assert is_baseline(self.rig.book), self.rig.book.rooms


class Answers(World):
    """Where answers are made, they are the right ones."""

    @invariant()
    def what_was_said_is_the_beginning_of_the_answer(self) -> None:
        for room, prompt in self.prompts.items():
            size, seed = self.sizes[room], room if self.sizes[room] > 1 else 0
            for index, whole in enumerate(answers(prompt, self.wanted[room], size, seed)):
                said = self.rig.sequences[room, index]
                assert said == whole[: len(said)]
                if self.rig.finished[room, index] == ["length"]:
                    assert said == whole


class HybridWorld(Answers):
    def sched_make(self) -> None:
        self.rig = Rig(Scheduler(LIMITS, BLOCKS, {EOS}), FakeDevice(BLOCKS, B))

    @rule(pick=picks, attempt=attempts)
    def junk_comes(self, pick: int, attempt: int) -> None:
        room = self.pick_room(pick)
        junk: list[TransferEvent | Order] = [
            Rebound(room, attempt << 16, AWAY),
            ResumeLocally(room),
            Quiet(room, attempt),
            received(room, attempt, [1]),
        ]
        self.rig.feed(junk[pick % len(junk)])


class DecodeWorld(Answers):
    """`writers`: attempts whose peers may write, now or later, into the blocks they were told."""

    def sched_make(self) -> None:
        self.writers: dict[tuple[int, int], AdmitReceiver] = {}
        self.used: set[tuple[int, int]] = set()
        self.rig = Rig(DecodeDisaggScheduler(LIMITS, BLOCKS, 3, {EOS}), FakeDevice(BLOCKS, B))

    def note(self) -> None:
        for effect in self.rig.take(AdmitReceiver):
            assert isinstance(effect, AdmitReceiver)
            key = (effect.room, effect.attempt)
            assert key not in self.used, "an attempt names one transfer, once and for all"
            self.used.add(key)
            self.writers[key] = effect

    def attempt_of(self, room: int, fallback: int) -> int:
        request = self.rig.book.rooms.get(room)
        return request.attempt if request is not None and fallback else fallback << 16

    @rule(pick=picks, attempt=attempts)
    def route_is_found(self, pick: int, attempt: int) -> None:
        room = self.pick_room(pick)
        self.rig.feed(ReceiverReady(room, self.attempt_of(room, attempt)))

    @rule()
    def all_routes_are_found(self) -> None:
        for request in list(self.rig.book.rooms.values()):
            self.rig.feed(ReceiverReady(request.room, request.attempt))

    @rule(pick=picks, attempt=attempts)
    def prompt_is_begun(self, pick: int, attempt: int) -> None:
        room = self.pick_room(pick)
        self.rig.feed(PromptStarted(room, self.attempt_of(room, attempt)))

    def is_current(self, key: tuple[int, int]) -> bool:
        request = self.rig.book.rooms.get(key[0])
        if request is None or request.attempt != key[1]:
            return False
        return request.state is State.TRANSFERRING  # it may be computed here meanwhile

    @precondition(lambda self: self.rig.effects or self.writers)
    @rule(pick=picks, twice=st.booleans())
    def kv_arrives(self, pick: int, twice: bool) -> None:
        """Also of an attempt that was given up just now."""
        self.note()
        if self.writers:
            self.arrive(list(self.writers)[pick % len(self.writers)], twice=twice)

    @precondition(lambda self: self.rig.effects or self.writers)
    @rule(pick=picks, twice=st.booleans())
    def first_tokens_come(self, pick: int, twice: bool) -> None:
        """Ahead of the KV, or late, or of an attempt that was given up."""
        self.note()
        if self.writers:
            key = list(self.writers)[pick % len(self.writers)]
            for _ in range(1 + twice):
                self.tell_firsts(key)

    def tell_firsts(self, key: tuple[int, int]) -> None:
        request = self.rig.book.rooms.get(key[0])
        if request is None:
            self.rig.feed(first_tokens(*key, [7]))
            return
        s = request.sampling
        self.rig.feed(first_tokens(*key, request.tokens, s.top_logprobs, s.n, s.seed))

    def arrive(self, key: tuple[int, int], *, twice: bool = False) -> None:
        admitted = self.writers.pop(key)
        request = self.rig.book.rooms.get(key[0])
        tokens, seed = [7] * admitted.prompt_tokens, 0
        if request is not None and self.is_current(key):
            tokens, seed = list(request.tokens), request.sampling.seed
            if request.needs_firsts and not request.firsts:
                self.tell_firsts(key)  # the data plane waits for them
        self.rig.device.write(admitted.blocks, 0, tokens[admitted.first_block * B :])
        for _ in range(1 + twice):
            self.rig.feed(received(*key, tokens, seed=seed))

    @rule(pick=picks, attempt=attempts, problem=st.sampled_from([PROBLEM, HOPELESS]))
    def prefill_fails(self, pick: int, attempt: int, problem: Problem) -> None:
        room = self.pick_room(pick)
        key = (room, self.attempt_of(room, attempt))
        self.rig.feed(ReceiveFailed(*key, problem))

    @rule(pick=picks)
    def a_late_write_lands(self, pick: int) -> None:
        """Who was given up may write what it likes until it says that it is quiet."""
        self.note()
        over = [k for k in self.writers if not self.is_current(k)]
        if over:
            blocks = self.writers[over[pick % len(over)]].blocks
            self.rig.device.write(blocks, 0, [88] * (len(blocks) * B))

    @rule(pick=picks)
    def a_writer_is_quiet(self, pick: int) -> None:
        self.note()
        over = [k for k in self.writers if not self.is_current(k)]
        if over:
            key = over[pick % len(over)]
            del self.writers[key]
            self.rig.feed(Quiet(*key))

    @rule(pick=picks, late=st.booleans())
    def router_rebinds(self, pick: int, late: bool) -> None:
        room = self.pick_room(pick)
        attempt = self.tries.get(room, 0) << 16 if late else self.mint(room)
        if late and room in self.rig.book.rooms:
            attempt = min(attempt, self.rig.book.rooms[room].attempt)
        self.rig.feed(Rebound(room, attempt, AWAY))

    @rule(pick=picks)
    def nobody_will_prefill(self, pick: int) -> None:
        self.rig.feed(ResumeLocally(self.pick_room(pick)))

    @rule(pick=picks, attempt=attempts)
    def junk_comes(self, pick: int, attempt: int) -> None:
        room = self.pick_room(pick)
        junk: list[TransferEvent | Order] = [
            SenderReady(room, attempt, 0),
            SendEnded(room, attempt, None),
            Quiet(room, 5),
            received(room, 5, [1, 2]),
            first_tokens(room, 5, [1, 2]),
            ReceiveFailed(room, 5, PROBLEM),
        ]
        self.rig.feed(junk[pick % len(junk)])

    @invariant()
    def nobody_owns_a_block_that_a_peer_may_still_write(self) -> None:
        self.note()
        held = dict(self.rig.book.quarantine)
        for key, admitted in self.writers.items():
            request = self.rig.book.rooms.get(key[0])
            if key in held:
                owned = held[key].blocks
            else:
                assert request is not None
                owned = tuple(request.blocks[admitted.first_block :])
            slot = held[key].slot if key in held else self.rig.book.rooms[key[0]].slot
            assert set(admitted.blocks) == set(owned)
            assert admitted.slot == slot

    def settle(self) -> None:
        self.note()
        self.rig.take(AskPrefill)
        for key in list(self.writers):
            if self.is_current(key):
                self.arrive(key)
            else:
                del self.writers[key]
                self.rig.feed(Quiet(*key))
        for request in list(self.rig.book.rooms.values()):
            if request.state is State.UNBOUND:
                self.rig.feed(Rebound(request.room, self.mint(request.room), AWAY))
            self.rig.feed(ReceiverReady(request.room, request.attempt))


class PrefillWorld(World):
    """`reading`: attempts whose source blocks the transport may still read, with what it read."""

    def sched_make(self) -> None:
        self.expected: set[tuple[int, int]] = set()
        self.reading: dict[tuple[int, int], list[tuple[tuple[int, ...], list[int]]]] = {}
        self.complete: set[tuple[int, int]] = set()
        self.rig = Rig(PrefillDisaggScheduler(LIMITS, BLOCKS), FakeDevice(BLOCKS, B))

    def told_of(self, n: int) -> int:
        return 1

    def note(self) -> None:
        for effect in self.rig.take(ExpectHandshakes):
            assert isinstance(effect, ExpectHandshakes)
            key = (effect.room, effect.attempt)
            assert key not in self.expected
            self.expected.add(key)
        for effect in self.rig.take(SendBlocks):
            assert isinstance(effect, SendBlocks)
            key = (effect.room, effect.attempt)
            assert key in self.expected, "blocks are sent only while the transfer lives"
            tokens = self.prompts[effect.room]
            start = effect.first_block * B
            want = tokens[start : start + len(effect.blocks) * B]
            assert self.rig.device.read(effect.blocks, len(want)) == want
            self.reading.setdefault(key, []).append((effect.blocks, want))
            if effect.last is not None:
                assert effect.last.kv_len == len(tokens)
                seed = effect.room if self.sequences_of(effect.room) > 1 else 0
                assert effect.last.token == answers(tokens, 1, 1, seed)[0][0]
                self.complete.add(key)

    def pick_key(self, pick: int) -> tuple[int, int] | None:
        self.note()
        keys = sorted(self.expected)
        return keys[pick % len(keys)] if keys else None

    @rule(pick=picks)
    def hands_are_shaken(self, pick: int) -> None:
        if (key := self.pick_key(pick)) is not None:
            self.rig.feed(SenderReady(*key, pick % 2))

    @rule()
    def all_hands_are_shaken(self) -> None:
        self.note()
        for key in self.expected:
            self.rig.feed(SenderReady(*key, 0))

    @rule(pick=picks)
    def decode_leaves(self, pick: int) -> None:
        if (key := self.pick_key(pick)) is not None:
            self.rig.feed(SendFailed(*key, PROBLEM))

    @rule(pick=picks, failed=st.booleans())
    def the_transport_lets_go(self, pick: int, failed: bool) -> None:
        if (key := self.pick_key(pick)) is not None:
            self.end(key, failed=failed or key not in self.complete)

    def end(self, key: tuple[int, int], *, failed: bool) -> None:
        self.expected.discard(key)
        self.reading.pop(key, None)
        self.complete.discard(key)
        self.rig.feed(SendEnded(*key, PROBLEM if failed else None))

    @rule(pick=picks, attempt=attempts)
    def junk_comes(self, pick: int, attempt: int) -> None:
        room = self.pick_room(pick)
        junk: list[TransferEvent | Order] = [
            SenderReady(room, 5, 0),
            SendFailed(room, 5, PROBLEM),
            SendEnded(room, 5, None),
            Quiet(room, attempt),
            received(room, attempt, [1]),
            Rebound(room, attempt << 16, AWAY),
            ResumeLocally(room),
        ]
        self.rig.feed(junk[pick % len(junk)])

    @invariant()
    def what_the_transport_reads_does_not_change(self) -> None:
        self.note()
        for runs in self.reading.values():
            for blocks, want in runs:
                assert self.rig.device.read(blocks, len(want)) == want

    @invariant()
    def every_expected_attempt_is_alive_or_held(self) -> None:
        self.note()
        alive = {(r.room, r.attempt) for r in self.rig.book.rooms.values()}
        held = {key for key, _ in self.rig.book.quarantine}
        assert alive | held == self.expected
        assert not alive & held

    def settle(self) -> None:
        self.note()
        alive = {(r.room, r.attempt) for r in self.rig.book.rooms.values()}
        for key in list(self.expected):
            if key in self.complete or key not in alive:
                self.end(key, failed=key not in self.complete)
            else:
                self.rig.feed(SenderReady(*key, 0))


SOAK = settings(SETTINGS, max_examples=1500, stateful_step_count=80)


WORLDS = pytest.mark.parametrize("world", [HybridWorld, DecodeWorld, PrefillWorld])


@WORLDS
def test_every_promise_holds_in_any_order(world: type[World]) -> None:
    """CASES 7, 34, 35, 42, 47, 61: as invariants."""
    run_state_machine_as_test(world, settings=SETTINGS)


@WORLDS
@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_every_promise_holds_in_any_order_for_long(world: type[World]) -> None:
    run_state_machine_as_test(world, settings=SOAK)
