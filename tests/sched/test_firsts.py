"""First tokens ahead of their KV: said at once and once, and never lost with an attempt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from pdrt.data.commands import AbortReceiver, AdmitReceiver, OpenReceiver
from pdrt.data.events import FirstTokens, Quiet, ReceiveFailed, ReceiverReady
from pdrt.data.transfer import Key
from pdrt.messages import AskPrefill, Problem, pack_ids, pack_tops
from pdrt.sched.decode import DecodeDisaggScheduler
from pdrt.sched.events import Cancelled, Rebound, ResumeLocally
from pdrt.sched.limits import Limits
from pdrt.sched.request import State
from tests.sched.fakes import (
    AWAY,
    EOS,
    HOME,
    FakeDevice,
    Rig,
    answer,
    check_books,
    first_tokens,
    is_baseline,
    received,
    submit,
)
from tests.sched.pair import Pair

B = 4
LIMITS = Limits(block_size=B, max_prefill_tokens=8, reserved_tokens=4)
PROMPT = [1, 2, 3, 4, 5, 6]
FIRST = answer(PROMPT, 1)
LOST = Problem(code="peer_lost", message="prefill is gone")
HOPELESS = Problem(code="prompt_mismatch", message="no")
RETRY = 1 << 16
TOPS = pack_tops([((FIRST[0], -0.5), (9, -1.0))])


def transferring(
    limits: Limits = LIMITS,
    *,
    top: int = 0,
    max_tokens: int = 4,
    ignore_eos: bool = True,
    stop: tuple[int, ...] = (),
) -> Rig:
    rig = Rig(DecodeDisaggScheduler(limits, 64, 8, {EOS}), FakeDevice(64, B))
    rig.submit(submit(1, PROMPT, max_tokens=max_tokens, ignore_eos=ignore_eos, stop=stop, top=top))
    admit(rig)
    return rig


def admit(rig: Rig) -> AdmitReceiver:
    """The kept one is the last: `land` looks for it."""
    rig.feed(ReceiverReady(1, rig.book.rooms[1].attempt))
    rig.step()
    assert rig.state(1) is State.TRANSFERRING
    return last_admitted(rig)


def last_admitted(rig: Rig) -> AdmitReceiver:
    return [e for e in rig.effects if isinstance(e, AdmitReceiver)][-1]


def land(rig: Rig, tokens: Sequence[int] = PROMPT, token: int | None = None) -> None:
    admitted = last_admitted(rig)
    blocks = rig.book.rooms[1].blocks
    rig.device.write(blocks, 0, tokens)
    rig.feed(received(1, admitted.attempt, tokens, token))


def finish(rig: Rig) -> None:
    for _ in range(100):
        if not rig.book.requests:
            return
        rig.step()
        check_books(rig.book)
    raise AssertionError(rig.book.rooms)


def test_the_first_token_is_said_before_its_kv_is_here_and_not_again() -> None:
    """CASES 97: no duplicate, no gap."""
    rig = transferring(max_tokens=5)
    rig.feed(first_tokens(1, 0, PROMPT))
    assert rig.said[1] == FIRST
    assert rig.state(1) is State.TRANSFERRING
    check_books(rig.book)
    assert not rig.step().batch
    land(rig)
    assert (rig.said[1], rig.state(1)) == (FIRST, State.RUNNING)
    finish(rig)
    assert rig.said[1] == answer(PROMPT, 5)
    assert rig.ends[1] == ["length"]
    assert is_baseline(rig.book)


def test_kv_that_was_faster_makes_the_message_needless() -> None:
    rig = transferring()
    land(rig)
    rig.feed(first_tokens(1, 0, PROMPT))
    finish(rig)
    assert rig.said[1] == answer(PROMPT, 4)


def test_it_is_said_with_its_kv_if_the_settings_say_so() -> None:
    rig = transferring(replace(LIMITS, early_first_token=False))
    rig.feed(first_tokens(1, 0, PROMPT))
    assert rig.said.get(1) is None
    land(rig)
    assert rig.said[1] == FIRST
    finish(rig)
    assert rig.said[1] == answer(PROMPT, 4)


@pytest.mark.parametrize("is_early", [True, False])
def test_the_likeliest_tokens_come_from_the_message_and_each_step_has_its_own(
    is_early: bool,
) -> None:
    rig = transferring(replace(LIMITS, early_first_token=is_early), top=2)
    assert last_admitted(rig).needs_firsts
    rig.feed(FirstTokens(1, 0, (FIRST[0],), (-0.5,), TOPS, 3))
    assert (1 in rig.said) == is_early
    land(rig)
    finish(rig)
    assert rig.said[1] == answer(PROMPT, 4)
    assert rig.outputs[0].tops == TOPS
    assert [o.cached_tokens for o in rig.outputs] == [3 if is_early else 0, 0, 0, 0]


def test_a_slot_without_the_message_that_is_needed_ends_the_request() -> None:
    """The data plane does not let it come to this."""
    rig = transferring(top=2)
    land(rig)
    assert rig.ends[1] == ["transfer_failed"]
    assert is_baseline(rig.book)


@pytest.mark.parametrize(
    ("max_tokens", "ignore_eos", "token", "end"),
    [
        (1, True, FIRST[0], "length"),
        (4, False, EOS, "stop"),
        (4, True, 55, "stop"),
    ],
)
def test_a_first_token_that_is_the_last_needs_no_kv(
    max_tokens: int, ignore_eos: bool, token: int, end: str
) -> None:
    """CASES 85, 86, 87: and the memory that is being written waits for the proof."""
    rig = transferring(max_tokens=max_tokens, ignore_eos=ignore_eos, stop=(55,))
    rig.feed(FirstTokens(1, 0, (token,), (-0.5,)))
    assert rig.said[1] == [token]
    assert rig.ends[1] == [end]
    (abort,) = rig.take(AbortReceiver)
    assert isinstance(abort, AbortReceiver)
    assert abort.is_served
    assert rig.sched.stats().blocks_quarantined == 2
    check_books(rig.book)
    rig.feed(Quiet(1, 0))
    assert is_baseline(rig.book)
    assert rig.device.batches == []


def test_a_last_token_that_is_said_with_its_kv_frees_at_once() -> None:
    rig = transferring(replace(LIMITS, early_first_token=False), top=1, max_tokens=1)
    rig.feed(FirstTokens(1, 0, (FIRST[0],), (-0.5,), TOPS[:8]))
    land(rig)
    assert rig.ends[1] == ["length"]
    assert rig.take(AbortReceiver) == []
    assert is_baseline(rig.book)


@pytest.mark.parametrize("reason", ["stop", "client_gone"])
def test_a_stop_string_in_the_first_token_is_no_failure_of_the_prefill_side(reason: str) -> None:
    """CASES 86."""
    rig = transferring()
    rig.feed(first_tokens(1, 0, PROMPT))
    rig.feed(Cancelled(1, reason))
    (abort,) = rig.take(AbortReceiver)
    assert isinstance(abort, AbortReceiver)
    assert abort.is_served == (reason == "stop")
    rig.feed(Quiet(1, 0))
    assert is_baseline(rig.book)


@pytest.mark.parametrize("again", ["twice", "other", "late", "stale", "too many"])
def test_what_comes_twice_late_or_of_another_attempt_says_nothing(again: str) -> None:
    """CASES 61."""
    rig = transferring(max_tokens=5)
    rig.feed(first_tokens(1, 0, PROMPT))
    if again == "late":
        land(rig)
    junk = {
        "other": FirstTokens(1, 0, (66,), (-0.5,)),
        "stale": FirstTokens(1, 7, (66,), (-0.5,)),
        "too many": FirstTokens(1, 0, (66, 67), (-0.5, -0.5)),
    }
    rig.feed(junk.get(again, first_tokens(1, 0, PROMPT)))
    assert rig.said[1] == FIRST
    if again != "late":
        land(rig)
    finish(rig)
    assert rig.said[1] == answer(PROMPT, 5)


def test_firsts_before_anybody_was_told_our_blocks_are_ignored() -> None:
    rig = Rig(DecodeDisaggScheduler(LIMITS, 64, 8, {EOS}), FakeDevice(64, B))
    rig.submit(submit(1, PROMPT))
    rig.feed(first_tokens(1, 0, PROMPT))
    assert rig.said == {}
    assert rig.book.counters["ignored"] == 1


def lose(rig: Rig, problem: Problem = LOST, *, was_written: bool = False) -> None:
    rig.feed(ReceiveFailed(1, 0, problem, was_written))


@pytest.mark.parametrize("was_written", [False, True])
def test_an_attempt_lost_after_its_token_was_said_is_resumed_with_it(was_written: bool) -> None:
    """SPEC promise 4: it is decode that asks again, and the token is not told twice."""
    rig = transferring(max_tokens=5)
    rig.feed(first_tokens(1, 0, PROMPT))
    lose(rig, was_written=was_written)
    so_far = [*PROMPT, *FIRST]
    assert rig.take(AskPrefill) == [AskPrefill(room=1, attempt=1, tokens=pack_ids(so_far))]
    assert rig.take(OpenReceiver)[-1] == OpenReceiver(1, 1, HOME, 100.0)
    assert rig.sched.stats().blocks_quarantined == 2
    check_books(rig.book)
    again = admit(rig)
    assert (again.attempt, again.prompt_tokens) == (1, 7)
    rig.feed(first_tokens(1, 1, so_far))
    assert rig.said[1] == answer(PROMPT, 2)
    land(rig, so_far)
    rig.feed(Quiet(1, 0))
    finish(rig)
    assert rig.said[1] == answer(PROMPT, 5)
    assert rig.ends[1] == ["length"]
    assert is_baseline(rig.book)


def test_it_is_resumed_here_if_policy_says_so() -> None:
    rig = transferring(replace(LIMITS, retraction="local"), max_tokens=5)
    rig.feed(first_tokens(1, 0, PROMPT))
    lose(rig)
    assert rig.state(1) is State.QUEUED
    finish(rig)
    assert rig.said[1] == answer(PROMPT, 5)
    rig.feed(Quiet(1, 0))
    assert is_baseline(rig.book)


@pytest.mark.parametrize("how", ["told", "lost"])
def test_an_attempt_to_resume_that_is_lost_too_is_computed_here_with_all_that_was_said(
    how: str,
) -> None:
    rig = transferring(max_tokens=5)
    rig.feed(first_tokens(1, 0, PROMPT))
    lose(rig)
    admit(rig)
    rig.feed(first_tokens(1, 1, [*PROMPT, *FIRST]))
    rig.feed(ResumeLocally(1) if how == "told" else ReceiveFailed(1, 1, LOST))
    assert rig.state(1) is State.QUEUED
    finish(rig)
    assert rig.said[1] == answer(PROMPT, 5)
    for attempt in (0, 1):
        rig.feed(Quiet(1, attempt))
    assert is_baseline(rig.book)


def test_what_no_attempt_can_mend_is_told_even_after_a_token() -> None:
    rig = transferring()
    rig.feed(first_tokens(1, 0, PROMPT))
    lose(rig, HOPELESS)
    assert rig.ends[1] == ["prompt_mismatch"]


def test_without_a_token_said_the_router_is_waited_for_as_ever() -> None:
    rig = transferring(replace(LIMITS, early_first_token=False), top=2)
    rig.feed(FirstTokens(1, 0, (FIRST[0],), (-0.5,), TOPS))
    lose(rig)
    assert rig.state(1) is State.UNBOUND
    rig.feed(Rebound(1, RETRY, AWAY))
    admit(rig)
    rig.feed(FirstTokens(1, RETRY, (FIRST[0],), (-0.5,), TOPS))
    land(rig)
    finish(rig)
    assert rig.said[1] == answer(PROMPT, 4)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_rebind_that_crosses_with_the_token_is_not_needed(when: str) -> None:
    """The router had not heard of the token yet."""
    rig = transferring(max_tokens=5)
    rig.feed(first_tokens(1, 0, PROMPT))
    if when == "after":
        lose(rig)
    rig.feed(Rebound(1, RETRY, AWAY))
    assert rig.book.rooms[1].attempt == (when == "after")
    if when == "before":
        lose(rig)
    admit(rig)
    land(rig, [*PROMPT, *FIRST])
    finish(rig)
    assert rig.said[1] == answer(PROMPT, 5)


def test_a_slot_that_names_another_token_than_was_said_is_refused() -> None:
    """CASES 57: the KV may be of another prompt, so none of it is used."""
    rig = transferring(max_tokens=5)
    rig.feed(first_tokens(1, 0, PROMPT))
    land(rig, token=FIRST[0] + 1)
    assert rig.book.counters["slots_refused"] == 1
    assert len(rig.take(AskPrefill)) == 1
    assert rig.book.blocks.used == 0
    admit(rig)
    land(rig, [*PROMPT, *FIRST])
    finish(rig)
    assert rig.said[1] == answer(PROMPT, 5)


ROOMS = 24


@pytest.mark.parametrize("is_early", [True, False])
@pytest.mark.parametrize("retraction", ["reprefill", "local"])
def test_a_slow_wire_that_breaks_now_and_then_changes_no_answer(
    is_early: bool, retraction: str
) -> None:
    """CASES 13, 97: however often an attempt is lost after its first token."""
    limits = replace(LIMITS, early_first_token=is_early)
    limits = replace(limits, retraction="local") if retraction == "local" else limits
    chance = Random(5)

    def breaks(key: Key) -> bool:
        return is_early and key[1] == 0 and chance.random() < 0.4

    pair = Pair(limits, prefill_blocks=40, decode_blocks=24, lag=3, breaks=breaks)
    prompts = {
        room: [1 + (room * 7 + i) % 90 for i in range(1 + room % 11)] for room in range(ROOMS)
    }
    for room, prompt in prompts.items():
        pair.submit(room, prompt, 1 + room % 6)
    pair.finish(4000)
    for room, prompt in prompts.items():
        assert pair.decode.said[room] == answer(prompt, 1 + room % 6)
        assert pair.decode.ends[room] == ["length"]
    assert (pair.decode.book.counters["resumed"] > 3) == is_early


def test_the_first_token_is_said_as_many_rounds_earlier_as_its_kv_is_late() -> None:
    """CASES 97: TTFT excludes the transfer."""

    def rounds_to_first(is_early: bool, lag: int) -> int:
        limits = replace(LIMITS, early_first_token=is_early)
        pair = Pair(limits, prefill_blocks=40, decode_blocks=24, lag=lag)
        pair.submit(1, PROMPT, 4)
        while not pair.decode.said.get(1):
            pair.round()
        return pair.rounds

    assert rounds_to_first(True, 9) == rounds_to_first(True, 0) == rounds_to_first(False, 9) - 9


def test_a_trial_of_a_pair_says_nothing_before_the_kv_is_here() -> None:
    """CASES 105: what a canary has passed was a real transfer."""
    rig = Rig(DecodeDisaggScheduler(LIMITS, 64, 8, {EOS}), FakeDevice(64, B))
    rig.submit(replace(submit(1, PROMPT), is_trial=True))
    admit(rig)
    rig.feed(first_tokens(1, 0, PROMPT))
    assert rig.said == {}
    lose(rig, was_written=True)
    assert rig.ends[1] == ["peer_lost"]
    rig.feed(Quiet(1, 0))
    assert is_baseline(rig.book)
