"""Ranks that share the rows of prompts say and keep what one rank does alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pdrt.device.batch import Drawn, Runner, Scoring, SeqStep
from pdrt.device.slices import slices
from pdrt.messages import Sampling
from tests.device import tiny
from tests.device.loop import GREEDY, Loop
from tests.device.ranks import BLOCK, BLOCKS, Ranks, Recorder, Replayed, as_rank, opened
from tests.device.test_tensor_parallel import heads, logprobs, tokens, whose

TOKENS = 3
WARM = Sampling(temperature=0.8, seed=5, top_k=40)


class Alone:
    """One rank's batches: prompts in chunks, single tokens beside them, one after a prefix hit."""

    def __init__(self, runner: Runner, chunk: int) -> None:
        recorder = Recorder(runner)
        loop = Loop(recorder, blocks=BLOCKS)
        vocab = 256 if runner.layout.dtype == "uint8" else tiny.VOCAB
        text = [t % vocab for t in tiny.prompt(160)]
        asked = [(3, GREEDY), (131, GREEDY), (BLOCK, WARM), (90, GREEDY)]
        first = [loop.sequence(text[:n], TOKENS, sampling) for n, sampling in asked]
        loop.run(first, TOKENS, chunk)
        hit = 4 * BLOCK  # what another prompt has in common with one that was computed
        warm = loop.sequence([*text[:hit], *text[100:90:-1], *text[60:160]], TOKENS)
        warm.blocks[: hit // BLOCK] = first[1].blocks[: hit // BLOCK]
        warm.computed = hit
        loop.run([warm], TOKENS, chunk)
        self.batches, self.drawn, self.layout = recorder.batches, recorder.drawn, recorder.layout
        self.pool = bytes(loop.memory)


def agrees(said: list[Replayed], alone: Alone, cp: int) -> None:
    assert tokens(said[0].drawn) == tokens(alone.drawn)
    assert logprobs(said[0].drawn) == pytest.approx(logprobs(alone.drawn), abs=1e-4)
    assert not any(d for follower in said[1:] for d in follower.drawn)
    whole, tp = heads(alone.pool, alone.layout), len(said) // cp
    for number, one in enumerate(said):
        its = whose(tp, alone.layout.kv_heads)[number % tp]
        own = heads(one.pool, one.layout)
        np.testing.assert_allclose(own, whole[:, its.start : its.stop], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "size", "chunk"),
    [
        ("llama", 2, 96),
        ("llama", 4, 71),  # cp 2 x tp 2
        ("qwen3_moe", 2, 71),
        ("deepseek_v2", 2, 71),
        ("null", 4, 71),
        pytest.param("qwen3_moe", 4, 96, marks=pytest.mark.matrix),
        pytest.param("null", 2, 96, marks=pytest.mark.matrix),
    ],
)
def test_ranks_that_share_prompts_say_and_keep_what_one_does(
    group: Ranks, model_path: Callable[[str], str], name: str, size: int, chunk: int
) -> None:
    """All of the KV is on each rank: any of them can write any block to a peer."""
    alone = Alone(opened(model_path(name)), chunk)
    assert any(slices(batch, 2) for batch in alone.batches)
    agrees(group(size, as_rank, model_path(name), alone.batches, cp=2), alone, 2)


@pytest.mark.matrix
@pytest.mark.parametrize("chunk", [64, 71, 160])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "deepseek_v2", "deepseek_v3", "null"])
def test_latents_and_heads_over_two_ranks_of_two(
    group: Ranks, model_path: Callable[[str], str], name: str, chunk: int
) -> None:
    """The latent of a token is on each of four ranks; else each tp rank has its own heads."""
    alone = Alone(opened(model_path(name)), chunk)
    said = group(4, as_rank, model_path(name), alone.batches, cp=2)
    if alone.layout.kind == "latent":
        assert tokens(said[0].drawn) == tokens(alone.drawn)
        for one in said:
            np.testing.assert_allclose(
                heads(one.pool, one.layout), heads(alone.pool, alone.layout), rtol=1e-3, atol=1e-4
            )
    else:
        agrees(said, alone, 2)


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_models_that_transformers_computes_are_shared_as_well(
    group: Ranks, tmp_path: Path, name: str
) -> None:
    """Windows, caps and sinks: a slice asks the model's own mask about its positions."""
    from tests.device.foreign_tiny import CONFIGS

    tiny.save(CONFIGS[name], 3, tmp_path)
    alone = Alone(opened(str(tmp_path)), 71)
    agrees(group(2, as_rank, str(tmp_path), alone.batches, cp=2), alone, 2)


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["llama", "deepseek_v2", "null"])
def test_four_ranks_share_a_prompt(
    group: Ranks, model_path: Callable[[str], str], name: str
) -> None:
    alone = Alone(opened(model_path(name)), 160)
    agrees(group(4, as_rank, model_path(name), alone.batches, cp=4), alone, 4)


@pytest.mark.parametrize("name", ["llama", "null"])
def test_ranks_that_share_a_prompt_score_it_as_one_does(
    group: Ranks, model_path: Callable[[str], str], name: str
) -> None:
    """CASES 90: each row's odds come from the rank that has the row, in the prompt's order."""
    runner = opened(model_path(name))
    vocab = 256 if name == "null" else tiny.VOCAB
    prompt = [t % vocab for t in tiny.prompt(150)]
    loop = Loop(runner, blocks=BLOCKS)
    first, beside = loop.sequence(prompt, 1), loop.sequence(prompt[:40], 1)
    batches = list[list[SeqStep]]()
    for begin in (0, 80):
        end = min(begin + 80, 150)
        first.computed = begin
        scored = replace(first.step(80), scoring=Scoring(prompt[begin + 1 : end + 1], 3))
        batches.append([beside.step(40), scored] if begin == 0 else [scored])
    alone = [runner.execute(batch) for batch in batches]
    said = group(2, as_rank, model_path(name), batches, cp=2)
    ours, theirs = odds_of(said[0].drawn), odds_of(alone)
    assert len(ours) == len(theirs) == 149
    for (logprob, top), (wanted, likeliest) in zip(ours, theirs, strict=True):
        assert logprob == pytest.approx(wanted, abs=1e-3)
        assert top == likeliest
    assert tokens(said[0].drawn) == tokens(alone)
    assert said[1].drawn == [[], []]


def odds_of(drawn: list[list[Drawn]]) -> list[tuple[float, list[int]]]:
    scored = [odds for step in drawn for one in step for odds in one.scored]
    return [(odds.logprob, [token for token, _ in odds.top]) for odds in scored]
