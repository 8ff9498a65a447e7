"""The admission formula, who is passed by, and how long."""

from __future__ import annotations

from dataclasses import replace
from typing import NoReturn

import pytest

from pdrt.data.layout import blocks_for
from pdrt.messages import Sampling
from pdrt.sched.admission import Space, admit, reserve
from pdrt.sched.blocks import BlockPool
from pdrt.sched.limits import Limits
from pdrt.sched.prefix import Chain
from pdrt.sched.request import Request, State

B, R = 4, 8
LIMITS = Limits(block_size=B, reserved_tokens=R, patience=3)


def waiting(key: int, prompt: int, *, max_tokens: int = 100, returning: bool = False) -> Request:
    return Request(
        key=key,
        room=key,
        attempt=0,
        tokens=[1] * prompt,
        prompt_tokens=prompt,
        sampling=Sampling(max_tokens=max_tokens),
        stops=frozenset(),
        deadline=1.0,
        state=State.WAITING,
        is_returning=returning,
    )


def space(blocks: int, *, slots: int = 99, requests: int = 99) -> Space:
    return Space(blocks=blocks, slots=slots, requests=requests, prefill_tokens=0)


def granted(line: list[Request], free: Space) -> list[int]:
    return [g.request.key for g in admit(line, free, LIMITS, BlockPool(0)).granted]


@pytest.mark.parametrize("prompt", [1, 3, 4, 5, 13])
@pytest.mark.parametrize("n", [0, 1, 3])
def test_admission_is_the_formula(prompt: int, n: int) -> None:
    """ceil((prompt + R) / B) <= free - n * ceil(R / B), at the boundary on both sides."""
    enough = blocks_for(prompt + R, B) + n * blocks_for(R, B)
    held = [waiting(100 + i, 5) for i in range(n)]
    reserved = sum(reserve(r, LIMITS) for r in held)
    assert granted([waiting(1, prompt)], space(enough - reserved)) == [1]
    assert granted([waiting(1, prompt)], space(enough - 1 - reserved)) == []


def test_blocks_are_granted_for_the_tokens_and_reserved_for_the_rest() -> None:
    free = space(20)
    admission = admit([waiting(1, 5)], free, LIMITS, BlockPool(0))
    assert admission.granted[0].blocks == 2
    assert free.blocks == 20 - 2 - 2


def test_no_more_is_reserved_than_a_request_may_still_say() -> None:
    assert reserve(waiting(1, 5, max_tokens=1), LIMITS) == 1
    assert granted([waiting(1, 7, max_tokens=1)], space(2)) == [1]


def test_a_large_head_is_passed_by_and_ages_once_for_each_that_passes() -> None:
    large = waiting(1, 100)
    admission = admit([large, waiting(2, 1), waiting(3, 1)], space(12), LIMITS, BlockPool(0))
    assert [g.request.key for g in admission.granted] == [2, 3]
    assert admission.overtaken == (large, large)


def test_a_request_is_passed_by_no_more_often_than_patience_allows() -> None:
    line = [waiting(1, 100), *(waiting(k, 1) for k in range(2, 12))]
    assert granted(line, space(24)) == [2, 3, 4]


def test_patience_is_counted_over_rounds() -> None:
    large = waiting(1, 100)
    large.overtaken = 2
    assert granted([large, waiting(2, 1), waiting(3, 1)], space(24)) == [2]
    large.overtaken = 3
    assert granted([large, waiting(2, 1)], space(24)) == []


def test_those_before_a_large_request_do_not_age_it() -> None:
    large = waiting(9, 100)
    admission = admit([waiting(1, 1), waiting(2, 1), large], space(12), LIMITS, BlockPool(0))
    assert [g.request.key for g in admission.granted] == [1, 2]
    assert admission.overtaken == ()


def test_a_request_that_comes_back_is_never_passed_by() -> None:
    assert granted([waiting(1, 100, returning=True), waiting(2, 1)], space(24)) == []


def test_of_a_long_line_only_its_head_is_looked_at() -> None:
    """A step costs no more with 10,000 that wait than with 100."""
    line = (waiting(k, 100) for k in range(10_000))
    limits = replace(LIMITS, lookahead=64)
    assert admit(line, space(24), limits, BlockPool(0)).granted == ()
    assert next(line).key == 65


def test_no_slot_no_grant() -> None:
    assert granted([waiting(1, 1), waiting(2, 1)], space(24, slots=1)) == [1]


def test_no_seat_no_grant() -> None:
    assert granted([waiting(1, 1), waiting(2, 1)], space(24, requests=1)) == [1]


def test_what_is_computed_here_needs_prefill_budget_and_no_slot() -> None:
    queued = waiting(1, 9)
    queued.state = State.QUEUED
    free = Space(blocks=24, slots=0, requests=9, prefill_tokens=3)
    assert [g.blocks for g in admit([queued], free, LIMITS, BlockPool(0)).granted] == [3]
    assert free.prefill_tokens < 0
    assert admit([queued], free, LIMITS, BlockPool(0)).granted == ()


# With prefixes that are known.


def known(pool: BlockPool, blocks: int, *, owned: int) -> tuple[int, ...]:
    """Blocks of prompts of ones; the first `owned` have an owner."""
    taken = pool.take(blocks)
    assert taken is not None
    keys = Chain().keys([1] * (B * blocks), blocks, B)
    for key, block in zip(keys, taken, strict=True):
        pool.cache.register(key, block)
    pool.give(taken[owned:])
    return taken


@pytest.mark.parametrize("owned", [0, 1, 2, 3])
@pytest.mark.parametrize("prompt", [12, 13, 14, 17])
def test_what_others_own_of_its_prefix_is_not_needed_again(prompt: int, owned: int) -> None:
    """ceil((prompt + R) / B) - owned <= space, at the boundary; cached blocks count as free."""
    pool = BlockPool(9)
    blocks = known(pool, 3, owned=owned)
    hit = min(3, (prompt - 1) // B)
    enough = blocks_for(prompt + R, B) - min(owned, hit)
    left = space(enough)
    (grant,) = admit([waiting(1, prompt)], left, LIMITS, pool).granted
    assert (grant.hit, grant.blocks) == (blocks[:hit], blocks_for(prompt, B))
    after = enough - grant.blocks + min(owned, hit) - blocks_for(R, B)
    assert left.blocks == after
    assert admit([waiting(1, prompt)], space(enough - 1), LIMITS, pool).granted == ()


def test_the_second_of_a_round_shares_what_the_first_was_granted() -> None:
    pool = BlockPool(9)
    known(pool, 3, owned=0)
    line = [waiting(1, 13), waiting(2, 13)]
    first, second = blocks_for(13 + R, B), blocks_for(13 + R, B) - 3
    assert len(admit(line, space(first + second), LIMITS, pool).granted) == 2
    assert len(admit(line, space(first + second - 1), LIMITS, pool).granted) == 1


def test_the_last_token_of_a_prompt_is_never_a_hit() -> None:
    pool = BlockPool(9)
    blocks = known(pool, 3, owned=3)
    assert admit([waiting(1, 12)], space(9), LIMITS, pool).granted[0].hit == blocks[:2]


def test_a_prompt_pays_the_prefill_budget_only_for_what_is_new() -> None:
    pool = BlockPool(9)
    known(pool, 3, owned=0)
    queued = waiting(1, 14)
    queued.state = State.QUEUED
    free = Space(blocks=24, slots=0, requests=9, prefill_tokens=8)
    assert len(admit([queued], free, LIMITS, pool).granted) == 1
    assert free.prefill_tokens == 8 - 2


def test_without_a_prefix_cache_nothing_is_looked_for() -> None:
    pool = BlockPool(9)
    known(pool, 3, owned=3)
    (grant,) = admit([waiting(1, 13)], space(9), replace(LIMITS, prefix_cache=False), pool).granted
    assert grant.hit == ()


def test_one_that_waits_is_not_hashed_again() -> None:
    """What does not fit is passed by at the price of one look-up."""
    pool = BlockPool(9)
    request = waiting(1, 400)
    assert admit([request], space(99), LIMITS, pool).granted == ()
    chain, request.tokens = request.chain, Unreadable(request.tokens)
    for _ in range(3):
        assert admit([request], space(99), LIMITS, pool).granted == ()
    assert request.chain is chain


class Unreadable(list[int]):
    """Has a length, and that is all that may be asked."""

    def __getitem__(self, index: object) -> NoReturn:
        raise AssertionError(f"{index} was read")
