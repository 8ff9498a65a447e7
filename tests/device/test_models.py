"""What the torch runner says is what transformers says, however a prompt gets there."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence

import pytest
import torch

from pdrt.device.batch import SeqStep
from pdrt.device.collective import Solo
from pdrt.device.kv import KvPool
from pdrt.device.torchrunner import TorchRunner
from tests.device import tiny
from tests.device.loop import Loop
from tests.device.tiny import Tiny

BLOCK = 16
CHUNK = 32
LENGTHS = [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * CHUNK, int(2.7 * CHUNK)]
TOKENS = 20


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_each_family_says_what_transformers_says(
    tiny_model: Callable[[str], Tiny], name: str
) -> None:
    directory, oracle = tiny_model(name)
    loop = Loop(tiny.runner(directory))
    prompt = tiny.prompt(LENGTHS[-1])
    assert loop.answer(prompt, TOKENS, chunk=CHUNK) == tiny.answer(oracle, prompt, TOKENS)
    for length in LENGTHS[:-1]:
        prompt = tiny.prompt(length)
        said = loop.answer(prompt, TOKENS, chunk=CHUNK)
        best = tiny.judged(oracle, prompt + said).argmax(-1)  # as generate, in one forward
        assert said == best[length - 1 : -1].tolist(), f"prompt of {length}"


def test_a_prompt_in_chunks_says_what_it_says_in_one(tiny_model: Callable[[str], Tiny]) -> None:
    """CASES 59."""
    loop = Loop(tiny.runner(tiny_model("llama")[0]))
    prompt = tiny.prompt(87)
    whole = loop.answer(prompt, TOKENS)
    for chunk in (1, 5, BLOCK, BLOCK + 1, 86):
        assert loop.answer(prompt, TOKENS, chunk) == whole, f"chunks of {chunk}"


@pytest.mark.parametrize("name", ["smollm2", "qwen3"])
def test_sixteen_lengths_in_flight_together_say_what_each_says_alone(
    tiny_model: Callable[[str], Tiny], name: str
) -> None:
    """Chunks and decode steps share batches, since the long prompts take several steps."""
    directory, oracle = tiny_model(name)
    loop = Loop(tiny.runner(directory), blocks=256)
    lengths = [1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 40, 64, 86, 100, 150, 290]
    sequences = [loop.sequence(tiny.prompt(n, seed=3), TOKENS) for n in lengths]
    loop.run(sequences, TOKENS, chunk=CHUNK)
    for sequence in sequences:
        want = tiny.answer(oracle, sequence.prompt, TOKENS)
        assert sequence.output == want, f"prompt of {len(sequence.prompt)}"


def test_requests_that_join_late_change_nobodys_answer(tiny_model: Callable[[str], Tiny]) -> None:
    loop = Loop(tiny.runner(tiny_model("mistral")[0]))
    prompts = [tiny.prompt(n, seed=5) for n in (20, 50, 3, 34)]
    alone = [loop.answer(p, TOKENS, CHUNK) for p in prompts]
    sequences = [loop.sequence(p, TOKENS) for p in prompts]
    for joined in range(1, len(sequences)):
        loop.run(sequences[:joined], 4 * joined, CHUNK)
    loop.run(sequences, TOKENS, CHUNK)
    assert [s.output for s in sequences] == alone


@pytest.mark.parametrize("length", LENGTHS)
def test_decode_goes_on_in_another_pool_from_the_bytes_of_the_prompts_blocks(
    tiny_model: Callable[[str], Tiny], length: int
) -> None:
    """What a disaggregated request does: prefill here, copy whole blocks, decode there."""
    directory, oracle = tiny_model("llama3_rope")
    prefill, decode = Loop(tiny.runner(directory), seed=2), Loop(tiny.runner(directory), seed=3)
    here = prefill.sequence(tiny.prompt(length), TOKENS)
    prefill.run([here], 1, CHUNK)
    there = prefill.hand_over(here, decode, TOKENS)
    assert there.output == tiny.answer(oracle, here.prompt, TOKENS)


def test_other_bytes_in_the_prompts_blocks_change_the_answer(
    tiny_model: Callable[[str], Tiny],
) -> None:
    """The test above would see a transfer that did nothing."""
    directory, oracle = tiny_model("llama3_rope")
    prefill, decode = Loop(tiny.runner(directory), seed=2), Loop(tiny.runner(directory), seed=3)
    here, other = (prefill.sequence(tiny.prompt(40, seed), TOKENS) for seed in (0, 1))
    prefill.run([here, other], 1)
    there = prefill.hand_over(here, decode, TOKENS, instead=other)
    assert there.output != tiny.answer(oracle, here.prompt, TOKENS)


def test_positions_past_a_sequences_end_are_never_seen(tiny_model: Callable[[str], Tiny]) -> None:
    """Loop's pools start as NaN: a block begun in part is cleared, padding stays at home."""
    loop = Loop(tiny.runner(tiny_model("llama")[0]))
    short, long = loop.sequence(tiny.prompt(3), TOKENS), loop.sequence(tiny.prompt(70), TOKENS)
    loop.run([short, long], TOKENS, CHUNK)
    assert all(map(math.isfinite, short.logprobs + long.logprobs))


def test_the_logprob_is_that_of_the_models_distribution(tiny_model: Callable[[str], Tiny]) -> None:
    """CASES 89: one for each token, the first included, within 1e-3."""
    directory, oracle = tiny_model("qwen2")
    loop = Loop(tiny.runner(directory))
    sequence = loop.sequence(tiny.prompt(40), 8)
    loop.run([sequence], 8, CHUNK)
    with torch.no_grad():
        logits = oracle(torch.tensor([sequence.history])).logits[0, 39:-1]
    want = logits.log_softmax(-1).gather(1, torch.tensor(sequence.output)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(sequence.logprobs), want, atol=1e-3, rtol=0)
    assert len(sequence.logprobs) == 8


def test_bfloat16_agrees_wherever_the_best_token_leads_clearly(
    tiny_model: Callable[[str], Tiny],
) -> None:
    """Near ties may fall otherwise: only gaps above 1 between the two best logits count."""
    directory, oracle = tiny_model("smollm2")
    loop = Loop(tiny.runner(directory, "bfloat16"))
    assert loop.runner.layout.dtype == "bfloat16"
    assert tiny.count_agreeing(loop, oracle, gap=1.0, chunk=CHUNK) >= 20


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "qwen3_moe_sparse"])
def test_bfloat16_experts_are_as_close_to_float32_as_transformers_bfloat16_is(
    tiny_model: Callable[[str], Tiny], name: str
) -> None:
    """But for the rare row whose rounding chose another expert, on either side."""
    directory, oracle = tiny_model(name)
    prompt = tiny.prompt(200)
    exact = tiny.judged(oracle, prompt)

    def off(logits: torch.Tensor) -> float:
        """The relative error that nine rows of ten stay below."""
        return float(((logits - exact).norm(dim=-1) / exact.norm(dim=-1)).quantile(0.9))

    theirs = tiny.judged(copy.deepcopy(oracle).to(torch.bfloat16), prompt)
    assert (
        off(judged(tiny.runner(directory, "bfloat16"), prompt)) < max(1.2 * off(theirs), 0.01) < 0.1
    )


def judged(runner: TorchRunner, prompt: Sequence[int]) -> torch.Tensor:
    """The logits of all rows of a prompt."""
    blocks = -(-len(prompt) // BLOCK)
    memory = memoryview(bytearray(blocks * runner.layout.block_bytes))
    pool = KvPool(memory, blocks, runner.layout, "cpu", mirrored=False)
    with torch.inference_mode():
        wave = runner.model.lay_out([SeqStep(1, prompt, 0, range(blocks), None)], pool)
        logits = runner.model.logits(runner.model.forward(wave, pool, Solo()), Solo())
    assert logits is not None
    return logits


def test_bfloat16_decodes_in_batches(tiny_model: Callable[[str], Tiny]) -> None:
    loop = Loop(tiny.runner(tiny_model("qwen2")[0], "bfloat16"))
    sequences = [loop.sequence(tiny.prompt(n), TOKENS) for n in (1, 5, 30, 64)]
    loop.run(sequences, TOKENS, CHUNK)
    assert all(len(s.output) == TOKENS for s in sequences)
    assert all(math.isfinite(logprob) for s in sequences for logprob in s.logprobs)


@pytest.mark.parametrize("block_size", [1, 5, 64])
def test_block_size_does_not_change_an_answer(
    tiny_model: Callable[[str], Tiny], block_size: int
) -> None:
    directory, oracle = tiny_model("llama")
    loop = Loop(tiny.runner(directory, block_size=block_size))
    prompt = tiny.prompt(61)
    assert loop.answer(prompt, TOKENS, CHUNK) == tiny.answer(oracle, prompt, TOKENS)


def test_a_mirrored_pool_says_the_same_and_hands_back_its_blocks(
    tiny_model: Callable[[str], Tiny],
) -> None:
    """As on an accelerator: decode's device learns what a peer wrote to host memory."""
    directory, oracle = tiny_model("qwen3")
    sides = [tiny.runner(directory) for _ in range(2)]
    prefill, decode = (
        Loop(TorchRunner(r.model, r.layout, mirrored=True), seed=seed)
        for seed, r in enumerate(sides)
    )
    here = prefill.sequence(tiny.prompt(50), TOKENS)
    prefill.run([here], 1, CHUNK)
    there = prefill.hand_over(here, decode, TOKENS)
    assert there.output == tiny.answer(oracle, here.prompt, TOKENS)


def test_an_empty_batch_draws_nothing(tiny_model: Callable[[str], Tiny]) -> None:
    assert Loop(tiny.runner(tiny_model("llama")[0])).runner.execute([]) == []


def test_a_pool_of_another_size_is_refused(tiny_model: Callable[[str], Tiny]) -> None:
    one = tiny.runner(tiny_model("llama")[0])
    with pytest.raises(ValueError, match="3 blocks"):
        one.bind(memoryview(bytearray(2 * one.layout.block_bytes)), 3)
