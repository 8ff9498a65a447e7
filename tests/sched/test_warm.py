"""What was computed or received once is neither computed nor moved again, and no token changes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdrt.data.commands import AdmitReceiver
from pdrt.data.events import Quiet, ReceiveFailed, ReceiverReady, SenderReady
from pdrt.device.batch import Drawn, SeqStep
from pdrt.messages import Problem
from pdrt.sched.admission import hit
from pdrt.sched.base import Scheduler
from pdrt.sched.decode import DecodeDisaggScheduler
from pdrt.sched.events import Cancelled
from pdrt.sched.limits import Limits
from pdrt.sched.prefill import PrefillDisaggScheduler
from pdrt.sched.prefix import Chain
from pdrt.sched.request import State, from_submit
from tests.sched.devices import null_answer, null_device
from tests.sched.fakes import EOS, FakeDevice, Rig, answer, check_books, is_baseline, submit
from tests.sched.pair import Pair

B = 4
LIMITS = Limits(block_size=B, max_batch_size=8, max_prefill_tokens=8, reserved_tokens=4)
PROMPT = list(range(1, 15))  # three full blocks and a half
LOST = Problem(code="peer_lost", message="gone")


def found(rig: Rig, tokens: Sequence[int], salt: str = "") -> int:
    """Blocks that a prompt of these tokens would not have to compute."""
    request = from_submit(submit(999, [*tokens, 0], salt=salt), 999, (), 0.0)
    return len(hit(request, rig.book.blocks, LIMITS))


def warm(rig: Rig, tokens: Sequence[int], blocks: int) -> None:
    """As if these blocks of a prompt had been computed here before."""
    pool = rig.book.blocks
    places = pool.take(blocks)
    assert places is not None
    rig.device.write(places, 0, tokens[: blocks * B])
    for key, place in zip(Chain().keys(tokens, blocks, B), places, strict=True):
        pool.cache.register(key, place)
    pool.give(places)


def finish(rig: Rig) -> None:
    for _ in range(200):
        if not rig.book.requests:
            return
        rig.step()
        check_books(rig.book)
    raise AssertionError(f"not finished: {rig.book.rooms}")


def hybrid(limits: Limits = LIMITS, blocks: int = 32, device: FakeDevice | None = None) -> Rig:
    return Rig(Scheduler(limits, blocks, {EOS}), device or FakeDevice(blocks, B))


# Both sides.


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("at_decode", range(4))
@pytest.mark.parametrize("at_prefill", range(4))
def test_every_length_of_hit_on_either_side_gives_the_same_tokens(
    at_prefill: int, at_decode: int, chunked: bool
) -> None:
    """CASES 58: what a side lacks is computed, and moved; all pools are empty after."""
    limits = replace(LIMITS, chunked=chunked)
    pair = Pair(limits, prefill_blocks=16, decode_blocks=16)
    warm(pair.prefill, PROMPT, at_prefill)
    warm(pair.decode, PROMPT, at_decode)
    pair.submit(1, PROMPT, 6)
    pair.finish(50)
    assert pair.decode.said[1] == answer(PROMPT, 6)
    computed = pair.prefill.book.counters["prompt_tokens_computed"]
    assert computed == len(PROMPT) - at_prefill * B
    assert pair.blocks_moved == 4 - at_decode
    assert next(o.cached_tokens for o in pair.decode.outputs) == at_prefill * B


@pytest.mark.parametrize("length", [4, 8, 12])
def test_a_prompt_that_is_known_as_a_whole_still_computes_its_last_token(length: int) -> None:
    """CASES 93: the hit is never the whole prompt."""
    prompt = PROMPT[:length]
    pair = Pair(LIMITS, prefill_blocks=16, decode_blocks=16)
    for room in (1, 2):
        pair.submit(room, prompt, 3)
        pair.finish(50)
    assert pair.decode.said[1] == pair.decode.said[2] == answer(prompt, 3)
    cached = [o.cached_tokens for o in pair.decode.outputs if o.room == 2]
    assert cached == [length - B, 0, 0]


def test_cached_tokens_are_prefills_own_and_told_once() -> None:
    """CASES 93: cold 0, warm the true hit; what decode holds is no saving of prefill's."""
    pair = Pair(LIMITS, prefill_blocks=16, decode_blocks=16)
    warm(pair.decode, PROMPT, 3)
    for room, prompt in ((1, PROMPT), (2, PROMPT), (3, PROMPT[:9])):
        pair.submit(room, prompt, 3)
        pair.finish(50)
    told = {
        room: [o.cached_tokens for o in pair.decode.outputs if o.room == room] for room in (1, 2, 3)
    }
    assert told == {1: [0, 0, 0], 2: [12, 0, 0], 3: [8, 0, 0]}


def test_the_next_turn_of_a_chat_computes_and_moves_only_what_is_new() -> None:
    """Blocks that decode filled with its answer count: they need not come again."""
    pair = Pair(LIMITS, prefill_blocks=64, decode_blocks=64)
    history: list[int] = []
    for turn in range(4):
        history += [50 + turn] * 7  # the user
        before = len(history)
        moved, counters = pair.blocks_moved, dict(pair.prefill.book.counters)
        pair.submit(turn, history, 9)
        pair.finish(60)
        said = pair.decode.said[turn]
        assert said == answer(history, 9)
        computed = pair.prefill.book.counters["prompt_tokens_computed"]
        # Prefill lacks the last answer and the user's words, decode only the latter: the answer's
        # last token was drawn and never computed.
        at_prefill = (before - 7 - 9) // B * B if turn else 0
        at_decode = (before - 7 - 1) // B if turn else 0
        assert computed - counters.get("prompt_tokens_computed", 0) == before - at_prefill
        assert pair.blocks_moved - moved == math.ceil(before / B) - at_decode
        history += said


def test_a_thousand_warm_requests_leave_both_pools_as_they_were() -> None:
    """CASES 45, 46."""
    pair = Pair(LIMITS, prefill_blocks=16, decode_blocks=16, slots=2)
    for room in range(1000):
        pair.submit(room, PROMPT, 3)
        pair.finish(20)
        for rig in (pair.prefill, pair.decode):
            assert is_baseline(rig.book)
            assert (rig.book.blocks.free, rig.book.slots.used) == (16, 0)
    for rig in (pair.prefill, pair.decode):
        assert rig.book.blocks.cache.idle <= 4
        assert rig.book.counters["prefix_tokens_asked"] == 1000 * len(PROMPT)
        assert rig.book.counters["prefix_tokens_hit"] == 999 * 12
    assert pair.blocks_moved == 4 + 999


@pytest.mark.parametrize("room", [1, 2])
def test_a_warm_prompt_of_2_7_chunks_is_answered_as_if_it_were_in_one(room: int) -> None:
    """CASES 59."""
    prompt = [3 * i % 90 for i in range(21)]
    chunks = Pair(LIMITS, prefill_blocks=16, decode_blocks=16)
    whole = Pair(replace(LIMITS, max_prefill_tokens=64), prefill_blocks=16, decode_blocks=16)
    for pair in (chunks, whole):
        for i in range(room):
            pair.submit(i, prompt, 6)
            pair.finish(50)
    assert chunks.decode.said == whole.decode.said
    assert chunks.decode.said[room - 1] == answer(prompt, 6)


def test_tenants_share_only_what_has_their_salt() -> None:
    pair = Pair(LIMITS, prefill_blocks=32, decode_blocks=32)
    for room, salt in enumerate(["", "a", "b", "a"]):
        pair.submit(room, PROMPT, 3, salt)
        pair.finish(50)
    told = [sum(o.cached_tokens for o in pair.decode.outputs if o.room == r) for r in range(4)]
    assert told == [0, 0, 0, 12]
    assert pair.blocks_moved == 3 * 4 + 1


def test_a_retracted_request_finds_its_own_blocks_again() -> None:
    pair = Pair(replace(LIMITS, reserved_tokens=1), prefill_blocks=24, decode_blocks=12)
    for room in range(6):
        pair.submit(room, [room * 10 + i for i in range(11)], 13)
    pair.finish(500)
    assert all(pair.decode.said[r] == answer([r * 10 + i for i in range(11)], 13) for r in range(6))
    assert pair.decode.book.counters["retractions"] > 0
    assert pair.decode.book.counters["prefix_tokens_hit"] > 0
    assert pair.prefill.book.counters["prefix_tokens_hit"] > 0


# Hybrid.


def test_a_hybrid_worker_computes_a_prefix_once() -> None:
    rig = hybrid()
    rig.submit(submit(1, PROMPT, max_tokens=3))
    finish(rig)
    rig.submit(submit(2, [*PROMPT, *answer(PROMPT, 3), 77], max_tokens=3))
    finish(rig)
    assert rig.said[2] == answer([*PROMPT, *answer(PROMPT, 3), 77], 3)
    assert [o.cached_tokens for o in rig.outputs] == [0, 0, 0, 16, 0, 0]
    assert [s.start for s in rig.device.batches[4]] == [16]


def test_two_that_compute_the_same_at_once_share_nothing_and_both_are_right() -> None:
    rig = hybrid(replace(LIMITS, max_prefill_tokens=64))
    for room in (1, 2):
        rig.submit(submit(room, PROMPT, max_tokens=3))
    finish(rig)
    assert rig.said == {1: answer(PROMPT, 3), 2: answer(PROMPT, 3)}
    assert rig.book.blocks.cache.idle == 4  # the last one: of the answer's
    assert is_baseline(rig.book)


@pytest.mark.parametrize("known", [0, 2])
def test_what_it_computed_before_it_was_retracted_is_not_told_as_cached(known: int) -> None:
    """CASES 93: cold -> 0."""
    rig = hybrid(replace(LIMITS, reserved_tokens=1, max_prefill_tokens=4), blocks=14)
    long = list(range(100, 133))
    if known:
        warm(rig, long, known)
    for room in (1, 2):
        grows = submit(room, [room, 2, 3], max_tokens=10)
        rig.submit(replace(grows, priority=1))
    rig.step()
    rig.submit(submit(3, long, max_tokens=1))
    long_one = rig.book.rooms[3]
    assert any(rig.step().retracted for _ in range(20))
    assert (long_one.state, long_one.said) == (State.QUEUED, 0)
    finish(rig)
    assert rig.said[3] == answer(long, 1)
    assert rig.book.counters["prefix_tokens_hit"] > 2 * known * B
    assert [o.cached_tokens for o in rig.outputs if o.room == 3] == [known * B]


def test_what_one_of_a_round_is_granted_never_takes_the_prefix_of_another() -> None:
    """The first needs more than the four unknown blocks; the longest unused ones are spoken for."""
    rig = hybrid(replace(LIMITS, reserved_tokens=1, max_prefill_tokens=64), blocks=10)
    warm(rig, PROMPT, 3)
    warm(rig, [90 - token for token in PROMPT], 3)
    rig.submit(submit(1, [5] * 17, max_tokens=1))
    rig.submit(submit(2, PROMPT[:13], max_tokens=1))
    finish(rig)
    assert [o.cached_tokens for o in rig.outputs] == [0, 12]
    assert rig.said == {1: answer([5] * 17, 1), 2: answer(PROMPT[:13], 1)}


def test_without_a_prefix_cache_all_is_computed_again() -> None:
    rig = hybrid(replace(LIMITS, prefix_cache=False))
    for room in (1, 2):
        rig.submit(submit(room, PROMPT, max_tokens=1))
        finish(rig)
    assert [o.cached_tokens for o in rig.outputs] == [0, 0]
    assert rig.book.blocks.cache.idle == 0


class Damaged(FakeDevice):
    """What it draws is no number."""

    def execute(self, batch: Sequence[SeqStep]) -> list[Drawn]:
        return [replace(drawn, logprob=math.nan) for drawn in super().execute(batch)]


def test_of_a_request_that_ends_in_no_number_nothing_is_found() -> None:
    """Its first chunk had no draw that could have shown it."""
    rig = hybrid(device=Damaged(32, B))
    rig.submit(submit(1, PROMPT))
    rig.step()
    assert found(rig, PROMPT) == 2
    rig.step()
    assert rig.ends[1] == ["bad_logits"]
    assert found(rig, PROMPT) == 0
    assert is_baseline(rig.book)


def test_a_request_that_leaves_while_it_is_computed_keeps_what_was_whole() -> None:
    rig = hybrid()
    rig.submit(submit(1, PROMPT))
    rig.step()  # eight tokens
    plan = rig.plan()
    rig.feed(Cancelled(1, "client_gone"))
    assert found(rig, PROMPT) == 2
    rig.commit(plan)  # too late to be known: its blocks may be another's now
    assert found(rig, PROMPT) == 2
    check_books(rig.book)


# What arrives.


def decode() -> Rig:
    return Rig(DecodeDisaggScheduler(LIMITS, 32, 8, {EOS}), FakeDevice(32, B))


def admitted(rig: Rig, room: int) -> AdmitReceiver:
    rig.feed(ReceiverReady(room, rig.book.rooms[room].attempt))
    rig.step()
    (effect,) = rig.take(AdmitReceiver)
    assert isinstance(effect, AdmitReceiver)
    return effect


def test_what_is_still_being_written_is_not_found() -> None:
    rig = decode()
    rig.submit(submit(1, PROMPT))
    admitted(rig, 1)
    assert found(rig, PROMPT) == 0


@pytest.mark.parametrize("how", ["failed", "aborted"])
def test_what_did_not_arrive_whole_is_never_found(how: str) -> None:
    """Neither while a late writer may touch it, nor after."""
    rig = decode()
    rig.submit(submit(1, PROMPT))
    admitted(rig, 1)
    rig.feed(ReceiveFailed(1, 0, LOST) if how == "failed" else Cancelled(1, "client_gone"))
    assert len(rig.book.quarantine) == 1
    assert found(rig, PROMPT) == 0
    rig.feed(Quiet(1, 0))
    assert found(rig, PROMPT) == 0
    check_books(rig.book)


def test_only_what_an_attempt_may_write_is_held_for_it() -> None:
    rig = decode()
    warm(rig, PROMPT, 2)
    rig.submit(submit(1, PROMPT))
    effect = admitted(rig, 1)
    assert (effect.first_block, len(effect.blocks), effect.prompt_tokens) == (2, 2, len(PROMPT))
    rig.feed(Cancelled(1, "client_gone"))
    (((_, held),)) = [each for each in rig.book.quarantine]
    assert held.blocks == effect.blocks
    assert found(rig, PROMPT) == 2
    check_books(rig.book)
    rig.feed(Quiet(1, 0))
    assert is_baseline(rig.book)


def test_what_the_transport_still_reads_can_be_found_by_others() -> None:
    """A reader changes nothing."""
    rig = Rig(PrefillDisaggScheduler(LIMITS, 32), FakeDevice(32, B))
    rig.submit(submit(1, PROMPT))
    rig.feed(SenderReady(1, 0, 0))
    rig.step()
    rig.feed(Cancelled(1, "client_gone"))
    assert len(rig.book.quarantine) == 1
    assert found(rig, PROMPT) == 2
    rig.submit(submit(2, PROMPT))
    rig.feed(SenderReady(2, 0, 0))
    rig.step()
    assert [s.start for s in rig.device.batches[-1]] == [8]
    check_books(rig.book)


# Whatever comes.

Turn = tuple[int, int, int, bool]
turns = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 9), st.integers(1, 9), st.booleans()),
    min_size=1,
    max_size=12,
)


def conversations(asked: list[Turn]) -> Iterator[tuple[int, list[int], int, bool]]:
    """Rooms of three conversations that begin alike; each turn builds on the one before."""
    histories = {which: [9] * 6 for which in range(3)}
    for room, (which, words, count, leaves) in enumerate(asked):
        histories[which] = [*histories[which], *range(which, which + words)]
        yield room, list(histories[which]), count, leaves
        histories[which] += null_answer(histories[which], count)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(turns, st.integers(1, 4), st.sampled_from(["reprefill", "local"]), st.booleans())
def test_conversations_in_a_tiny_pool_are_answered_as_if_alone(
    asked: list[Turn], together: int, retraction: str, salted: bool
) -> None:
    """Shared prefixes, clients that leave, retractions: each token that was said is right."""
    whole = [t for t in conversations(asked) if len(t[1]) + t[2] <= 60]
    limits = replace(LIMITS, reserved_tokens=1)
    if retraction == "local":
        limits = replace(limits, retraction="local")
    pair = Pair(limits, prefill_blocks=20, decode_blocks=18, slots=4, device=null_device)
    for at in range(0, len(whole), together):
        for room, prompt, count, _ in whole[at : at + together]:
            pair.submit(room, prompt, count, "a" * (salted and room % 2))
        for room, _, _, leaves in whole[at : at + together]:
            pair.round()
            if leaves:
                pair.cancel(room)
        pair.finish(600)
    for room, prompt, count, leaves in whole:
        said, right = pair.decode.said.get(room, []), null_answer(prompt, count)
        assert said == right[: len(said)]
        assert leaves or said == right
