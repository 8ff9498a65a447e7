"""No token that the model does not know gets into a sequence, whoever tells it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdrt.errors import BadRequest
from pdrt.messages import pack_tops
from pdrt.sched.base import Scheduler
from pdrt.sched.decode import DecodeDisaggScheduler
from pdrt.sched.prefill import PrefillDisaggScheduler
from pdrt.sched.request import State
from tests.sched.fakes import VOCABULARY, first_tokens, submit
from tests.sched.test_firsts import FIRST, LIMITS, PROMPT, land, transferring

KNOWN = VOCABULARY
BOUNDED = replace(LIMITS, vocab=KNOWN)


def test_a_bias_for_a_token_that_the_model_does_not_know_is_refused() -> None:
    """It is a place outside the row of logits; the device would fail, and all requests with it."""
    scheduler = Scheduler(BOUNDED, 100, eos=())
    wish = submit(1, PROMPT)
    for token in (KNOWN, 1 << 30):
        sampling = replace(wish.sampling, logit_bias=((KNOWN - 1, 1.0), (token, 1.0)))
        with pytest.raises(BadRequest, match=f"logit_bias: token {token}"):
            scheduler.submit(replace(wish, sampling=sampling), 0.0)
    known = replace(wish.sampling, logit_bias=((KNOWN - 1, 1.0),))
    scheduler.submit(replace(wish, sampling=known), 0.0)


@pytest.mark.parametrize("token", [-1, KNOWN, 1 << 30])
def test_a_slot_with_a_token_that_the_model_does_not_know_fails_its_attempt(token: int) -> None:
    """It would be looked up in the embedding by the next step, and the worker would die."""
    rig = transferring(BOUNDED)
    land(rig, token=token)
    assert (rig.said[1], rig.ends[1]) == ([], ["transfer_failed"])
    assert rig.book.counters["slots_refused"] == 1
    assert rig.book.blocks.used == 0


def test_the_last_token_of_the_vocabulary_is_known() -> None:
    rig = transferring(BOUNDED)
    land(rig, token=KNOWN - 1)
    assert (rig.said[1], rig.state(1)) == ([KNOWN - 1], State.RUNNING)


@pytest.mark.parametrize("is_early", [True, False])
@pytest.mark.parametrize(
    ("token", "likely"), [(KNOWN, 3), (FIRST[0], KNOWN), (FIRST[0], -1), (1 << 30, 1 << 30)]
)
def test_first_tokens_that_the_model_does_not_know_are_dropped(
    token: int, likely: int, *, is_early: bool
) -> None:
    """A request that cannot do without them ends when its KV is here."""
    rig = transferring(replace(BOUNDED, early_first_token=is_early), top=2)
    tops = pack_tops([((token, -0.5), (likely, -1.0))])
    rig.feed(replace(first_tokens(1, 0, PROMPT), tokens=(token,), tops=tops))
    assert (rig.said.get(1), rig.book.counters["firsts_refused"]) == (None, 1)
    land(rig)
    assert (rig.said[1], rig.ends[1]) == ([], ["transfer_failed"])


def test_early_first_tokens_that_are_dropped_leave_it_to_the_slot() -> None:
    rig = transferring(BOUNDED)
    rig.feed(replace(first_tokens(1, 0, PROMPT), tokens=(KNOWN,)))
    assert rig.said.get(1) is None
    land(rig)
    assert rig.said[1] == FIRST


@pytest.mark.parametrize("token", [-1, KNOWN])
@pytest.mark.parametrize("make", [DecodeDisaggScheduler, Scheduler, PrefillDisaggScheduler])
def test_a_prompt_with_an_unknown_token_is_refused_by_each_worker(make: type, token: int) -> None:
    """The leader has looked; a resumed answer's tokens come from another machine."""
    own = {DecodeDisaggScheduler: (64, 8, ()), Scheduler: (64, ()), PrefillDisaggScheduler: (64,)}
    scheduler = make(BOUNDED, *own[make])
    with pytest.raises(BadRequest, match=f"token {token} is outside the vocabulary"):
        scheduler.submit(submit(1, [1, token, 2]), 0.0)
    assert scheduler.is_idle
