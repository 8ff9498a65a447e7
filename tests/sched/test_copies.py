"""Retraction with a copy in host memory: nothing is computed twice, said twice or left behind."""

from __future__ import annotations

from dataclasses import replace

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdrt.data.commands import AbortReceiver
from pdrt.data.events import ReceiverReady
from pdrt.messages import Sampling
from pdrt.sched.base import Scheduler
from pdrt.sched.decode import DecodeDisaggScheduler
from pdrt.sched.events import Cancelled, Failed, Retracted, Returned, Swapped
from pdrt.sched.limits import Limits
from pdrt.sched.request import State
from tests.sched.devices import RunnerDevice, null_device
from tests.sched.fakes import (
    EOS,
    FakeDevice,
    Rig,
    answer,
    check_books,
    is_baseline,
    received,
    submit,
)
from tests.sched.pair import Pair

B = 4
LIMITS = Limits(
    block_size=B,
    max_batch_size=4,
    max_prefill_tokens=8,
    reserved_tokens=1,
    retraction="copy",
    host_blocks=16,
)
PROMPT, ANSWER = 11, 13  # 6 blocks


def prompt_of(room: int) -> list[int]:
    return [1 + (room * 31 + i) % 90 for i in range(PROMPT)]


def hybrid(blocks: int, limits: Limits = LIMITS) -> Rig:
    return Rig(Scheduler(limits, blocks, {EOS}), FakeDevice(blocks, B))


def finish(rig: Rig) -> None:
    for _ in range(500):
        check_books(rig.book)
        if is_baseline(rig.book):
            return
        rig.step()
    raise AssertionError(rig.book.rooms)


def swap(rig: Rig, room: int) -> None:
    """As if memory ran out now, with this one as the victim."""
    request = rig.book.rooms[room]
    places = rig.book.host.take(-(-request.computed // B))
    assert places is not None
    rig.book.move(request, Swapped(places))


def until_swapped(rig: Rig) -> int:
    """Steps under pressure until somebody's KV is in host memory; who that is."""
    for room in (1, 2):
        rig.submit(submit(room, prompt_of(room), max_tokens=ANSWER))
    for _ in range(60):
        rig.step()
        check_books(rig.book)
        if swapped := rig.book.queues[State.SWAPPED]:
            return next(iter(swapped.values())).room
    raise AssertionError("the pool was meant to be too small")


def test_one_that_made_way_goes_on_where_it_was() -> None:
    """CASES 69: no token is computed, said or lost twice; its blocks are those of its KV."""
    rig = hybrid(9)
    room = until_swapped(rig)
    request = rig.book.rooms[room]
    assert (request.computed, request.blocks) == (0, [])
    assert rig.book.host.used == len(request.host_blocks) == -(-request.copied // B)
    stats = rig.sched.stats()
    assert (stats.host_blocks_used, stats.host_blocks_total) == (rig.book.host.used, 16)
    assert stats.queues == {"waiting_queue": 1}
    finish(rig)
    assert rig.said == {r: answer(prompt_of(r), ANSWER) for r in (1, 2)}
    steps = [step for batch in rig.device.batches for step in batch]
    places = [(s.key, s.start + i) for s in steps for i in range(len(s.tokens))]
    assert len(places) == len(set(places)) == 2 * (PROMPT + ANSWER - 1)
    counters = rig.book.counters
    assert counters["retractions"] == counters["retractions_copy"] > 0


def test_it_comes_back_before_those_that_never_ran() -> None:
    rig = hybrid(9)
    room = until_swapped(rig)
    rig.submit(submit(3, [5, 6], max_tokens=2))
    while rig.state(room) is State.SWAPPED:
        assert rig.state(3) is State.QUEUED
        rig.step()
    finish(rig)
    assert rig.said[3] == answer([5, 6], 2)


def test_it_comes_back_though_prompts_use_up_the_step() -> None:
    """It needs no prompt tokens, and no slot."""
    rig = hybrid(30)
    rig.submit(submit(1, prompt_of(1), max_tokens=ANSWER))
    for _ in range(4):
        rig.step()
    rig.submit(submit(2, list(range(1, 41)), max_tokens=2))
    assert rig.step().prompt_tokens == LIMITS.max_prefill_tokens
    swap(rig, 1)
    plan = rig.plan()
    assert plan.prompt_tokens == LIMITS.max_prefill_tokens
    assert len(plan.batch) == 2
    assert rig.state(1) is State.RUNNING
    rig.commit(plan)
    finish(rig)
    assert rig.said[1] == answer(prompt_of(1), ANSWER)


def test_what_the_prefix_cache_still_has_is_not_copied_back() -> None:
    rig = hybrid(30)
    rig.submit(submit(1, prompt_of(1), max_tokens=ANSWER))
    for _ in range(6):
        rig.step()
    request = rig.book.rooms[1]
    computed, before = request.computed, list(request.blocks)
    swap(rig, 1)
    plan = rig.plan()
    (save,), (load,) = plan.moves.saves, plan.moves.loads
    assert save.sources == tuple(before[: -(-computed // B)])
    full = computed // B
    assert request.blocks[:full] == before[:full]
    assert len(load.targets) == len(save.sources) - full == 1
    assert request.computed == computed
    rig.commit(plan)
    finish(rig)
    assert rig.said[1] == answer(prompt_of(1), ANSWER)


def test_what_comes_back_can_be_found_again() -> None:
    rig = hybrid(12, replace(LIMITS, host_blocks=6))
    rig.submit(submit(1, prompt_of(1), max_tokens=ANSWER))
    for _ in range(6):
        rig.step()
    full = rig.book.rooms[1].computed // B
    swap(rig, 1)
    taken = rig.book.blocks.take(12)  # nothing is cached any more
    assert taken is not None
    rig.step()
    rig.book.blocks.give(taken)
    rig.step()
    request = rig.book.rooms[1]
    keys = request.chain.keys(request.tokens, full, B)
    assert rig.book.blocks.cache.find(keys) == tuple(request.blocks[:full])
    finish(rig)
    assert rig.said[1] == answer(prompt_of(1), ANSWER)


@pytest.mark.parametrize("source", [None, "prefill"])
def test_a_full_host_store_sends_the_next_one_the_other_way(source: str | None) -> None:
    limits = replace(LIMITS, host_blocks=1)
    if source is None:
        rig = hybrid(9, limits)
        for room in (1, 2):
            rig.submit(submit(room, prompt_of(room), max_tokens=ANSWER))
        finish(rig)
        said, counters = rig.said, rig.book.counters
    else:
        pair = Pair(limits, prefill_blocks=20, decode_blocks=9)
        for room in (1, 2):
            pair.submit(room, prompt_of(room), ANSWER)
        pair.finish(500)
        said, counters = pair.decode.said, pair.decode.book.counters
        assert counters["prompt_tokens_computed"] == 0
    assert said == {r: answer(prompt_of(r), ANSWER) for r in (1, 2)}
    other = "local" if source is None else "reprefill"
    assert counters["retractions"] == counters[f"retractions_{other}"] > 0
    assert counters["host_blocks_full"] == counters["retractions"]
    assert counters["retractions_copy"] == 0


@pytest.mark.parametrize("when", ["save", "load"])
@pytest.mark.parametrize("way", ["hybrid", "pair"])
def test_a_copy_that_fails_costs_a_new_computation_and_nothing_else(when: str, way: str) -> None:
    """CASES 70."""
    pair = Pair(LIMITS, prefill_blocks=20, decode_blocks=9)
    rig = hybrid(9) if way == "hybrid" else pair.decode
    for room in (1, 2):
        if way == "hybrid":
            rig.submit(submit(room, prompt_of(room), max_tokens=ANSWER))
        else:
            pair.submit(room, prompt_of(room), ANSWER)
    step = rig.step if way == "hybrid" else pair.round
    for _ in range(300):
        swapped = set(rig.book.queues[State.SWAPPED])
        wanted = {1, 2, 3} if when == "save" else swapped
        rig.device.broken = wanted if not rig.book.counters["host_copies_failed"] else set()
        step()
        check_books(rig.book)
        if not rig.book.requests:
            break
    assert rig.said == {r: answer(prompt_of(r), ANSWER) for r in (1, 2)}
    assert rig.ends == {1: ["length"], 2: ["length"]}
    assert rig.book.counters["host_copies_failed"] == 1
    assert is_baseline(rig.book)


def decode(limits: Limits = LIMITS, blocks: int = 8) -> Rig:
    return Rig(DecodeDisaggScheduler(limits, blocks, 4, {EOS}), FakeDevice(blocks, B))


def arrive(rig: Rig, room: int, prompt: list[int], max_tokens: int = ANSWER) -> None:
    rig.submit(submit(room, prompt, max_tokens=max_tokens))
    rig.feed(ReceiverReady(room, 0))
    rig.step()
    request = rig.book.rooms[room]
    rig.device.write(request.blocks, 0, prompt)
    rig.feed(received(room, 0, prompt))


def test_one_that_makes_way_at_its_first_decode_step_keeps_what_it_received() -> None:
    """CASES 71: its KV has just arrived, and one token was said."""
    rig = decode(blocks=10)
    older, newer = list(range(1, 13)), list(range(20, 32))  # 3 full blocks each
    arrive(rig, 1, older, 9)
    arrive(rig, 2, newer, 9)
    taken = rig.book.blocks.take(rig.book.blocks.free)
    assert taken is not None
    plan = rig.plan()  # both need a block now and there is none
    rig.book.blocks.give(taken)
    (save,) = plan.moves.saves
    request = rig.book.requests[save.key]
    assert (request.state, request.said, request.copied) == (State.SWAPPED, 1, 12)
    assert not rig.take(AbortReceiver)
    rig.commit(plan)
    finish(rig)
    assert rig.said == {1: answer(older, 9), 2: answer(newer, 9)}
    assert rig.book.counters["retractions_copy"] > 0
    assert rig.book.counters["prompt_tokens_computed"] == 0


@pytest.mark.parametrize("end", ["cancelled", "deadline", "stopped by a problem"])
def test_whatever_ends_a_swapped_request_drops_its_copy(end: str) -> None:
    rig = hybrid(9)
    room = until_swapped(rig)
    if end == "cancelled":
        rig.feed(Cancelled(room, "client_gone"))
    elif end == "deadline":
        rig.now = 1000.0
        rig.step()
    else:
        problem = Cancelled(room, "x").problem
        rig.book.move(rig.book.rooms[room], Failed(problem))
        rig.drain()
    assert rig.book.host.used == 0
    assert room not in rig.book.rooms
    finish(rig)


def test_an_abort_while_its_copy_is_under_way_is_free_for_a_later_step_only() -> None:
    """CASES 41: the host block may be given out at once, for the next copy comes after this one."""
    rig = hybrid(9, replace(LIMITS, host_blocks=6))
    for room in (1, 2):
        rig.submit(submit(room, prompt_of(room), max_tokens=ANSWER))
    while True:
        plan = rig.plan()
        if plan.moves.saves:
            break
        rig.commit(plan)
    (save,) = plan.moves.saves
    rig.feed(Cancelled(rig.book.requests[save.key].room, "client_gone"))  # the device is at work
    assert rig.book.host.used == 0
    rig.commit(plan)
    assert rig.device.host, "it was made all the same"
    for room in (3, 4):
        rig.submit(submit(room, prompt_of(room), max_tokens=ANSWER))
    finish(rig)
    assert all(rig.said[room] == answer(prompt_of(room), ANSWER) for room in (3, 4))


def test_50_retracted_and_aborted_requests_leave_no_memory_behind() -> None:
    """CASES 38: the host store is empty and the process as large as before."""
    blocks, big = 3 * 24, 64  # of 1 MiB together: a store of 21 MiB
    limits = replace(LIMITS, block_size=big, host_blocks=blocks, max_prefill_tokens=1024)
    rig = Rig(Scheduler(limits, 26, {EOS}), null_device(26, big, blocks))

    def cycle(room: int) -> None:
        prompt = [(room + i) % 256 for i in range(20 * big)]
        rig.submit(submit(room, prompt, max_tokens=9))
        for _ in range(3):
            rig.step()
        request = rig.book.rooms[room]
        places = rig.book.host.take(20)
        assert places is not None
        rig.book.move(request, Swapped(places))
        taken = rig.book.blocks.take(rig.book.blocks.free)
        assert taken is not None
        rig.step()
        assert rig.state(room) is State.SWAPPED
        assert rig.book.host.used == 20
        rig.feed(Cancelled(room, "client_gone"))
        rig.book.blocks.give(taken)
        assert is_baseline(rig.book)
        rig.device.batches.clear()

    process = psutil.Process()
    cycle(0)
    before = process.memory_info().rss
    for room in range(1, 51):
        cycle(room)
    assert rig.book.host.used == 0
    assert process.memory_info().rss <= before * 1.01


def null_rig(blocks: int, limits: Limits) -> Rig:
    return Rig(Scheduler(limits, blocks, {EOS}), null_device(blocks, B, limits.host_blocks))


SAMPLINGS = {
    "greedy": Sampling(max_tokens=ANSWER, temperature=0, ignore_eos=True),
    "seeded": Sampling(max_tokens=ANSWER, temperature=0.9, seed=17, ignore_eos=True),
}


def interrupted(rig: Rig, how: str, step: int, sampling: Sampling) -> list[int]:
    """What it says when it has to make way after so many steps."""
    rig.submit(replace(submit(1, prompt_of(1), source=None), sampling=sampling))
    for at in range(500):
        if not rig.book.requests:
            return rig.said[1]
        if at == step and rig.book.rooms[1].computed:
            if how == "copy":
                swap(rig, 1)
            else:
                rig.book.move(rig.book.rooms[1], Retracted())
            taken = rig.book.blocks.take(rig.book.blocks.free)  # no block keeps what it had
            assert taken is not None
            moved = rig.step()
            assert moved.moves.saves or how == "local"
            assert isinstance(rig.device, RunnerDevice)
            rig.device.memory[:] = b"\xff" * len(rig.device.memory)
            rig.book.blocks.give(taken)
        rig.step()
        check_books(rig.book)
    raise AssertionError("it never ended")


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("how", ["copy", "local"])
@settings(max_examples=14, deadline=None)
@given(step=st.integers(1, 13))
def test_the_tokens_are_the_same_whenever_it_makes_way(how: str, sampling: str, step: int) -> None:
    """On the null device, whose tokens depend on every byte of KV."""
    one = SAMPLINGS[sampling]
    want = interrupted(null_rig(12, LIMITS), how, -1, one)
    assert len(want) == ANSWER
    assert interrupted(null_rig(12, LIMITS), how, step, one) == want


@pytest.mark.parametrize("how", ["copy", "local", "reprefill"])
@settings(max_examples=8, deadline=None)
@given(round_=st.integers(1, 16))
def test_the_tokens_are_the_same_on_a_decode_side_whenever_it_makes_way(
    how: str, round_: int
) -> None:
    limits = replace(LIMITS, retraction="local" if how == "local" else "copy")

    def device(blocks: int, size: int) -> RunnerDevice:
        return null_device(blocks, size, limits.host_blocks)

    said = []
    for at in (-1, round_):
        pair = Pair(limits, prefill_blocks=16, decode_blocks=12, device=device)
        pair.submit(1, prompt_of(1), ANSWER)
        for now in range(300):
            if not pair.decode.book.requests:
                break
            request = pair.decode.book.rooms[1]
            if now == at and request.state is State.RUNNING:
                if how == "copy":
                    swap(pair.decode, 1)
                else:
                    pair.decode.book.move(
                        request, Returned() if how == "reprefill" else Retracted()
                    )
            pair.round()
        said.append(pair.decode.said[1])
    assert said[0] == said[1]
    assert len(said[0]) == ANSWER


def test_a_pool_hardly_larger_than_one_request_finishes_all_without_computing_twice() -> None:
    """CASES 13, 69: 7 blocks are 1.2 times what one of the 32 needs."""
    limits = replace(LIMITS, max_batch_size=8, reserved_tokens=4, host_blocks=200)
    pair = Pair(limits, prefill_blocks=8, decode_blocks=7)
    for room in range(32):
        pair.submit(room, prompt_of(room), ANSWER)
    pair.finish(4000)
    assert pair.decode.said == {r: answer(prompt_of(r), ANSWER) for r in range(32)}
    counters = pair.decode.book.counters
    assert counters["prompt_tokens_computed"] == 0
    assert counters["transfers"] == 32
    assert counters["retractions"] == counters["retractions_copy"]


def test_sequences_of_a_group_come_back_one_by_one() -> None:
    """What they share is copied for each, and is its own afterwards."""
    limits = replace(LIMITS, host_blocks=40)
    small, large = Rig(Scheduler(limits, 9, {EOS}), FakeDevice(9, B)), hybrid(60)
    for rig in (small, large):
        rig.submit(submit(1, prompt_of(1), max_tokens=ANSWER, n=3, seed=5))
        finish(rig)
    assert small.book.counters["retractions_copy"] > 0
    assert small.sequences == large.sequences
