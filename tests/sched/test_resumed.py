"""An answer that another instance began: it goes on, token for token, and nothing is said twice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pdrt.errors import BadRequest, TooLong
from pdrt.messages import AskPrefill, Said, pack_ids
from pdrt.sched.base import Scheduler
from pdrt.sched.limits import Limits
from tests.sched.fakes import EOS, FakeDevice, Rig, answers, check_books, is_baseline, submit
from tests.sched.pair import Pair

LIMITS = Limits(block_size=4, max_batch_size=8, max_prefill_tokens=8, reserved_tokens=4)
PROMPT = [1 + (31 * i) % 90 for i in range(11)]
LENGTH, SEED = 9, 5


def pair(retraction: Any = "reprefill", *, refuses: bool = False, lag: int = 0) -> Pair:
    limits = replace(LIMITS, retraction=retraction)
    return Pair(limits, prefill_blocks=40, decode_blocks=40, refuses=lambda _ask: refuses, lag=lag)


@pytest.mark.parametrize("way", ["reprefill", "local", "refused"])
@pytest.mark.parametrize("told", range(LENGTH))
def test_one_sequence_goes_on_from_every_position(told: int, way: str) -> None:
    """Prefill computes prompt and output, whatever decode does with those that it retracts; when
    that is refused, decode does it itself."""
    both = pair("local" if way == "local" else "reprefill", refuses=way == "refused", lag=2)
    (whole,) = answers(PROMPT, LENGTH, 1)
    both.resume(7, PROMPT, LENGTH, {0: whole[:told]})
    both.finish(100)
    assert whole[:told] + both.decode.sequences[7, 0] == whole
    assert both.decode.finished[7, 0] == ["length"]
    computed_here = both.decode.book.counters["prompt_tokens_computed"] > 0
    assert computed_here == (way == "refused")


@pytest.mark.parametrize("way", ["reprefill", "refused"])
@pytest.mark.parametrize("told", [(0, 0, 0), (1, 1, 1), (3, 0, 8), (None, 2, 5), (None, None, 4)])
def test_each_sequence_of_a_group_goes_on_from_where_it_was(
    told: tuple[int | None, ...], way: str
) -> None:
    """None: it had ended. Their prompt is one no more, and those that lag do not wait."""
    both, whole = pair(refuses=way == "refused", lag=1), answers(PROMPT, LENGTH, 3, SEED)
    said = {i: whole[i][:count] for i, count in enumerate(told) if count is not None}
    both.resume(7, PROMPT, LENGTH, said, n=3, seed=SEED)
    both.finish(200)
    assert {i for _, i in both.decode.sequences} == set(said)
    assert all(ids + both.decode.sequences[7, i] == whole[i] for i, ids in said.items())
    assert all(both.decode.finished[7, i] == ["length"] for i in said)


def test_the_client_leaves_at_any_round_and_nothing_is_kept() -> None:
    whole = answers(PROMPT, LENGTH, 2, SEED)
    for rounds in range(12):
        both = pair(lag=1)
        both.resume(7, PROMPT, LENGTH, {0: whole[0][:2], 1: whole[1][:4]}, n=2, seed=SEED)
        for _ in range(rounds):
            both.round()
        both.cancel(7)
        both.finish(20)
        assert is_baseline(both.decode.book), rounds


def hybrid(limits: Limits = LIMITS) -> Rig:
    return Rig(Scheduler(limits, 40, {EOS}), FakeDevice(40, limits.block_size))


@pytest.mark.parametrize("told", range(LENGTH))
def test_an_instance_that_computes_prompts_itself_goes_on_too(told: int) -> None:
    rig, whole = hybrid(), answers(PROMPT, LENGTH, 2, SEED)
    begun = (Said(index=0, tokens=pack_ids(whole[0][:told])), Said(index=1))
    message = submit(7, PROMPT, max_tokens=LENGTH, source=None, n=2, seed=SEED)
    rig.submit(replace(message, said=begun))
    while rig.book.requests:
        rig.step()
        check_books(rig.book)
    assert whole[0][:told] + rig.sequences[7, 0] == whole[0]
    assert rig.sequences[7, 1] == whole[1]
    assert is_baseline(rig.book)


def test_what_was_whole_already_ends_at_once() -> None:
    """The instance died between the last token and its end."""
    both, whole = pair(), answers(PROMPT, LENGTH, 2, SEED)
    both.resume(7, PROMPT, LENGTH, {0: whole[0], 1: whole[1][:3]}, n=2, seed=SEED)
    both.finish(100)
    assert both.decode.finished == {(7, 0): ["length"], (7, 1): ["length"]}
    assert both.decode.sequences[7, 0] == []


@pytest.mark.parametrize(
    "said",
    [
        (Said(index=2),),
        (Said(index=0), Said(index=0)),
        (Said(index=0, tokens=b"odd"),),
        (Said(index=1, tokens=pack_ids([1 << 30])),),
    ],
)
def test_what_cannot_have_been_said_is_refused_and_nothing_is_kept(said: tuple[Said, ...]) -> None:
    limits = replace(LIMITS, vocab=97)
    both = Pair(limits, prefill_blocks=40, decode_blocks=40)
    for rig in (hybrid(limits), both.decode):
        with pytest.raises(BadRequest):
            rig.submit(replace(submit(7, PROMPT, n=2), said=said))
        assert is_baseline(rig.book)
        assert not rig.take(AskPrefill)


def test_one_that_can_never_fit_is_refused() -> None:
    both = Pair(LIMITS, prefill_blocks=4, decode_blocks=4)
    with pytest.raises(TooLong):
        both.resume(7, PROMPT, 9, {0: [1, 2]})
