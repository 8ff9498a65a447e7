"""One request, one worker, one stream: who gets it, who is refused, and how each stream ends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pdrt.control.dispatch import DPDispatcher, Stream
from pdrt.errors import (
    BadRequest,
    Conflict,
    Draining,
    NotFound,
    Overloaded,
    PdrtError,
    PeerLost,
    tree,
)
from pdrt.messages import (
    AbortRoom,
    Drain,
    KvLayout,
    Output,
    Outputs,
    Problem,
    Process,
    Rank,
    Ready,
    Rebind,
    ResumeLocally,
    Said,
    Sampling,
    Source,
    Submit,
    ToWorker,
    pack_ids,
    pack_tops,
    unpack_tops,
)
from tests.fake_time import FakeTime, settle

READY = Ready(
    endpoint="tcp://127.0.0.1:1",
    process=Process(host="here", pid=1, started=1),
    layout=KvLayout(block_size=16, dtype="float32", layers=1, kv_heads=1, head_dim=1),
    blocks=10,
    eos_token_ids=(2,),
)
SOURCE = Source(host="127.0.0.1", port=18800)


class FakeLink:
    """A worker that remembers what it was told; the test takes it away or fills its mailbox."""

    def __init__(self, dp: int) -> None:
        self.rank = Rank(dp=dp)
        self.ready: Ready | None = READY
        self.is_full = False
        self.told: list[ToWorker] = []
        self.held: dict[int, int] = {}  # room: attempt that it works on

    def tell(self, message: ToWorker) -> None:
        if self.ready is None:
            raise PeerLost("not connected")
        if self.is_full:
            raise Overloaded("mailbox full")
        self.told.append(message)
        if isinstance(message, Submit):
            assert message.room not in self.held, "two attempts of a room at once"
            self.held[message.room] = message.attempt
        if isinstance(message, AbortRoom) and message.index < 0:
            self.held.pop(message.room, None)


class Rig:
    def __init__(self, ranks: int = 1, max_rooms: int = 100) -> None:
        self.time = FakeTime(now=0)
        self.links = [FakeLink(dp) for dp in range(ranks)]
        self.dispatcher = DPDispatcher(self.links, self.time.clock, max_rooms)

    def submit(self, room: int, dp_rank: int | None = None, **more: Any) -> Stream:
        return self.dispatcher.submit(submit(room, **more), dp_rank)

    def say(self, room: int, *tokens: int, dp: int = 0, **more: Any) -> None:
        """The worker of `dp` speaks; what it ends it does not hold any more."""
        output = Output(room=room, tokens=tokens, **more)
        held = self.links[dp].held
        if (output.finish or output.problem) and output.attempt in (-1, held.get(room)):
            held.pop(room, None)
        self.dispatcher.deliver(dp, Outputs(items=(output,)))

    def lose(self, dp: int = 0, code: str = "worker_died") -> None:
        self.links[dp].held.clear()
        self.dispatcher.worker_lost(dp, Problem(code=code, message="exit status -9"))

    @property
    def load(self) -> list[tuple[int, int]]:
        return [(rank.rooms, rank.tokens) for rank in self.dispatcher.load().ranks]


def submit(room: int, attempt: int = 0, prompt: int = 3, max_tokens: int = 5, n: int = 1) -> Submit:
    return Submit(
        room=room,
        attempt=attempt,
        request_id=f"r{room}",
        tokens=pack_ids(range(prompt)),
        prompt_tokens=prompt,
        sampling=Sampling(max_tokens=max_tokens, n=n),
        time_left=60,
    )


async def rest(stream: Stream) -> list[Output]:
    async with asyncio.timeout(1):
        return [output async for output in stream]


async def test_outputs_go_to_the_stream_of_their_room_and_the_last_one_ends_it() -> None:
    rig = Rig()
    one, two = rig.submit(1), rig.submit(2)
    assert [message.room for message in rig.links[0].told if isinstance(message, Submit)] == [1, 2]
    rig.say(2, 20)
    rig.say(1, 10)
    rig.say(1, 11, finish="length")
    assert (await rest(one)) == [Output(room=1, tokens=(10, 11), finish="length")]
    assert (await anext(two)).tokens == (20,)
    assert rig.load == [(1, 8)]


async def test_a_reader_that_keeps_up_gets_each_output_on_its_own() -> None:
    rig, seen = Rig(), list[tuple[int, ...]]()

    async def read() -> None:
        async for output in rig.submit(1):
            seen.append(output.tokens)

    reader = asyncio.create_task(read())
    for token in range(3):
        await settle()
        rig.say(1, token, logprobs=(-0.5,), finish="length" if token == 2 else None)
    await reader
    assert seen == [(0,), (1,), (2,)]


async def test_a_slow_reader_gets_all_of_it_in_one_and_nothing_is_lost() -> None:
    rig = Rig()
    stream = rig.submit(1)
    rig.say(1, 1, logprobs=(-1.0,), cached_tokens=3)
    rig.say(1, 2, logprobs=(-2.0,))
    rig.say(1, problem=Problem(code="overloaded", message="no"))
    assert await rest(stream) == [
        Output(
            room=1,
            tokens=(1, 2),
            logprobs=(-1.0, -2.0),
            problem=Problem(code="overloaded", message="no"),
            cached_tokens=3,
        )
    ]


async def test_the_odds_of_outputs_that_waited_together_are_told_together() -> None:
    rig = Rig()
    stream = rig.submit(1)
    one, two = ((3, -0.5), (4, -1.5)), ((5, -0.25), (6, -2.5))
    rig.say(1, 3, tops=pack_tops([one]), scored=b"12345678")
    rig.say(1, 5, tops=pack_tops([two]), finish="length")
    (output,) = await rest(stream)
    assert unpack_tops(output.tops, 2) == [one, two]
    assert output.scored == b"12345678"


# Several sequences of a room.


async def test_a_room_ends_with_the_last_of_its_sequences() -> None:
    rig = Rig()
    stream = rig.submit(1, n=3)
    assert rig.load == [(1, 3 + 3 * 5)]
    rig.say(1, 10, index=1)
    rig.say(1, 20, index=0, finish="length")
    rig.say(1, 11, index=1, finish="stop")
    assert rig.load[0][0] == 1
    rig.say(1, 30, index=2, finish="length")
    assert [(o.index, o.tokens, o.finish) for o in await rest(stream)] == [
        (1, (10, 11), "stop"),
        (0, (20,), "length"),
        (2, (30,), "length"),
    ]
    assert rig.load == [(0, 0)]


async def test_one_sequence_may_be_stopped_and_the_others_go_on() -> None:
    rig = Rig()
    stream = rig.submit(1, n=3)
    rig.say(1, 10, index=1)
    stream.stop(1)
    assert rig.links[0].told[-1] == AbortRoom(room=1, reason="stop", index=1)
    rig.say(1, 11, index=1)  # it had not heard
    rig.say(1, 12, index=1, finish="length")
    rig.say(1, 20, index=0, finish="length")
    assert (await anext(stream)).tokens == (20,)
    stream.stop(0)  # it has ended: nobody is told
    stream.stop(2)  # the last one
    stream.stop(2)
    assert rig.links[0].told[2:] == [AbortRoom(room=1, reason="stop")]
    assert await rest(stream) == []
    assert rig.load == [(0, 0)]


async def test_a_problem_ends_all_sequences_whichever_it_names() -> None:
    rig = Rig()
    stream = rig.submit(1, n=2)
    rig.say(1, 10, index=0, finish="length")
    rig.say(1, problem=Problem(code="overloaded", message="no"))  # of index 0, as it says
    first, last = await rest(stream)
    assert (first.finish, last.index, last.problem is not None) == ("length", 1, True)
    assert rig.load == [(0, 0)]


async def test_each_sequence_may_say_max_tokens_and_none_more() -> None:
    rig = Rig()
    stream = rig.submit(1, n=2)
    rig.say(1, *range(5), index=0)
    rig.say(1, *range(5), index=1)
    assert rig.load[0][0] == 1
    rig.say(1, 5, index=1)
    outputs = await rest(stream)
    assert [len(o.tokens) for o in outputs] == [5, 5]
    assert any(o.problem for o in outputs)


async def test_an_answer_that_is_resumed_says_what_is_left_and_ends_with_who_goes_on() -> None:
    """Its tokens elsewhere count, and so do the sequences that ended there."""
    rig = Rig()
    begun = (Said(index=0, tokens=pack_ids([7, 7, 7])), Said(index=2))
    stream = rig.dispatcher.submit(replace(submit(1, n=3), said=begun))
    with pytest.raises(Conflict, match="first token"):
        rig.dispatcher.rebind(Rebind(room=1, attempt=65536, source=SOURCE))
    rig.say(1, 1, 2, index=0, finish="length")
    assert rig.load[0][0] == 1
    rig.say(1, *range(5), index=2, finish="length")
    assert rig.load[0][0] == 0
    assert [len(o.tokens) for o in await rest(stream)] == [2, 5]
    over = rig.dispatcher.submit(replace(submit(2, n=3), said=begun))
    rig.say(2, 1, 2, 3, index=0)
    assert (await rest(over))[0].problem


async def test_prefills_last_word_ends_the_room_of_all() -> None:
    rig = Rig()
    stream = rig.submit(1, n=4)
    rig.say(1, finish="prefilled")
    assert [o.finish for o in await rest(stream)] == ["prefilled"]
    assert rig.load == [(0, 0)]


async def test_the_same_room_twice_is_a_conflict_and_the_first_goes_on() -> None:
    """CASES 106."""
    rig = Rig()
    first = rig.submit(1, attempt=65536)
    for attempt in (0, 65536):
        with pytest.raises(Conflict):
            rig.submit(1, attempt=attempt)
    rig.say(1, 7, finish="stop")
    assert (await rest(first))[0].tokens == (7,)
    assert len(rig.links[0].told) == 1


async def test_a_room_may_come_again_once_it_has_ended() -> None:
    rig = Rig()
    rig.submit(1)
    rig.say(1, finish="prefilled")
    again = rig.submit(1, attempt=1)
    rig.say(1, finish="prefilled")
    assert (await rest(again))[0].finish == "prefilled"


async def test_a_newer_attempt_takes_the_place_of_the_older_one() -> None:
    """The router gave the first try up; its leaving may be seen later than the second try."""
    rig = Rig(ranks=2)
    first = rig.submit(1, dp_rank=1)
    second = rig.submit(1, dp_rank=0, attempt=65536)
    assert rig.links[1].told[1:] == [AbortRoom(room=1, reason="conflict")]
    (end,) = await rest(first)
    assert end.problem is not None
    assert (end.problem.code, "attempt 65536" in end.problem.message) == ("conflict", True)
    first.close()
    rig.say(1, 5, finish="stop", dp=0)
    assert (await rest(second))[0].tokens == (5,)


async def test_the_echo_of_an_older_attempt_is_dropped() -> None:
    rig = Rig()
    rig.submit(1, attempt=1)
    second = rig.submit(1, attempt=2)
    rig.say(1, problem=Problem(code="cancelled", message=""), attempt=1)
    rig.say(1, 5, finish="stop", attempt=2)
    assert (await rest(second))[0].tokens == (5,)
    assert rig.dispatcher.counters["stale_outputs"] == 1


async def test_outputs_of_no_room_and_of_another_ranks_room_are_counted_and_dropped() -> None:
    rig = Rig(ranks=2)
    stream = rig.submit(1, dp_rank=0)
    rig.say(9, 1)
    rig.say(1, 1, dp=1)
    rig.say(1, 2, finish="stop", dp=0)
    rig.say(1, 3, dp=0)
    assert [output.tokens for output in await rest(stream)] == [(2,)]
    assert rig.dispatcher.counters["late_outputs"] == 3


REFUSALS = [
    ("not connected", PeerLost, 0),
    ("not connected", PeerLost, None),
    ("full mailbox", Overloaded, 0),
    ("too many rooms", Overloaded, 0),
    ("no such rank", BadRequest, 3),
    ("no such rank", BadRequest, -1),
    ("draining", Draining, 0),
]


@pytest.mark.parametrize(("trouble", "kind", "dp_rank"), REFUSALS)
async def test_what_cannot_be_given_to_a_worker_is_refused_and_leaves_no_trace(
    trouble: str, kind: type[PdrtError], dp_rank: int | None
) -> None:
    rig = Rig(max_rooms=1)
    if trouble == "not connected":
        rig.links[0].ready = None
    if trouble == "full mailbox":
        rig.links[0].is_full = True
    if trouble == "too many rooms":
        rig.submit(77)
    if trouble == "draining":
        rig.dispatcher.drain()
    told, load = list(rig.links[0].told), rig.load
    with pytest.raises(kind):
        rig.submit(1, dp_rank)
    assert (rig.links[0].told, rig.load) == (told, load)
    assert rig.dispatcher.counters[f"refused_{kind.code}"] == 1


async def test_the_named_rank_gets_the_room_however_loaded_it_is() -> None:
    rig = Rig(ranks=2)
    for room in range(4):
        assert rig.submit(room, dp_rank=1).dp_rank == 1
    assert rig.load == [(0, 0), (4, 32)]


async def test_the_least_loaded_connected_rank_is_chosen_when_none_is_named() -> None:
    rig = Rig(ranks=3)
    rig.submit(1, prompt=100)
    assert rig.submit(2, prompt=3).dp_rank == 1
    assert rig.submit(3, prompt=3).dp_rank == 2
    assert rig.submit(4, prompt=3).dp_rank == 1
    rig.links[2].ready = None
    assert rig.submit(5, prompt=3).dp_rank == 1


async def test_idle_ranks_take_turns() -> None:
    """CASES 66: one after the other must not all go to dp rank 0."""
    rig = Rig(ranks=3)
    chosen = []
    for room in range(6):
        with rig.submit(room) as stream:
            chosen.append(stream.dp_rank)
    assert chosen == [0, 1, 2, 0, 1, 2]


async def test_tokens_are_spread_evenly_over_ranks() -> None:
    """CASES 66: max/min <= 1.3, of prompts that have nothing in common."""
    rig = Rig(ranks=4)
    for room in range(100):
        prompt = pack_ids([room] * (1 + room * 37 % 50))
        rig.dispatcher.submit(replace(submit(room), tokens=prompt))
    tokens = [tokens for _, tokens in rig.load]
    assert max(tokens) / min(tokens) <= 1.3


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("worker_died", "peer_lost"),
        ("internal", "peer_lost"),
        ("too_long", "peer_lost"),
        ("peer_lost", "peer_lost"),
        ("unavailable", "unavailable"),
    ],
)
async def test_a_lost_worker_ends_its_rooms_at_once_with_a_retryable_problem(
    code: str, told: str
) -> None:
    """CASES 33: the others' rooms go on."""
    rig = Rig(ranks=2)
    lost = [rig.submit(room, dp_rank=0) for room in range(3)]
    other = rig.submit(9, dp_rank=1)
    rig.say(0, 5)
    rig.lose(0, code)
    for stream in lost:
        (end,) = await rest(stream)
        assert end.problem is not None
        assert end.problem.code == told
        assert tree()[end.problem.code].retryable
        assert "exit status -9" in end.problem.message
        assert end.tokens == ((5,) if stream.room == 0 else ())
    assert rig.load == [(0, 0), (1, 8)]
    rig.say(9, 1, finish="stop", dp=1)
    assert (await rest(other))[0].finish == "stop"


async def test_a_worker_that_came_back_gets_rooms_again_and_its_old_words_are_dropped() -> None:
    rig = Rig()
    rig.submit(1, attempt=1)
    rig.lose()
    stream = rig.submit(1, attempt=2)
    rig.say(1, 5, attempt=1)
    rig.say(1, 6, attempt=2, finish="stop")
    assert (await rest(stream))[0].tokens == (6,)


async def test_leaving_early_aborts_the_room_once() -> None:
    """CASES 30: the worker hears of it, the dispatcher forgets the room."""
    rig = Rig()
    with rig.submit(1) as stream:
        rig.say(1, 5)
        await anext(stream)
    stream.close()
    assert rig.links[0].told[1:] == [AbortRoom(room=1, reason="client_gone")]
    assert rig.load == [(0, 0)]
    assert await rest(stream) == []


async def test_leaving_after_the_end_aborts_nothing() -> None:
    rig = Rig()
    with rig.submit(1) as stream:
        rig.say(1, 5, finish="stop")
        await rest(stream)
    assert len(rig.links[0].told) == 1


async def test_a_reader_that_is_cancelled_aborts_its_room() -> None:
    rig = Rig()

    async def read() -> None:
        with rig.submit(1) as stream:
            await anext(stream)

    reader = asyncio.create_task(read())
    await settle()
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    assert rig.links[0].told[1:] == [AbortRoom(room=1, reason="client_gone")]
    assert rig.load == [(0, 0)]


async def test_an_abort_from_elsewhere_wakes_the_reader() -> None:
    rig = Rig()
    reading = asyncio.create_task(rest(rig.submit(1)))
    await settle()
    rig.dispatcher.abort(1, "grace_over")
    rig.dispatcher.abort(1, "grace_over")
    rig.dispatcher.abort(8, "unknown")
    (end,) = await reading
    assert end.problem == Problem(code="cancelled", message="grace_over", stage="dispatch")
    assert rig.links[0].told[1:] == [AbortRoom(room=1, reason="grace_over")]


async def test_an_abort_the_mailbox_did_not_take_is_told_later_and_in_order() -> None:
    """Else the worker would work on for nobody, or the late abort would hit the next attempt."""
    rig = Rig()
    rig.submit(1)
    rig.links[0].is_full = True
    rig.dispatcher.abort(1, "gone")
    with pytest.raises(Overloaded):
        rig.submit(1, attempt=1)
    rig.links[0].is_full = False
    rig.dispatcher.catch_up()
    rig.submit(1, attempt=1)
    kinds = [type(message) for message in rig.links[0].told]
    assert kinds == [Submit, AbortRoom, Submit]


async def test_what_is_owed_to_a_worker_that_died_is_forgotten() -> None:
    rig = Rig()
    rig.submit(1)
    rig.links[0].is_full = True
    rig.dispatcher.abort(1, "gone")
    rig.lose()
    rig.links[0].is_full = False
    rig.submit(1, attempt=1)
    assert [type(message) for message in rig.links[0].told] == [Submit, Submit]


async def test_a_worker_that_says_more_than_was_asked_for_is_cut_off() -> None:
    """What a slow reader has not taken is bounded by max_tokens."""
    rig = Rig()
    stream = rig.submit(1, max_tokens=2)
    for token in range(5):
        rig.say(1, token)
    (end,) = await rest(stream)
    assert end.tokens == (0, 1)
    assert end.problem is not None
    assert end.problem.code == "internal"
    assert [type(message) for message in rig.links[0].told] == [Submit, AbortRoom]


async def test_a_rebind_goes_to_the_rooms_worker() -> None:
    """CASES 65: whoever owns the room gets it."""
    rig = Rig(ranks=2)
    rig.submit(1, dp_rank=1)
    rebind = Rebind(room=1, attempt=65536, source=SOURCE)
    rig.dispatcher.rebind(rebind)
    rig.dispatcher.resume_locally(1)
    assert rig.links[1].told[1:] == [rebind, ResumeLocally(room=1)]
    with pytest.raises(Conflict):
        rig.dispatcher.rebind(rebind)
    with pytest.raises(NotFound):
        rig.dispatcher.rebind(replace(rebind, room=2))
    with pytest.raises(NotFound):
        rig.dispatcher.resume_locally(2)
    rig.dispatcher.resume_locally(99, of_room=1)  # one of its sequences
    assert rig.links[1].told[-1] == ResumeLocally(room=99)


@pytest.mark.parametrize("kind", [Overloaded, PeerLost])
async def test_a_rebind_that_could_not_be_told_can_be_tried_again(kind: type[PdrtError]) -> None:
    rig = Rig()
    rig.submit(1)
    link = rig.links[0]
    link.is_full, link.ready = kind is Overloaded, None if kind is PeerLost else READY
    rebind = Rebind(room=1, attempt=1, source=SOURCE)
    with pytest.raises(kind):
        rig.dispatcher.rebind(rebind)
    link.is_full, link.ready = False, READY
    rig.dispatcher.rebind(rebind)
    assert link.told[1:] == [rebind]


async def test_a_room_that_has_said_something_is_not_bound_anew() -> None:
    """From its first token on it is decode that asks for what it needs (SPEC promise 4)."""
    rig = Rig()
    rig.submit(1)
    rig.say(1, 5)
    with pytest.raises(Conflict, match="first token"):
        rig.dispatcher.rebind(Rebind(room=1, attempt=65536, source=SOURCE))
    assert len(rig.links[0].told) == 1


async def test_after_a_rebind_outputs_of_the_first_attempt_still_count() -> None:
    """The stream is one answer: what decode said before it was bound anew stays said."""
    rig = Rig()
    stream = rig.submit(1, attempt=0)
    rig.dispatcher.rebind(Rebind(room=1, attempt=65536, source=SOURCE))
    rig.say(1, 1, attempt=0)
    rig.say(1, 2, attempt=65536, finish="stop")
    assert (await rest(stream))[0].tokens == (1, 2)


async def test_draining_refuses_the_new_and_finishes_the_old() -> None:
    """CASES 31."""
    rig = Rig(ranks=2)
    rig.links[1].is_full = True
    stream = rig.submit(1)
    rig.dispatcher.drain()
    rig.dispatcher.drain()
    idle = asyncio.create_task(rig.dispatcher.idle())
    await settle()
    assert not idle.done()
    with pytest.raises(Draining):
        rig.submit(2)
    rig.say(1, 5, finish="stop")
    await idle
    assert (await rest(stream))[0].tokens == (5,)
    assert rig.links[0].told[1:] == [Drain()]
    rig.links[1].is_full = False
    rig.dispatcher.catch_up()
    assert rig.links[1].told == [Drain()]


async def test_load_says_how_much_is_in_hand_and_for_how_long() -> None:
    rig = Rig(ranks=2)
    assert rig.dispatcher.load().oldest_s == 0
    rig.submit(1)
    rig.time.now = 5
    rig.submit(2).close()
    rig.time.now = 7
    load = rig.dispatcher.load()
    assert (load.rooms, load.most_rooms, load.oldest_s) == (1, 2, 7)
    rig.links[0].ready = None
    assert [rank.is_connected for rank in rig.dispatcher.load().ranks] == [False, True]


class Life(RuleBasedStateMachine):
    """Whatever happens in whatever order: every stream ends or is in flight, nothing is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig(ranks=2, max_rooms=6)
        self.streams: list[Stream] = []

    @rule(room=st.integers(0, 4), dp=st.sampled_from([None, 0, 1]), attempt=st.integers(0, 2))
    def submit(self, room: int, dp: int | None, attempt: int) -> None:
        told = sum(len(link.told) for link in self.rig.links)
        try:
            self.streams.append(self.rig.submit(room, dp, attempt=attempt))
        except (Conflict, Overloaded, PeerLost, Draining):
            assert not any(
                isinstance(message, Submit)
                for link in self.rig.links
                for message in link.told[told:]
            )

    @rule(
        room=st.integers(0, 4),
        dp=st.integers(0, 1),
        tokens=st.lists(st.integers(0, 9), max_size=2),
        finish=st.sampled_from([None, None, "stop"]),
        is_said=st.booleans(),
    )
    def say(
        self, room: int, dp: int, tokens: Sequence[int], finish: str | None, is_said: bool
    ) -> None:
        """The worker speaks of a room, perhaps of one that it does not have any more."""
        attempt = self.rig.links[dp].held.get(room, 0) if is_said else -1
        self.rig.say(room, *tokens, dp=dp, finish=finish, attempt=attempt)

    @rule(dp=st.integers(0, 1))
    def lose(self, dp: int) -> None:
        self.rig.links[dp].ready = None
        self.rig.lose(dp)

    @rule(dp=st.integers(0, 1))
    def come_back(self, dp: int) -> None:
        self.rig.links[dp].ready = READY

    @rule(dp=st.integers(0, 1), is_full=st.booleans())
    def fill(self, dp: int, is_full: bool) -> None:
        self.rig.links[dp].is_full = is_full

    @rule(room=st.integers(0, 5))
    def abort(self, room: int) -> None:
        self.rig.dispatcher.abort(room, "gone")

    @rule(index=st.integers(0, 9))
    def leave(self, index: int) -> None:
        if index < len(self.streams):
            self.streams[index].close()

    @invariant()
    def the_books_are_the_streams_that_are_not_over(self) -> None:
        live = [stream for stream in self.streams if not stream.is_over]
        assert len({stream.room for stream in live}) == len(live)
        for dp in (0, 1):
            mine = [stream for stream in live if stream.dp_rank == dp]
            assert self.rig.load[dp] == (len(mine), sum(stream.weight for stream in mine))

    @invariant()
    def workers_work_on_what_is_in_flight_and_on_nothing_else(self) -> None:
        self.rig.dispatcher.catch_up()
        for dp, link in enumerate(self.rig.links):
            live = {s.room for s in self.streams if not s.is_over and s.dp_rank == dp}
            assert live <= link.held.keys()
            assert link.is_full or link.ready is None or live == link.held.keys()


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
