"""The null device answers from every byte of a sequence's KV, so nothing can go wrong unseen."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdrt.device.batch import Draw, Odds, Scoring, SeqStep
from pdrt.device.null import EOS, NullRunner
from pdrt.messages import Sampling
from tests.device.loop import GREEDY, Loop

BLOCK = 4
TEXT = b"It was the best of times"


def loop(seed: int = 1) -> Loop:
    return Loop(NullRunner(BLOCK), seed=seed)


def test_the_answer_does_not_depend_on_blocks_chunks_or_company() -> None:
    whole = loop().answer(TEXT, 12)
    assert loop(seed=2).answer(TEXT, 12, chunk=5) == whole
    together = loop(seed=3)
    sequences = [together.sequence(p, 12) for p in (b"x", TEXT, b"another prompt")]
    together.run(sequences, 12, chunk=3)
    assert sequences[1].output == whole


def test_the_answer_depends_on_every_token_of_the_prompt() -> None:
    answers = {tuple(loop().answer(TEXT[:i] + b"#" + TEXT[i + 1 :], 8)) for i in range(len(TEXT))}
    assert len(answers) == len(TEXT)


def test_the_first_token_depends_on_the_last_of_the_prompt() -> None:
    first = {loop().answer(TEXT[:-1] + bytes([last]), 1)[0] for last in range(200)}
    assert len(first) > 100


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 40), st.data())
def test_a_flipped_bit_in_any_used_byte_changes_the_next_token(
    length: int, data: st.DataObject
) -> None:
    one = loop()
    sequence = one.sequence(random.Random(length).randbytes(length), 8)
    one.run([sequence], 1)
    step = sequence.step(1)
    (before,) = one.runner.execute([step])
    position = data.draw(st.integers(0, length - 1))
    lane = data.draw(st.integers(0, 63))  # head, layer, k or v, and byte of the head's 8
    part, byte = divmod(lane, 8)
    block = sequence.blocks[position // BLOCK] * one.runner.layout.block_bytes
    at = block + (part * BLOCK + position % BLOCK) * 8 + byte
    one.memory[at] ^= 1 << data.draw(st.integers(0, 7))
    (after,) = one.runner.execute([step])
    assert after.token != before.token


def test_exchanged_blocks_change_the_next_token() -> None:
    one = loop()
    sequence = one.sequence(TEXT, 8)
    one.run([sequence], 1)
    step = sequence.step(1)
    (before,) = one.runner.execute([step])
    swapped = [sequence.blocks[1], sequence.blocks[0], *sequence.blocks[2:]]
    (after,) = one.runner.execute([SeqStep(1, step.tokens, step.start, swapped, step.draw)])
    assert after.token != before.token


def test_bytes_past_the_sequences_end_do_not_matter() -> None:
    one = loop()
    sequence = one.sequence(TEXT[:5], 2)
    one.run([sequence], 1)
    (before,) = one.runner.execute([sequence.step(1)])
    last = sequence.blocks[1] * one.runner.layout.block_bytes
    for part in range(8):
        one.memory[last + (part * BLOCK + 3) * 8] ^= 255  # position 7; six are used
    assert one.runner.execute([sequence.step(1)]) == [before]


def test_decode_goes_on_in_another_pool() -> None:
    prefill, decode = loop(seed=2), loop(seed=3)
    here = prefill.sequence(TEXT, 12)
    prefill.run([here], 1, chunk=7)
    there = prefill.hand_over(here, decode, 12)
    assert there.output == loop().answer(TEXT, 12)


def test_the_seed_matters_with_a_temperature_and_only_then() -> None:
    def said(temperature: float, seed: int) -> list[int]:
        return loop().answer(TEXT, 8, sampling=Sampling(temperature=temperature, seed=seed))

    assert said(0.0, 1) == said(0.0, 2)
    assert said(1.0, 1) == said(1.0, 1)
    assert said(1.0, 1) != said(1.0, 2)


def test_a_bias_moves_tokens_as_it_would_a_models() -> None:
    def said(by: float, temperature: float = 0.0) -> list[int]:
        sampling = Sampling(temperature=temperature, seed=3, logit_bias=((101, by),))
        return loop().answer(TEXT, 8, sampling=sampling)

    assert said(100.0) == said(100.0, 1.0) == [101] * 8
    assert said(0.0) == loop().answer(TEXT, 8, sampling=Sampling(temperature=0.0))
    assert 101 not in said(-100.0)
    assert said(4.0) not in (said(0.0), said(100.0))


def test_answers_end_now_and_then() -> None:
    said = Loop(NullRunner(16)).answer(TEXT, 1500)
    assert EOS in said
    assert 0 not in said
    assert NullRunner(16).eos_token_ids == {EOS}
    assert said.count(EOS) < 20


def test_a_step_lasts_as_long_as_told() -> None:
    slept = list[float]()
    runner = NullRunner(BLOCK, step_ms=2.0, token_ms=0.5, sleep=slept.append)
    one = Loop(runner)
    one.answer(TEXT, 2)
    assert slept == [(2.0 + 0.5 * len(TEXT)) / 1000, 2.0 / 1000]


def test_only_steps_with_a_draw_say_a_token() -> None:
    one = loop()
    blocks = one.sequence(TEXT, 1).blocks
    chunk = SeqStep(8, TEXT[:6], 0, blocks, None)
    rest = SeqStep(8, TEXT[6:], 6, blocks, Draw(GREEDY, list(TEXT), len(TEXT)))
    assert one.runner.execute([chunk]) == []
    assert [drawn.key for drawn in one.runner.execute([rest])] == [8]
    assert one.runner.execute([]) == []


def test_a_pool_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="reshape"):
        NullRunner(BLOCK).bind(memoryview(bytearray(1024)), 3)


# Odds, groups and copies.


def scored(prompt: bytes, chunk: int, top: int = 2) -> list[Odds]:
    """The prompt's odds, computed in chunks."""
    one = loop()
    sequence, found = one.sequence(prompt, 1), list[Odds]()
    while sequence.computed < len(prompt):
        step = sequence.step(chunk)
        end = sequence.computed + len(step.tokens)
        targets = list(prompt[sequence.computed + 1 : end + 1])
        (drawn,) = one.runner.execute([replace(step, scoring=Scoring(targets, top))])
        assert (drawn.token == -1) == (end < len(prompt))
        found += drawn.scored
        sequence.computed = end
    return found


def test_each_prompt_token_is_scored_the_same_in_any_chunks() -> None:
    whole = scored(TEXT, 512)
    assert len(whole) == len(TEXT) - 1
    assert scored(TEXT, 5) == scored(TEXT, 1) == whole


def test_a_tokens_odds_tell_all_that_came_before_it_and_nothing_after() -> None:
    other = scored(TEXT[:9] + b"#" + TEXT[10:], 512)
    whole = scored(TEXT, 512)
    assert other[:8] == whole[:8]
    assert all(a != b for a, b in zip(other[8:], whole[8:], strict=True))


def test_what_is_drawn_greedily_is_the_likeliest_and_scores_as_it_was_drawn() -> None:
    sampling = Sampling(temperature=0.0, top_logprobs=3)
    one = loop()
    sequence = one.sequence(TEXT, 6, sampling)
    one.run([sequence], 5)
    (drawn,) = one.step([sequence], 1)
    assert drawn.top[0] == (drawn.token, drawn.logprob)
    assert [odds for _, odds in drawn.top] == sorted((odds for _, odds in drawn.top), reverse=True)
    if 256 not in sequence.output:
        last = scored(bytes(sequence.history), 512, 3)[-1]
        assert (last.logprob, last.top) == (drawn.logprob, drawn.top)


def test_each_of_a_group_draws_as_it_would_alone() -> None:
    one = loop()
    sequence = one.sequence(TEXT, 1)
    step = sequence.step(512)
    warm = [
        Draw(Sampling(seed=i, top_logprobs=i % 2), sequence.history, len(TEXT)) for i in range(5)
    ]
    (group,) = one.runner.execute([replace(step, draw=warm[0], further=tuple(warm[1:]))])
    alone = [one.runner.execute([replace(step, draw=draw)])[0] for draw in warm]
    assert [replace(group, further=()), *group.further] == alone
    assert len({drawn.token for drawn in alone}) > 1


def test_a_copied_block_is_the_copiers_own() -> None:
    """Two sequences of a group share what is full; the partly filled block is copied."""
    one = loop()
    first = one.sequence(TEXT[:6], 4)
    one.run([first], 1)
    full, part = first.blocks[:2]
    own = one.sequence(b"", 1).blocks
    step = first.step(1)
    (want,) = one.runner.execute([step])
    (got,) = one.runner.execute([replace(step, blocks=[full, *own], copy_from=part)])
    assert got == want
