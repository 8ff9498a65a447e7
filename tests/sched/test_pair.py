"""Prefill and decode together: the same tokens under any pressure, and always progress."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from pdrt.messages import AskPrefill
from pdrt.sched.limits import Limits
from tests.sched.fakes import answer, is_baseline
from tests.sched.pair import Pair

LIMITS = Limits(block_size=4, max_batch_size=8, max_prefill_tokens=8, reserved_tokens=4)
PROMPT, ANSWER = 11, 13  # one request needs 6 blocks


def prompt_of(room: int) -> list[int]:
    return [1 + (room * 31 + i) % 90 for i in range(PROMPT)]


def serve(pair: Pair, rooms: int, rounds: int = 4000) -> dict[int, list[int]]:
    for room in range(rooms):
        pair.submit(room, prompt_of(room), ANSWER)
    pair.finish(rounds)
    assert all(pair.decode.ends[room] == ["length"] for room in range(rooms))
    return pair.decode.said


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 21, 22])
def test_a_prompt_of_any_length_is_answered_as_if_it_were_never_moved(length: int) -> None:
    """CASES 59: 21 and 22 are 2.7 chunks."""
    pair = Pair(LIMITS, prefill_blocks=16, decode_blocks=32)
    prompt = list(range(1, length + 1))
    pair.submit(1, prompt, 6)
    pair.finish(50)
    assert pair.decode.said[1] == answer(prompt, 6)
    assert pair.prefill.ends[1] == ["prefilled"]


@pytest.mark.parametrize("retraction", ["reprefill", "local", "refused"])
def test_a_pool_hardly_larger_than_one_request_finishes_all_with_the_same_tokens(
    retraction: str,
) -> None:
    """CASES 13, 69, 70: 7 blocks are 1.2 times what one of the 32 needs."""
    limits = replace(LIMITS, retraction="local" if retraction == "local" else "reprefill")

    def refuses(_ask: AskPrefill) -> bool:
        return retraction == "refused"

    small = Pair(limits, prefill_blocks=8, decode_blocks=7, refuses=refuses)
    large = Pair(limits, prefill_blocks=400, decode_blocks=400)
    assert serve(small, 32) == serve(large, 32)
    assert all(small.decode.said[r] == answer(prompt_of(r), ANSWER) for r in range(32))
    assert large.decode.book.counters["retractions"] == 0


@pytest.mark.parametrize("retraction", ["reprefill", "local"])
def test_under_real_pressure_requests_are_retracted_and_lose_nothing(retraction: str) -> None:
    limits = replace(LIMITS, reserved_tokens=1)
    if retraction == "local":
        limits = replace(limits, retraction="local")
    pair = Pair(limits, prefill_blocks=20, decode_blocks=14)
    said = serve(pair, 24)
    assert all(said[r] == answer(prompt_of(r), ANSWER) for r in range(24))
    assert pair.decode.book.counters["retractions"] > 5
    computed_here = pair.decode.book.counters["prompt_tokens_computed"]
    assert (computed_here > 0) == (retraction == "local")


def work_done(pair: Pair) -> int:
    prefill, decode = pair.prefill.book.counters, pair.decode.book.counters
    return prefill["prompt_tokens_computed"] + decode["tokens_out"] + decode["transfers"]


def test_long_answers_at_twice_the_capacity_never_stand_still() -> None:
    """CASES 67, short: of two rounds (one may shake hands only) one computes, and no wait for a
    token is longer than the longest prompt takes to be computed again."""
    limits = replace(LIMITS, reserved_tokens=2)
    pair = Pair(limits, prefill_blocks=24, decode_blocks=40)
    chance = Random(7)
    for room in range(48):
        pair.submit(room, prompt_of(room)[: chance.randint(1, PROMPT)], chance.choice([2, 60]))
    silent = idle = 0
    while pair.decode.book.requests:
        before, said = work_done(pair), pair.decode.book.counters["tokens_out"]
        pair.round()
        idle = 0 if work_done(pair) > before else idle + 1
        assert idle <= 1, "a standstill while work exists"
        silent = 0 if pair.decode.book.counters["tokens_out"] > said else silent + 1
        assert silent <= (PROMPT + 60) // 8 + 3
    assert pair.decode.book.counters["retractions"] > 0
    assert all(pair.decode.ends[room] == ["length"] for room in range(48))


def test_random_aborts_everywhere_leave_both_sides_at_the_baseline() -> None:
    """CASES 7, 34: 300 requests, a third of them left at random moments; the rest are right."""
    pair = Pair(replace(LIMITS, reserved_tokens=1), prefill_blocks=24, decode_blocks=24)
    chance = Random(11)
    waiting = list(range(300))
    prompts = {room: prompt_of(room)[: chance.randint(1, PROMPT)] for room in waiting}
    left: set[int] = set()
    while waiting or not is_baseline(pair.decode.book):
        for _ in range(chance.randint(0, 3)):
            if waiting:
                room = waiting.pop(0)
                pair.submit(room, prompts[room], 9)
        alive = list(pair.decode.book.rooms)
        if alive and chance.random() < 0.4:
            room = chance.choice(alive)
            left.add(room)
            pair.cancel(room)
        pair.round()
        assert pair.rounds < 3000
    pair.finish(50)
    assert len(left) > 50
    for room, prompt in prompts.items():
        said, whole = pair.decode.said.get(room, []), answer(prompt, 9)
        assert said == whole[: len(said)]
        assert pair.decode.ends[room] == (["cancelled"] if room in left else ["length"])
    assert pair.decode.book.slots.free == 64
