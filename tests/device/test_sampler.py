"""Tokens are drawn from the distribution that was asked for, the same in any company."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pdrt.device import sampler
from pdrt.device.batch import Draw
from pdrt.device.chance import uniforms
from pdrt.messages import Grammar, Sampling

VOCAB = 400
LAST = 1 - 2.0**-52  # the largest chance
WEIGHTS = [1.0, 0.3, 1e-7, 1e-17, 1e-30, 1e-45]  # the last is the least that float32 knows
Floats = npt.NDArray[np.float64]

samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 1e-6, 0.3, 1.0, 2.5]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0]),
    top_k=st.sampled_from([0, 1, 3, 40, VOCAB, 5000]),
    min_p=st.sampled_from([0.0, 0.02, 0.5, 1.0]),
    repetition_penalty=st.sampled_from([0.8, 1.0, 1.3]),
    presence_penalty=st.sampled_from([-1.0, 0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.4]),
    seed=st.integers(0, 2**63 - 1),
)
histories = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30)


@st.composite
def draws(draw: st.DrawFn) -> Draw:
    history = draw(histories)
    return Draw(draw(samplings), history, draw(st.integers(1, len(history))))


def random_logits(rows: int, seed: int, *, rounded: bool = False) -> torch.Tensor:
    logits = 3 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))
    return logits.bfloat16().float() if rounded else logits  # rounded: with ties


def plain(sampling: Sampling, history: list[int] | None = None, prompt_tokens: int = 1) -> Draw:
    return Draw(sampling, history or [1], prompt_tokens)


def reference_cut(probabilities: Floats, s: Sampling) -> Floats:
    """top_k, then top_p of what is left, then min_p, straight from their definitions."""
    p = probabilities.copy()
    if s.top_k:
        p[p < np.sort(p)[::-1][min(s.top_k, len(p)) - 1]] = 0
    order = np.argsort(-p, kind="stable")
    before = np.cumsum(p[order]) - p[order]
    if s.top_p < 1:
        p[p < p[order][before < s.top_p * p.sum()][-1]] = 0
    p[p < s.min_p * p.max()] = 0
    return p


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 1000),
    rounded=st.booleans(),
    s=samplings.filter(lambda s: s.temperature > 0),
)
def test_cuts_are_those_of_a_plain_reference(seed: int, rounded: bool, s: Sampling) -> None:
    row = random_logits(1, seed, rounded=rounded)[0].softmax(-1)
    want = reference_cut(row.double().numpy(), s)
    sampler.cut_(row, s)
    np.testing.assert_array_equal(row.numpy() > 0, want > 0)


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.97])
def test_a_nucleus_wider_than_the_first_look_is_found(top_p: float) -> None:
    row = torch.linspace(1, 2, 3 * sampler.FIRST_LOOK)
    want = reference_cut((row / row.sum()).double().numpy(), Sampling(top_p=top_p))
    sampler.cut_(row, Sampling(top_p=top_p))
    assert abs(int((row > 0).sum()) - int((want > 0).sum())) <= 1


@pytest.mark.parametrize(
    "s",
    [
        Sampling(temperature=0.7, top_k=20),
        Sampling(temperature=1.5, top_p=0.8),
        Sampling(temperature=0.9, min_p=0.1),
        Sampling(temperature=1.2, top_k=50, top_p=0.9, min_p=0.02, repetition_penalty=1.2),
        Sampling(temperature=1.0, repetition_penalty=0.7),
    ],
)
def test_what_can_be_drawn_is_what_transformers_would_keep(s: Sampling) -> None:
    history = [3, 9, 9, 4]
    logits = random_logits(1, 4)
    warped = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(s.repetition_penalty),
            TemperatureLogitsWarper(s.temperature),
            TopKLogitsWarper(s.top_k or VOCAB),
            TopPLogitsWarper(s.top_p),
            MinPLogitsWarper(s.min_p),
        ]
    )(torch.tensor([history]), logits.clone())
    want = warped.softmax(-1)[0]

    mine = logits.clone()[0]
    sampler.penalise_(mine, plain(s, history))
    mine = (mine / s.temperature).softmax(-1)
    sampler.cut_(mine, s)
    torch.testing.assert_close(mine / mine.sum(), want)


@settings(max_examples=60, deadline=None)
@given(st.lists(draws(), min_size=2, max_size=5), st.integers(0, 1000), st.booleans())
def test_a_row_draws_the_same_alone_and_in_any_batch(
    requests: list[Draw], seed: int, rounded: bool
) -> None:
    logits = random_logits(len(requests), seed, rounded=rounded)
    together = sampler.draw(logits, requests)
    alone = [sampler.draw(logits[i : i + 1], [d])[0] for i, d in enumerate(requests)]
    assert [token for token, _ in together] == [token for token, _ in alone]
    assert [said for _, said in together] == pytest.approx([said for _, said in alone])


def test_drawing_changes_nobodys_logits() -> None:
    logits = random_logits(3, 5)
    kept = logits.clone()
    busy = Sampling(temperature=1.0, top_k=3, repetition_penalty=1.5, presence_penalty=1.0)
    sampler.draw(logits, [plain(busy, [1, 2, 3])] * 3)
    assert torch.equal(logits, kept)


def test_temperature_zero_is_the_likeliest_token_and_the_first_of_equals() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [17, 300]] = 4.0
    token, _ = sampler.draw(logits, [plain(Sampling(temperature=0.0, top_k=5, seed=3))])[0]
    assert token == 17


def test_the_logprob_is_that_of_the_logits_as_they_came() -> None:
    logits = random_logits(1, 6)
    warm = Sampling(temperature=0.4, top_k=2, repetition_penalty=2.0, presence_penalty=2.0)
    token, said = sampler.draw(logits, [plain(warm, [5, 6, 7])])[0]
    assert said == pytest.approx(float(logits.log_softmax(-1)[0, token]), abs=1e-5)


def test_tokens_come_as_often_as_they_should() -> None:
    """10,000 positions; each frequency within five standard deviations."""
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    count = 10_000
    history = [0] * count
    s = Sampling(temperature=2.0, seed=11)
    requests = [Draw(s, history[:i], 1) for i in range(1, count + 1)]
    drawn = sampler.draw(logits.expand(count, -1).contiguous(), requests)
    found = np.bincount([token for token, _ in drawn], minlength=4) / count
    want = (logits[0] / 2.0).softmax(-1).numpy()
    np.testing.assert_array_less(np.abs(found - want), 5 * np.sqrt(want * (1 - want) / count))


def test_the_seed_and_the_position_name_the_random_numbers() -> None:
    numbers = {n for seed in range(40) for position in range(40) for n in uniforms(seed, position)}
    assert len(numbers) == 4800
    assert all(0 <= number < 1 for number in numbers)
    assert uniforms(2**63 - 1, 5) == uniforms(2**63 - 1, 5)


@pytest.mark.parametrize("chance", [0.0, LAST])
def test_the_ends_of_the_unit_interval_draw_tokens_that_are_not_cut(chance: float) -> None:
    weights = torch.tensor([[0.0, 0.25, 0.5, 0.25, 0.0, 0.0]])
    token = sampler.at_chances(weights, np.full((1, 3), chance))
    assert token.tolist() == [1 if chance == 0.0 else 3]


@settings(max_examples=200, deadline=None)
@given(
    vocab=st.one_of(st.integers(1, 70), st.sampled_from([320, 4095, 4096, 4097])),
    weights=st.lists(
        st.tuples(st.floats(0, 1, exclude_max=True), st.sampled_from(WEIGHTS)), min_size=1
    ),
    chances=st.tuples(*[st.one_of(st.sampled_from([0.0, LAST]), st.floats(0, LAST))] * 3),
)
def test_a_token_of_no_weight_is_never_drawn(
    vocab: int, weights: list[tuple[float, float]], chances: tuple[float, float, float]
) -> None:
    """Few of many have some, tiny beside large ones, so that sums round and groups are empty."""
    row = torch.zeros(1, vocab)
    for place, weight in weights:
        row[0, int(place * vocab)] = weight
    token = int(sampler.at_chances(row, np.array([chances])))
    assert row[0, token] > 0


def test_logits_that_are_rounded_differently_seldom_draw_another_token() -> None:
    """20,000 draws of 49,152 tokens. In one level, 7 of 1,000 would differ."""
    generator = torch.Generator().manual_seed(1)
    logits = 2.5 * torch.randn(49152, generator=generator)
    other = logits + 1e-5 * torch.randn(49152, generator=generator)
    chances = np.array([uniforms(seed, 9) for seed in range(20_000)])
    mine, others = (drawn_of(row.softmax(-1), chances) for row in (logits, other))
    assert np.count_nonzero(mine != others) < 6
    assert len(set(mine)) > 1000


def drawn_of(weights: torch.Tensor, chances: Floats) -> npt.NDArray[np.int64]:
    """All the chances of one row, some at a time."""
    parts = np.split(chances, 100)
    rows = weights.expand(len(parts[0]), -1).contiguous()
    return np.concatenate([sampler.at_chances(rows, part).numpy() for part in parts])


def test_presence_and_frequency_count_the_output_alone() -> None:
    s = Sampling(presence_penalty=0.5, frequency_penalty=0.25)
    row = torch.zeros(6)
    sampler.penalise_(row, Draw(s, [1, 1, 2, 3, 3, 3, 2], prompt_tokens=3))
    assert row.tolist() == [0.0, 0.0, -0.75, -1.25, 0.0, 0.0]


def test_repetition_counts_prompt_and_output_once_each() -> None:
    s = Sampling(repetition_penalty=2.0)
    row = torch.tensor([1.0, 1.0, -1.0, 4.0])
    sampler.penalise_(row, Draw(s, [1, 1, 2], prompt_tokens=2))
    assert row.tolist() == [1.0, 0.5, -2.0, 4.0]


def test_a_resumed_request_draws_what_it_would_have_drawn() -> None:
    """Retraction, or another instance: same history, same seed, same token."""
    s = Sampling(temperature=1.0, seed=9, frequency_penalty=0.3)
    logits = random_logits(1, 8)
    history = [4, 5, 6, 7, 8]
    first = sampler.draw(logits, [Draw(s, history, 2)])
    again = sampler.draw(logits, [Draw(s, tuple(history), 2)])
    other = sampler.draw(
        logits.expand(50, -1).contiguous(),
        [Draw(replace(s, seed=i), history, 2) for i in range(50)],
    )
    assert first == again
    assert len({token for token, _ in other}) > 5


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("warm", [0.0, 1.0])
def test_logits_that_are_no_numbers_show_in_the_logprob_and_hurt_nobody_else(
    broken: float, warm: float
) -> None:
    """What a corrupted block may lead to must not end the step of a whole batch."""
    logits = random_logits(3, 2)
    s = Sampling(temperature=warm, top_k=7, top_p=0.9, min_p=0.1, repetition_penalty=1.2, seed=4)
    requests = [plain(s, [5, 6])] * 3
    whole = sampler.draw(logits, requests)
    logits[1, 9:] = broken
    drawn = sampler.draw(logits, requests)
    assert [drawn[0], drawn[2]] == [whole[0], whole[2]]
    token, said = drawn[1]
    assert 0 <= token < VOCAB
    assert said != said


biases = st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100, width=32), max_size=20)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(draws(), biases), min_size=1, max_size=5), st.integers(0, 1000))
def test_a_bias_is_added_to_its_tokens_logit_whatever_the_company(
    requests: list[tuple[Draw, dict[int, float]]], seed: int
) -> None:
    """As if the model had said so, but that the log-probability stays the model's own."""
    logits = random_logits(len(requests), seed)
    biased = [replace_sampling(d, logit_bias=tuple(b.items())) for d, b in requests]
    drawn = sampler.draw(logits, biased)
    for row, (own, bias) in enumerate(requests):
        moved = logits[row : row + 1].clone()
        sampler.penalise_(moved[0], own)
        for token, by in bias.items():
            moved[0, token] += by
        (want, _), (token, said) = sampler.draw(moved, [unpenalised(own)])[0], drawn[row]
        assert token == want
        assert said == pytest.approx(float(logits[row].log_softmax(-1)[token]), abs=1e-4)


def replace_sampling(draw: Draw, **fields: Any) -> Draw:
    return Draw(replace(draw.sampling, **fields), draw.history, draw.prompt_tokens)


def unpenalised(draw: Draw) -> Draw:
    return replace_sampling(
        draw, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0
    )


@pytest.mark.parametrize("warm", [0.0, 1.0])
def test_a_bias_of_100_forces_a_token_and_one_of_minus_100_forbids_it(warm: float) -> None:
    logits = random_logits(40, 3)
    forced = [plain(Sampling(temperature=warm, seed=i, logit_bias=((7, 100),))) for i in range(40)]
    assert {token for token, _ in sampler.draw(logits, forced)} == {7}
    best = [int(one) for one in logits.argmax(-1)]
    without = [
        plain(Sampling(temperature=warm, seed=i, logit_bias=((token, -100),)))
        for i, token in enumerate(best)
    ]
    assert all(t != b for (t, _), b in zip(sampler.draw(logits, without), best, strict=True))


def test_a_row_without_a_wish_is_plain() -> None:
    assert plain(Sampling(temperature=0.3, top_k=4, top_p=0.5, min_p=0.1)).is_plain
    wishes: list[dict[str, Any]] = [
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"logit_bias": ((1, 1.0),)},
        {"grammar": Grammar(kind="regex", text="a")},
    ]
    assert not any(plain(Sampling(**wish)).is_plain for wish in wishes)
