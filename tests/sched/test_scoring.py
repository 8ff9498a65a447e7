"""The prompt's odds are gathered chunk by chunk and told once, with the answer's first word.

CASES 90: on hybrid with the first token, on prefill with the word that the prompt has arrived.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from pdrt.data.events import SendEnded, SenderReady
from pdrt.device.batch import Drawn, Odds, SeqStep
from pdrt.messages import Top, unpack_odds
from pdrt.sched.base import Scheduler
from pdrt.sched.events import Cancelled
from pdrt.sched.limits import Limits
from pdrt.sched.prefill import PrefillDisaggScheduler
from tests.sched.fakes import EOS, FakeDevice, Rig, check_books, is_baseline, submit

B = 4
LIMITS = Limits(block_size=B, max_prefill_tokens=8, reserved_tokens=8)
PROMPT = list(range(3, 24))  # 2.6 chunks


class ScoringDevice(FakeDevice):
    """The odds of a target tell its position and what stands before it, as the pool has it."""

    def __init__(self, blocks: int = 64, damaged: int = -1) -> None:
        super().__init__(blocks, B)
        self.damaged = damaged  # position whose odds are no number

    def execute(self, batch: Sequence[SeqStep]) -> list[Drawn]:
        drawn = {one.key: one for one in super().execute(batch)}
        for step in batch:
            if step.scoring is not None:
                one = drawn.get(step.key, Drawn(step.key, -1, 0.0))
                drawn[step.key] = replace(one, scored=self._scored(step))
        return list(drawn.values())

    def _scored(self, step: SeqStep) -> tuple[Odds, ...]:
        assert step.scoring is not None
        held = self.read(step.blocks, step.start + len(step.tokens))
        return tuple(
            self.odds(held[: row + 1], target, step.scoring.top)
            for row, target in enumerate(step.scoring.targets, step.start)
        )

    def odds(self, before: Sequence[int], target: int, top: int) -> Odds:
        if len(before) == self.damaged:
            return Odds(math.nan)
        logprob = -len(before) - sum(before) / 1024 - target / 64
        return Odds(logprob, ((before[-1], -0.5), (target, -0.75))[:top])


def want(prompt: Sequence[int], top: int) -> list[tuple[float, Top]]:
    device = ScoringDevice()
    odds = [device.odds(prompt[:i], prompt[i], top) for i in range(1, len(prompt))]
    return [(one.logprob, one.top) for one in odds]


def told(scored: bytes, prompt: Sequence[int]) -> list[tuple[float, Top]]:
    return unpack_odds(scored, len(prompt) - 1)


def hybrid(blocks: int = 64, limits: Limits = LIMITS, damaged: int = -1) -> Rig:
    return Rig(Scheduler(limits, blocks, {EOS}), ScoringDevice(blocks, damaged))


def run(rig: Rig, room: int = 1) -> None:
    while room in rig.book.rooms:
        rig.step()
        check_books(rig.book)


@pytest.mark.parametrize("length", [2, B, 8, 9, 21])
@pytest.mark.parametrize("top", [0, 2])
def test_hybrid_tells_them_with_the_first_token_and_never_again(length: int, top: int) -> None:
    rig, prompt = hybrid(), PROMPT[:length]
    rig.submit(replace(submit(1, prompt, max_tokens=5), scoring=top))
    run(rig)
    first, *others = rig.outputs
    assert told(first.scored, prompt) == want(prompt, top)
    assert len(first.tokens) == 1
    assert [output.scored for output in others] == [b""] * 4
    assert not any(step.scoring for batch in rig.device.batches[-4:] for step in batch)


def test_what_was_not_asked_for_is_not_computed() -> None:
    rig = hybrid()
    rig.submit(submit(1, PROMPT))
    run(rig)
    assert not any(step.scoring for batch in rig.device.batches for step in batch)
    assert {output.scored for output in rig.outputs} == {b""}


def test_a_prompt_of_one_token_has_nothing_to_score() -> None:
    rig = hybrid()
    rig.submit(replace(submit(1, [5], max_tokens=2), scoring=3))
    run(rig)
    assert [output.scored for output in rig.outputs] == [b"", b""]


def test_a_cached_prefix_hides_no_token() -> None:
    """It is computed once more, and what is computed may be found again as ever."""
    rig = hybrid()
    rig.submit(submit(1, PROMPT))
    run(rig)
    rig.submit(replace(submit(2, PROMPT), scoring=0))
    run(rig, 2)
    rig.submit(submit(3, PROMPT))
    run(rig, 3)
    firsts = {output.room: output for output in reversed(rig.outputs)}
    assert told(firsts[2].scored, PROMPT) == want(PROMPT, 0)
    assert [firsts[room].cached_tokens for room in (1, 2, 3)] == [0, 0, 20]
    assert rig.said[1] == rig.said[2] == rig.said[3]


def test_one_that_was_retracted_in_its_prompt_is_scored_anew_and_whole() -> None:
    rig = hybrid(blocks=9, limits=replace(LIMITS, reserved_tokens=0))
    rig.submit(submit(1, PROMPT[:15], max_tokens=20))
    rig.step()
    rig.submit(replace(submit(2, PROMPT[:19], max_tokens=4), scoring=1))
    run(rig, 2)
    run(rig, 1)
    assert rig.book.counters["retractions"] > 0
    scored = [output.scored for output in rig.outputs if output.room == 2 and output.scored]
    assert [told(one, PROMPT[:19]) for one in scored] == [want(PROMPT[:19], 1)]


def test_a_retracted_answer_is_not_scored_again() -> None:
    """Prompt and output are computed once more; the odds were told."""
    rig = hybrid(blocks=9, limits=replace(LIMITS, reserved_tokens=0, prefix_cache=False))
    for room in (1, 2):
        prompt = [room, *PROMPT[:11]]
        rig.submit(replace(submit(room, prompt, max_tokens=16), scoring=0))
    while rig.book.rooms:
        rig.step()
        check_books(rig.book)
    assert rig.book.counters["retractions"] > 0
    for room in (1, 2):
        scored = [output.scored for output in rig.outputs if output.room == room]
        assert [bool(one) for one in scored] == [True] + [False] * 15
        assert told(scored[0], [room, *PROMPT[:11]]) == want([room, *PROMPT[:11]], 0)


@pytest.mark.parametrize("damaged", [1, 7, 20])
def test_odds_that_are_no_number_end_the_request_as_a_token_would(damaged: int) -> None:
    """CASES 54: JSON has no NaN, and a client must not read one."""
    rig = hybrid(damaged=damaged)
    rig.submit(replace(submit(1, PROMPT), scoring=0))
    run(rig)
    assert rig.ends[1] == ["bad_logits"]
    assert rig.said[1] == []
    assert is_baseline(rig.book)


@pytest.mark.parametrize("length", [2, 21])
def test_prefill_tells_them_when_the_prompt_has_arrived(length: int) -> None:
    rig = Rig(PrefillDisaggScheduler(LIMITS, 64), ScoringDevice())
    prompt = PROMPT[:length]
    rig.submit(replace(submit(1, prompt), scoring=2))
    rig.feed(SenderReady(1, 0, length // B))  # decode holds all of it: it is computed all the same
    while rig.step().batch:
        pass
    assert rig.outputs == []
    rig.feed(SendEnded(1, 0, None))
    (output,) = rig.outputs
    assert (output.finish, told(output.scored, prompt)) == ("prefilled", want(prompt, 2))
    assert is_baseline(rig.book)


def test_a_prefill_that_is_not_wanted_any_more_tells_nothing() -> None:
    rig = Rig(PrefillDisaggScheduler(LIMITS, 64), ScoringDevice())
    rig.submit(replace(submit(1, PROMPT), scoring=2))
    rig.feed(SenderReady(1, 0, 0))
    rig.step()
    rig.feed(Cancelled(1, "client_gone"))
    assert [output.scored for output in rig.outputs] == [b""]
