"""Memory that is far too small: all finish with the same tokens, and each step makes progress."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdrt.data.layout import blocks_for
from pdrt.messages import Submit
from pdrt.sched.base import Scheduler
from pdrt.sched.limits import Limits
from tests.sched.devices import null_answer, null_device
from tests.sched.fakes import EOS, FakeDevice, Rig, answer, check_books, is_baseline, submit
from tests.sched.pair import Pair

B = 4
LIMITS = Limits(
    block_size=B,
    max_batch_size=16,
    max_prefill_tokens=16,
    reserved_tokens=8,
    adaptive_reserve=True,
    retraction="local",
)
PROMPT, ANSWER = 18, 22
POOL = 12  # blocks: 1.2 times what one of them needs


class Wish(NamedTuple):
    prompt: int
    answer: int
    priority: int = 0

    @property
    def blocks(self) -> int:
        return blocks_for(self.prompt + self.answer, B)


def prompt_of(room: int, length: int = PROMPT) -> list[int]:
    return [1 + (room * 31 + i) % 90 for i in range(length)]


def message(room: int, wish: Wish) -> Submit:
    told = submit(room, prompt_of(room, wish.prompt), max_tokens=wish.answer, time_left=1e4)
    return replace(told, priority=wish.priority)


def serve(wishes: list[Wish], blocks: int, limits: Limits = LIMITS, gap: int = 0) -> Rig:
    """In each step somebody advances, and each answer is what it would be alone.

    One comes every `gap` steps.
    """
    rig = Rig(Scheduler(limits, blocks, {EOS}), FakeDevice(blocks, B))
    coming = list(enumerate(wishes))
    steps = 0
    while coming or rig.book.requests:
        while coming and (not gap or steps % gap == 0 or not rig.book.requests):
            rig.submit(message(*coming.pop(0)))
            if gap:
                break
        before = rig.book.counters["tokens_out"] + rig.book.counters["prompt_tokens_computed"]
        plan = rig.step()
        rig.now += 1.0
        steps += 1
        after = rig.book.counters["tokens_out"] + rig.book.counters["prompt_tokens_computed"]
        assert after > before, "a step without progress while work exists"
        chunks = sum(len(s.tokens) for s in plan.batch if len(s.tokens) > 1)
        assert chunks <= limits.max_prefill_tokens
        if steps % 8 == 0:
            check_books(rig.book)
    for room, wish in enumerate(wishes):
        assert rig.said[room] == answer(prompt_of(room, wish.prompt), wish.answer)
    assert is_baseline(rig.book)
    return rig


wishes = st.builds(Wish, st.integers(1, 40), st.integers(1, 40), st.integers(-3, 3))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(wishes, min_size=1, max_size=20), st.integers(0, 3), st.integers(0, 3))
def test_whatever_is_asked_for_each_step_advances_somebody(
    asked: list[Wish], spare: int, gap: int
) -> None:
    """CASES 67: with hardly more memory than the largest request needs."""
    serve(asked, max(wish.blocks for wish in asked) + spare, gap=gap)


def adversarial(count: int, seed: int) -> list[Wish]:
    """Prompts as short as answers are long: nothing of what will be needed can be seen."""
    chance = Random(seed)
    return [
        Wish(chance.randint(1, 6), chance.choice([2, 100, 160]), chance.choice([0, 0, 1]))
        for _ in range(count)
    ]


def test_long_answers_at_twice_the_capacity_never_stand_still() -> None:
    """CASES 67, short: sixteen run, and at their ends they need more than twice the memory."""
    rig = serve(adversarial(48, 3), 200)
    assert rig.book.counters["retractions"] > 5


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(20))
def test_long_answers_at_twice_the_capacity_never_stand_still_for_long(seed: int) -> None:
    """CASES 67."""
    serve(adversarial(600, seed), 200, gap=seed % 4)


def test_of_32_requests_in_memory_for_one_all_finish_with_the_null_devices_tokens() -> None:
    """Hybrid: at 1.2 times the need of one, with a token at least for each prompt's few chunks."""
    rig = Rig(Scheduler(LIMITS, POOL, {256}), null_device(POOL, B))
    for room in range(32):
        rig.submit(submit(room, prompt_of(room), max_tokens=ANSWER))
    silent = 0
    while rig.book.requests:
        before = rig.book.counters["tokens_out"]
        rig.step()
        silent = 0 if rig.book.counters["tokens_out"] > before else silent + 1
        assert silent <= (PROMPT + ANSWER) // LIMITS.max_prefill_tokens + 1
    for room in (0, 7, 31):
        assert rig.said[room] == null_answer(prompt_of(room), ANSWER)
    large = Rig(Scheduler(LIMITS, 40 * POOL, {256}), null_device(40 * POOL, B))
    for room in range(32):
        large.submit(submit(room, prompt_of(room), max_tokens=ANSWER))
    while large.book.requests:
        large.step()
    assert rig.said == large.said
    assert is_baseline(rig.book)


@pytest.mark.parametrize("retraction", ["reprefill", "local"])
def test_of_32_requests_a_decode_worker_with_memory_for_one_finishes_all(retraction: str) -> None:
    """The same with a prefill worker that has no more either."""
    limits = replace(LIMITS, retraction="local" if retraction == "local" else "reprefill")
    pair = Pair(limits, prefill_blocks=POOL, decode_blocks=POOL, device=null_device)
    for room in range(32):
        pair.submit(room, prompt_of(room), ANSWER)
    silent = 0
    while pair.decode.book.requests:
        before = pair.decode.book.counters["tokens_out"]
        pair.round()
        silent = 0 if pair.decode.book.counters["tokens_out"] > before else silent + 1
        assert silent <= (PROMPT + ANSWER) // limits.max_prefill_tokens + 3
    for room in (0, 7, 31):
        assert pair.decode.said[room] == null_answer(prompt_of(room), ANSWER)
    assert is_baseline(pair.decode.book)


def test_a_low_priority_is_retracted_first_and_loses_nothing() -> None:
    """Three that grow in step: the one that matters least makes way, though it came first."""
    asked = [Wish(3, 30, -1), Wish(3, 30), Wish(3, 30)]
    limits = replace(LIMITS, reserved_tokens=1, adaptive_reserve=False)
    rig = serve(asked, 14, limits)
    assert rig.book.counters["retractions"] > 0
    ended = [o.room for o in rig.outputs if o.finish]
    assert ended == [1, 2, 0]


def test_a_high_priority_is_let_in_before_those_that_wait() -> None:
    limits = replace(LIMITS, max_batch_size=1)
    asked = [Wish(3, 6), Wish(3, 6), Wish(3, 6), Wish(3, 6, 5)]
    rig = serve(asked, 20, limits)
    assert [o.room for o in rig.outputs if o.finish] == [3, 0, 1, 2]


def test_a_low_priority_is_not_starved_by_a_stream_of_higher_ones() -> None:
    """One seat, and one with priority 9 comes whenever it is free: the other has its turn when it
    has waited for its head start, well before the stream ends."""
    limits = replace(LIMITS, max_batch_size=1)
    asked = [Wish(3, 10), Wish(3, 4), *(Wish(3, 10, 9) for _ in range(40))]
    rig = serve(asked, 20, limits, gap=5)
    ended = [o.room for o in rig.outputs if o.finish]
    assert 2 < ended.index(1) < 20


def test_nobody_is_passed_by_for_ever() -> None:
    """A request of the lowest priority that fills the pool, in a stream of small ones."""
    limits = replace(LIMITS, reserved_tokens=4, adaptive_reserve=False, max_batch_size=4)
    asked = [Wish(2, 8, 5) for _ in range(3)]
    asked += [Wish(40, 8, -1000), *(Wish(2, 8, 5) for _ in range(120))]
    rig = serve(asked, 14, limits, gap=2)
    ended = [o.room for o in rig.outputs if o.finish]
    assert ended.index(3) < 110
