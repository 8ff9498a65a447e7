"""Where a request's time goes: every moment counts once, whatever happens to it."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any, Literal

import pytest

from pdrt.data.events import PromptStarted, ReceiverReady
from pdrt.sched.base import Scheduler
from pdrt.sched.decode import DecodeDisaggScheduler
from pdrt.sched.limits import Limits
from tests.sched.fakes import EOS, FakeDevice, Rig, first_tokens, received, submit
from tests.sched.pair import Pair

LIMITS = Limits(block_size=4, max_batch_size=8, max_prefill_tokens=8, reserved_tokens=4)
PROMPT = list(range(1, 12))


def last_of(rig: Rig, room: int) -> dict[str, float]:
    """What the newest output tells."""
    return dict(next(o.spent_ms for o in reversed(rig.outputs) if o.room == room and o.spent_ms))


def decode_rig(**limits: Any) -> Rig:
    sched = DecodeDisaggScheduler(replace(LIMITS, **limits), 32, 8, {EOS})
    return Rig(sched, FakeDevice(32, 4))


@pytest.mark.parametrize("is_early", [True, False])
def test_decode_tells_its_phases_by_what_it_hears_from_prefill(is_early: bool) -> None:
    rig = decode_rig(early_first_token=is_early)
    rig.now = 100.0
    rig.submit(submit(1, PROMPT, max_tokens=3))
    rig.now = 101.0
    rig.feed(ReceiverReady(1, 0))
    rig.now = 103.0
    rig.plan()
    rig.now = 106.0
    rig.feed(PromptStarted(1, 0))
    rig.now = 110.0
    rig.feed(first_tokens(1, 0, PROMPT))
    rig.now = 115.0
    rig.feed(received(1, 0, PROMPT))
    for at in (121.0, 128.0):
        plan = rig.plan()
        rig.now = at
        rig.commit(plan)
    assert rig.ends[1] == ["length"]
    assert last_of(rig, 1) == {
        "bootstrap": 1000.0,
        "admission": 2000.0,
        "queue": 3000.0,
        "prefill": 4000.0,
        "transfer": 5000.0,
        "first_decode": 6000.0,
        "decode": 7000.0,
    }


def test_what_is_told_late_or_twice_moves_no_phase_back() -> None:
    rig = decode_rig()
    rig.submit(submit(1, PROMPT, max_tokens=3))
    rig.feed(ReceiverReady(1, 0))
    rig.plan()
    rig.now = 1.0
    rig.feed(first_tokens(1, 0, PROMPT))
    rig.now = 3.0
    rig.feed(PromptStarted(1, 0))
    rig.now = 6.0
    rig.feed(received(1, 0, PROMPT))
    rig.step()
    told = last_of(rig, 1)
    assert (told["queue"], told["transfer"], told.get("prefill", 0)) == (1000.0, 5000.0, 0)


def test_hybrid_tells_queue_prefill_first_decode_and_the_rest() -> None:
    rig = Rig(Scheduler(LIMITS, 32, {EOS}), FakeDevice(32, 4))
    rig.submit(submit(1, PROMPT, max_tokens=4))
    rig.now = 2.0
    for at in (3.0, 5.0, 9.0, 17.0, 33.0):  # two chunks of the prompt, then three tokens
        plan = rig.plan()
        rig.now = at
        rig.commit(plan)
    assert rig.ends[1] == ["length"]
    assert last_of(rig, 1) == {
        "queue": 2000.0,
        "prefill": 3000.0,
        "first_decode": 4000.0,
        "decode": 24000.0,
    }


def test_prefill_tells_how_long_its_transfer_took_after_the_last_chunk() -> None:
    pair = Pair(LIMITS, prefill_blocks=16, decode_blocks=32, lag=3)
    pair.submit(1, PROMPT, 2)
    while not pair.prefill.ends.get(1):
        pair.prefill.now += 1.0
        pair.round()
    told = last_of(pair.prefill, 1)
    assert told["transfer"] == 3000.0
    assert sum(told.values()) == pair.prefill.now * 1e3


def test_most_outputs_say_nothing_of_it() -> None:
    rig = Rig(Scheduler(LIMITS, 64, {EOS}), FakeDevice(64, 4))
    rig.submit(submit(1, PROMPT, max_tokens=100))
    while not rig.ends.get(1):
        rig.step()
    told = [o for o in rig.outputs if o.spent_ms]
    assert len(told) <= 3  # the first token, the second, the last
    assert told[0] is rig.outputs[0]
    assert told[-1] is rig.outputs[-1]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("retraction", ["reprefill", "local", "copy"])
def test_under_pressure_the_parts_of_every_request_are_its_whole(
    seed: int, retraction: Literal["reprefill", "local", "copy"]
) -> None:
    limits = replace(
        LIMITS, retraction=retraction, host_blocks=16, reserved_tokens=1, adaptive_reserve=False
    )
    pair, rng = Pair(limits, prefill_blocks=40, decode_blocks=14, lag=1), Random(seed)
    began: dict[int, float] = {}
    for room in range(12):
        pair.submit(room, [1 + (room * 31 + i) % 90 for i in range(11)], 13, n=1 + room % 2)
        began[room] = pair.decode.now
        if room % 4 == 3:
            check_round(pair, rng, began)
    for _ in range(3000):
        check_round(pair, rng, began)
        if not pair.decode.book.requests:
            break
    assert all(pair.decode.ends[room] == ["length"] for room in began)
    assert pair.decode.book.counters["retractions"]


def check_round(pair: Pair, rng: Random, began: dict[int, float]) -> None:
    """A round of any length; what ends in it tells its whole life."""
    step, known = rng.choice((0.0, 0.25, 1.0, 7.5)), len(pair.decode.outputs)
    pair.prefill.now += step
    pair.decode.now += step
    pair.round()
    for output in pair.decode.outputs[known:]:
        if output.finish is not None:
            whole = (pair.decode.now - began[output.room]) * 1e3
            assert sum(ms for _, ms in output.spent_ms) == pytest.approx(whole)
