"""DeepSeek-V2 and V3 say what transformers says, however a prompt gets there; their KV is small.

`test_models` asks each of them about prompts one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from pdrt.device.torchrunner import TorchRunner
from pdrt.errors import ConfigError
from pdrt.modelspec import ModelSpec
from tests.device import tiny
from tests.device.loop import Loop
from tests.device.ranks import BLOCKS, Ranks, Recorder, as_rank, opened
from tests.device.tiny import Tiny

BLOCK, CHUNK, TOKENS = 16, 32, 12
NAMES = ["deepseek_v2_grouped", "deepseek_v3_plain"]  # with and without compressed queries


@pytest.mark.parametrize("name", NAMES)
def test_lengths_in_flight_together_say_what_each_says_alone(
    tiny_model: Callable[[str], Tiny], name: str
) -> None:
    """Prompts of several chunks share batches with decode steps, expanded with absorbed rows."""
    directory, oracle = tiny_model(name)
    loop = Loop(tiny.runner(directory), blocks=256)
    lengths = [1, 15, 16, 17, 33, 86, 150]
    sequences = [loop.sequence(tiny.prompt(n, seed=3), TOKENS) for n in lengths]
    loop.run(sequences, TOKENS, chunk=CHUNK)
    for sequence in sequences:
        want = tiny.answer(oracle, sequence.prompt, TOKENS)
        assert sequence.output == want, f"prompt of {len(sequence.prompt)}"


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_in_chunks_says_what_it_says_in_one(
    tiny_model: Callable[[str], Tiny], name: str
) -> None:
    """CASES 59: sizes that divide the prompt of 64, and some that do not."""
    directory, oracle = tiny_model(name)
    loop, prompt = Loop(tiny.runner(directory)), tiny.prompt(64)
    want = tiny.answer(oracle, prompt, TOKENS)
    for chunk in (1, 5, BLOCK, BLOCK + 1, 63, 64):
        assert loop.answer(prompt, TOKENS, chunk) == want, f"chunks of {chunk}"


@pytest.mark.parametrize("block_size", [1, 5, 64])
def test_block_size_does_not_change_an_answer(
    tiny_model: Callable[[str], Tiny], block_size: int
) -> None:
    directory, oracle = tiny_model("deepseek_v2_grouped")
    loop, prompt = Loop(tiny.runner(directory, block_size=block_size)), tiny.prompt(61)
    assert loop.answer(prompt, TOKENS, CHUNK) == tiny.answer(oracle, prompt, TOKENS)


@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("length", [1, BLOCK, 50])
def test_decode_goes_on_in_another_pool_from_the_bytes_of_the_prompts_blocks(
    tiny_model: Callable[[str], Tiny], length: int, mirrored: bool
) -> None:
    """What a disaggregated request does; mirrored, as on an accelerator."""
    directory, oracle = tiny_model("deepseek_v3_plain")
    sides = [tiny.runner(directory) for _ in range(2)]
    prefill, decode = (
        Loop(TorchRunner(one.model, one.layout, mirrored=mirrored), seed=seed)
        for seed, one in enumerate(sides)
    )
    here = prefill.sequence(tiny.prompt(length), TOKENS)
    prefill.run([here], 1, CHUNK)
    there = prefill.hand_over(here, decode, TOKENS)
    assert there.output == tiny.answer(oracle, here.prompt, TOKENS)


def test_nan_in_freed_blocks_reaches_no_later_answer(tiny_model: Callable[[str], Tiny]) -> None:
    """Of short sequences padded to a long one's length, and of blocks filled in part."""
    directory, oracle = tiny_model("deepseek_v2_grouped")
    loop = Loop(tiny.runner(directory), blocks=40)
    for seed in range(2):
        lengths = (3, 40, 70, 17)
        sequences = [loop.sequence(tiny.prompt(n, seed), TOKENS) for n in lengths]
        loop.run(sequences, TOKENS, CHUNK)
        for sequence in sequences:
            assert sequence.output == tiny.answer(oracle, sequence.prompt, TOKENS)
            assert all(map(math.isfinite, sequence.logprobs))
            loop.give_back(sequence)
        loop.memory[:] = b"\xff" * len(loop.memory)  # NaN, in float32


def test_the_logprob_is_that_of_the_models_distribution(tiny_model: Callable[[str], Tiny]) -> None:
    """CASES 89."""
    directory, oracle = tiny_model("deepseek_v2_grouped")
    loop = Loop(tiny.runner(directory))
    sequence = loop.sequence(tiny.prompt(40), 8)
    loop.run([sequence], 8, CHUNK)
    with torch.no_grad():
        logits = oracle(torch.tensor([sequence.history])).logits[0, 39:-1]
    want = logits.log_softmax(-1).gather(1, torch.tensor(sequence.output)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(sequence.logprobs), want, atol=1e-3, rtol=0)


def test_bfloat16_agrees_wherever_the_best_token_leads_clearly(
    tiny_model: Callable[[str], Tiny],
) -> None:
    """Near ties may fall otherwise: only gaps above 0.5 between the two best logits count."""
    directory, oracle = tiny_model("deepseek_v2")
    loop = Loop(tiny.runner(directory, "bfloat16"))
    assert loop.runner.layout.dtype == "bfloat16"
    assert tiny.count_agreeing(loop, oracle, gap=0.5, chunk=CHUNK) >= 10


@pytest.mark.parametrize(
    ("name", "size"),
    [("deepseek_v2", 2), ("deepseek_v3", 4)],
)
def test_a_group_says_what_one_rank_does_and_each_keeps_the_whole_latent(
    group: Ranks, tiny_model: Callable[[str], Tiny], name: str, size: int
) -> None:
    """Any rank may send it to a peer, so that all must have the same bytes."""
    directory = str(tiny_model(name)[0])
    alone = Recorder(opened(directory))
    loop = Loop(alone, blocks=BLOCKS)
    loop.run([loop.sequence(tiny.prompt(n), 6) for n in (3, 70, 8, 33)], 6, CHUNK)
    said = group(size, as_rank, directory, alone.batches)
    for step, want in zip(said[0].drawn, alone.drawn, strict=True):
        assert [(d.key, d.token) for d in step] == [(d.key, d.token) for d in want]
        odds = [d.logprob for d in want]
        assert [d.logprob for d in step] == pytest.approx(odds, abs=1e-4)
    assert not any(d for follower in said[1:] for d in follower.drawn)
    assert {one.layout for one in said} == {alone.layout}
    assert len({one.pool for one in said}) == 1
    one, other = (np.frombuffer(pool, np.float32) for pool in (said[0].pool, loop.memory))
    np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)


def test_ranks_must_divide_heads_and_experts_and_nothing_else(
    tiny_model: Callable[[str], Tiny],
) -> None:
    spec = ModelSpec.read(tiny_model("deepseek_v2")[0])
    spec.check_tp(4)
    with pytest.raises(ConfigError, match="attention heads"):
        spec.check_tp(8)
