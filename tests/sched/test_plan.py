"""Who steps, who grows, who makes way; how prompts are cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from pdrt.device.batch import SeqStep
from pdrt.messages import Sampling
from pdrt.sched.limits import Limits
from pdrt.sched.plan import Batch, fit, sendable
from pdrt.sched.request import Request, State

LIMITS = Limits(block_size=4, max_batch_size=8, max_prefill_tokens=6)


def running(
    key: int, *, prompt: int, said: int, blocks: int, computed: int | None = None
) -> Request:
    tokens = prompt + said
    return Request(
        key=key,
        room=key,
        attempt=0,
        tokens=list(range(tokens)),
        prompt_tokens=prompt,
        sampling=Sampling(),
        stops=frozenset(),
        deadline=1.0,
        state=State.RUNNING,
        blocks=list(range(100 * key, 100 * key + blocks)),
        computed=tokens - 1 if computed is None else computed,
    )


def alone(_block: int) -> int:
    """How many owners each block has."""
    return 1


def keys(requests: tuple[Request, ...]) -> list[int]:
    return [r.key for r in requests]


def test_only_those_at_a_block_boundary_grow() -> None:
    inside = running(1, prompt=6, said=1, blocks=2)
    full = running(2, prompt=6, said=2, blocks=2)
    beyond = running(3, prompt=6, said=3, blocks=2)
    fitting = fit([inside, full, beyond], 1, alone, LIMITS)
    assert keys(fitting.step) == [1, 2, 3]
    assert keys(fitting.grow) == [3]
    assert fitting.retract == ()


def test_the_one_with_the_fewest_output_tokens_makes_way_first() -> None:
    line = [running(1, prompt=4, said=5, blocks=2), running(2, prompt=8, said=1, blocks=2)]
    fitting = fit(line, 0, alone, LIMITS)
    assert (keys(fitting.step), keys(fitting.grow), keys(fitting.retract)) == ([1], [1], [2])


def test_of_two_with_equal_output_the_longer_prompt_makes_way() -> None:
    line = [running(1, prompt=12, said=1, blocks=3), running(2, prompt=4, said=1, blocks=1)]
    assert keys(fit(line, 0, alone, LIMITS).retract) == [1]


def test_of_equals_the_latest_makes_way() -> None:
    line = [running(k, prompt=4, said=1, blocks=1) for k in (1, 2, 3)]
    fitting = fit(line, 0, alone, LIMITS)
    assert keys(fitting.retract) == [3, 2]
    assert keys(fitting.grow) == [1]


def test_no_more_make_way_than_needed() -> None:
    line = [running(k, prompt=12, said=1, blocks=3) for k in (1, 2, 3)]
    fitting = fit(line, 0, alone, LIMITS)
    assert keys(fitting.retract) == [3]
    assert keys(fitting.grow) == [1, 2]


def test_a_block_that_others_own_too_is_not_counted_on() -> None:
    first, second, third = (running(k, prompt=8, said=1, blocks=2) for k in (1, 2, 3))
    second.blocks = third.blocks = [200, 201]
    owners = Counter([100, 101, *second.blocks, *third.blocks])
    fitting = fit([first, second, third], 0, owners.__getitem__, LIMITS)
    assert (keys(fitting.retract), keys(fitting.grow)) == ([3, 2], [1])


def test_the_last_one_is_never_retracted_but_waits() -> None:
    fitting = fit([running(1, prompt=4, said=1, blocks=1)], 0, alone, LIMITS)
    assert (fitting.step, fitting.grow, fitting.retract) == ((), (), ())


def test_those_beyond_the_batch_neither_step_nor_grow() -> None:
    limits = Limits(block_size=4, max_batch_size=1)
    line = [running(1, prompt=4, said=0, blocks=1), running(2, prompt=4, said=1, blocks=1)]
    fitting = fit(line, 0, alone, limits)
    assert (keys(fitting.step), fitting.grow, fitting.retract) == ([1], (), ())


def steps(runners: Iterable[Request], limits: Limits = LIMITS) -> tuple[SeqStep, ...]:
    batch = Batch(limits)
    batch.fill(runners)
    return batch.steps


def prompt(key: int, tokens: int, computed: int = 0) -> Request:
    return running(key, prompt=tokens, said=0, blocks=tokens // 4 + 1, computed=computed)


def test_the_one_with_the_lowest_priority_makes_way_first() -> None:
    line = [running(k, prompt=4, said=5 - k, blocks=2) for k in (1, 2, 3)]
    line[0].priority = -1
    assert keys(fit([*line, running(4, prompt=4, said=1, blocks=1)], 0, alone, LIMITS).retract) == [
        1
    ]


def test_a_decode_step_is_the_last_token_with_a_draw() -> None:
    request = running(1, prompt=4, said=1, blocks=2)
    (step,) = steps([request])
    assert (step.key, list(step.tokens), step.start) == (1, [4], 4)
    assert step.draw is not None
    assert step.draw.position == 5
    assert step.draw.prompt_tokens == 4


def test_a_prompt_is_cut_to_the_budget_and_draws_only_at_its_end() -> None:
    request = prompt(1, 10)
    (first,) = steps([request])
    assert (first.start, len(first.tokens), first.draw) == (0, 6, None)
    request.computed = 6
    (second,) = steps([request])
    assert (second.start, len(second.tokens)) == (6, 4)
    assert second.draw is not None


def test_decode_steps_come_first_and_prompts_share_what_the_budget_holds() -> None:
    limits = replace(LIMITS, max_prefill_tokens=9)
    decode = running(4, prompt=5, said=1, blocks=2)
    batch = steps([prompt(1, 3), prompt(2, 20), prompt(3, 20), decode], limits)
    assert [(s.key, len(s.tokens)) for s in batch] == [(4, 1), (1, 3), (2, 6)]


def test_no_chunk_is_shorter_than_a_block_but_a_prompts_last_one() -> None:
    """After 5 of 6 tokens: the second would have a scrap of one, the third has its last token."""
    batch = steps([prompt(1, 5), prompt(2, 9), prompt(3, 9, computed=8)])
    assert [(s.key, len(s.tokens)) for s in batch] == [(1, 5), (3, 1)]


def test_a_budget_below_a_block_is_a_chunk() -> None:
    (step,) = steps([prompt(1, 9)], replace(LIMITS, max_prefill_tokens=3))
    assert len(step.tokens) == 3


def test_what_the_runners_leave_of_the_budget_is_for_new_prompts() -> None:
    for runner, room in (
        (running(1, prompt=4, said=1, blocks=2), 6),
        (prompt(1, 2), 4),
        (prompt(1, 3), 0),  # of 3 tokens nothing but a scrap could be made
        (prompt(1, 90), 0),
    ):
        batch = Batch(LIMITS)
        batch.fill([runner])
        assert batch.room == room


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 3)), min_size=1, max_size=12),
    st.integers(1, 20),
)
def test_a_step_has_no_more_prompt_tokens_than_a_chunk_and_none_are_scraps(
    prompts: list[tuple[int, int]], budget: int
) -> None:
    """However many prompts there are; all get done, in as few steps as there are chunks."""
    limits = replace(LIMITS, max_prefill_tokens=budget)
    line = [running(k, prompt=n, said=said, blocks=99) for k, (n, said) in enumerate(prompts)]
    for request in line:
        request.computed = request.computed if request.said else 0
    total, count = sum(r.pending for r in line if not r.said), 0
    while fresh := [r for r in line if not r.said and r.pending]:
        batch = steps(line, limits)
        decoding = {r.key for r in line if r.said}
        assert [s.key for s in batch][: len(decoding)] == sorted(decoding)
        chunks = batch[len(decoding) :]
        assert 0 < sum(len(s.tokens) for s in chunks) <= budget
        assert chunks[0].key == fresh[0].key, "the oldest goes on in every step"
        for step in chunks:
            is_last = step.start + len(step.tokens) == line[step.key].prompt_tokens
            assert is_last or len(step.tokens) >= min(4, budget)
            line[step.key].computed += len(step.tokens)
        count += 1
    assert count <= 2 * (total // budget + 1) + total // 4


def test_only_whole_blocks_leave_before_the_prompt_is_computed() -> None:
    assert [sendable(n, 0, LIMITS) for n in (3, 4, 7, 8)] == [0, 1, 1, 2]
    assert sendable(8, 0, Limits(block_size=4, chunked=False)) == 0
