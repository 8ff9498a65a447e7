"""Log-probabilities are those of the model's own distribution, of what was drawn and what was not.

The oracle is transformers' forward and log_softmax on the same weights.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pdrt import config, demo
from pdrt.device import odds, sampler, torchrunner
from pdrt.device.batch import Draw, Drawn, Odds, Scoring, SeqStep
from pdrt.device.shard import Shard
from pdrt.device.torchrunner import TorchRunner
from pdrt.messages import Sampling
from pdrt.modelspec import ModelSpec
from tests.device.loop import GREEDY, Loop, Sequence_
from tests.device.tiny import make, prompt

CLOSE = 1e-3


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[TorchRunner, Any]:
    """One tiny model, here and in transformers."""
    path = tmp_path_factory.mktemp("odds")
    reference = make("llama", path)
    return load(path), reference


def load(path: Path) -> TorchRunner:
    return torchrunner.load(
        path,
        Shard(ModelSpec.read(path)),
        device="cpu",
        dtype="float32",
        block_size=16,
        progress=lambda *_: None,
    )


def reference_odds(model: Any, tokens: list[int]) -> torch.Tensor:
    """[tokens, vocab]: row i is what the model expects after token i."""
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    return found


def scored_chunks(one: Loop, sequence: Sequence_, chunk: int, top: int) -> list[Drawn]:
    """The prompt in chunks, each scored, as the scheduler asks for it."""
    found, prompt = list[Drawn](), list(sequence.prompt)
    while sequence.computed < len(prompt):
        step = sequence.step(chunk)
        end = sequence.computed + len(step.tokens)
        scoring = Scoring(prompt[sequence.computed + 1 : end + 1], top)
        found += one.runner.execute([replace(step, scoring=scoring)])
        sequence.computed = end
    return found


@pytest.mark.parametrize("chunk", [512, 7, 1])
def test_each_prompt_token_is_scored_as_transformers_scores_it(
    pair: tuple[TorchRunner, Any], chunk: int
) -> None:
    runner, model = pair
    tokens, top = prompt(23), 4
    one = Loop(runner)
    found = scored_chunks(one, one.sequence(tokens, 1), chunk, top)
    said = [each for drawn in found for each in drawn.scored]
    want = reference_odds(model, tokens)
    assert len(said) == len(tokens) - 1
    for row, (each, target) in enumerate(zip(said, tokens[1:], strict=True)):
        assert each.logprob == pytest.approx(float(want[row, target]), abs=CLOSE)
        best = want[row].topk(top)
        assert [token for token, _ in each.top] == best.indices.tolist()
        assert [value for _, value in each.top] == pytest.approx(best.values.tolist(), abs=CLOSE)
    assert [drawn.token == -1 for drawn in found] == [True] * (len(found) - 1) + [False]
    assert found[-1].token == int(want[-1].argmax())


def test_scoring_is_the_same_in_company(pair: tuple[TorchRunner, Any]) -> None:
    runner, _ = pair
    one, tokens = Loop(runner), prompt(20)
    (alone,) = scored_chunks(one, one.sequence(tokens, 1), 512, 2)
    beside = one.sequence(prompt(9, seed=3), 2)
    one.run([beside], 1)
    asked = one.sequence(tokens, 1)
    other = one.sequence(prompt(5, seed=4), 1)
    batch = [
        beside.step(1),
        replace(asked.step(512), scoring=Scoring(tokens[1:], 2)),
        replace(other.step(512), scoring=Scoring(other.prompt[1:], 0)),
    ]
    drawn = runner.execute(batch)
    assert [d.key for d in drawn] == [beside.key, asked.key, other.key]
    assert drawn[0].scored == ()
    assert [o.logprob for o in drawn[1].scored] == pytest.approx(
        [o.logprob for o in alone.scored], abs=CLOSE
    )
    assert [len(o.top) for o in drawn[1].scored] == [2] * 19
    assert [o.top for o in drawn[2].scored] == [()] * 4


def test_no_more_logits_are_held_than_may_be_and_none_is_missed() -> None:
    logits = torch.randn(5, 10, generator=torch.Generator().manual_seed(1))
    asked = list[int]()

    def logits_of(rows: torch.Tensor) -> torch.Tensor:
        asked.append(len(rows))
        return rows

    step = SeqStep(1, [1] * 5, 0, [0], None, scoring=Scoring([2, 3, 4, 5, 6], 1))
    (found,) = odds.score([step], logits, 10, logits_of, most=25)
    assert asked == [2, 2, 1]
    want = logits.log_softmax(-1)[range(5), [2, 3, 4, 5, 6]].tolist()
    assert [o.logprob for o in found] == pytest.approx(want)
    assert [found] == odds.score([step], logits, 10, lambda rows: rows)


def test_a_rank_that_does_not_draw_computes_the_same_rows_and_says_nothing() -> None:
    asked = list[int]()
    step = SeqStep(1, [1] * 3, 0, [0], None, scoring=Scoring([0, 0], 0))
    found = odds.score([step], torch.zeros(2, 4), 10, lambda rows: asked.append(len(rows)))
    assert (asked, found) == ([2], [()])


def test_the_likeliest_tokens_are_told_only_where_asked_for() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [9.0, 1.0, 2.0, 3.0], [0.0, 1.0, 2.0, 3.0]])
    none, two, all_ = odds.tops(logits, [0, 2, 20])
    want = logits.log_softmax(-1)
    assert none == ()
    assert [token for token, _ in two] == [0, 3]
    assert [value for _, value in all_] == pytest.approx(want[2].flip(0).tolist())
    assert [token for token, _ in odds.tops(logits[:1], [3])[0]] == [1, 3, 2]  # equals: in order


def test_what_was_drawn_has_its_tops_and_so_has_each_of_its_group() -> None:
    """Penalties, temperature and cuts change what is drawn, and no log-probability."""
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(3))
    warm = Sampling(temperature=2.0, top_k=9, repetition_penalty=2.0, seed=4, top_logprobs=3)
    draws = [Draw(replace(warm, seed=seed), [1, 2, 3], 1) for seed in range(5)]
    batch = [
        SeqStep(1, [3], 2, [0], draws[0], further=tuple(draws[1:])),
        SeqStep(2, [3], 2, [0], Draw(GREEDY, [1, 2, 3], 1)),
    ]
    group, single = sampler.answer(logits, batch)
    want = logits.log_softmax(-1)
    drawn = [group, *group.further]
    assert len({one.token for one in drawn}) > 1
    for one, alone in zip(drawn, draws, strict=True):
        assert (one.token, one.key) == (sampler.draw(logits[:1], [alone])[0][0], 1)
        assert one.logprob == pytest.approx(float(want[0, one.token]), abs=1e-5)
        assert [token for token, _ in one.top] == want[0].topk(3).indices.tolist()
    assert (single.top, single.further, single.token) == ((), (), int(want[1].argmax()))


def test_a_group_of_many_is_drawn_in_parts() -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(3))
    draws = [Draw(Sampling(seed=seed), [1], 1) for seed in range(9)]
    step = SeqStep(1, [3], 2, [0], draws[0], further=tuple(draws[1:]))
    assert sampler.answer(logits, [step], most=100) == sampler.answer(logits, [step])


def test_odds_of_broken_logits_are_no_numbers() -> None:
    logits = torch.zeros(2, 5)
    logits[1, 3:] = float("nan")
    good, bad = odds.odds(logits, [1, 1], [2, 2])
    assert good.logprob == pytest.approx(-math.log(5))
    assert math.isnan(bad.logprob)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_demo_models_odds_are_those_of_transformers() -> None:
    """CASES 89: prompt and answer within 1e-3, in float32."""
    path = demo.directory(config.cache_dir())
    if not path.exists():
        pytest.skip("the demo model is not prepared")
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    one, tokens, top = Loop(load(path)), [504, 3575, 282, 4649, 314, 2068, 5, 300, 28], 3
    sequence = one.sequence(tokens, 6, Sampling(temperature=0.0, top_logprobs=top))
    found = scored_chunks(one, sequence, 4, top)
    said = [each for drawn in found for each in drawn.scored]
    last = found[-1]
    while True:
        said.append(Odds(last.logprob, last.top))
        sequence.history.append(last.token)
        if len(sequence.output) == 6:
            break
        (last,) = one.runner.execute([sequence.step(1)])
        sequence.computed += 1
    want = reference_odds(model, sequence.history)
    for row, (each, target) in enumerate(zip(said, sequence.history[1:], strict=True)):
        assert each.logprob == pytest.approx(float(want[row, target]), abs=CLOSE)
        values = want[row].topk(top).values.tolist()
        assert [value for _, value in each.top] == pytest.approx(values, abs=CLOSE)
