"""Ranks in processes of their own, together, compute what one rank computes alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import save_file

from pdrt.device.batch import Drawn, Runner, Scoring, SeqStep
from pdrt.messages import KvLayout, Sampling
from tests.device import tiny
from tests.device.loop import GREEDY, Loop
from tests.device.ranks import BLOCK, BLOCKS, Ranks, Recorder, as_rank, loading, opened

CHUNK, TOKENS = 32, 6
WARM = Sampling(temperature=0.8, seed=5, top_k=40)


class Alone:
    """One rank's batches of prompts in chunks and single steps mixed, its tokens and its pool."""

    def __init__(self, runner: Runner) -> None:
        recorder = Recorder(runner)
        loop = Loop(recorder, blocks=BLOCKS)
        asked = [(3, GREEDY), (70, GREEDY), (BLOCK, WARM), (33, GREEDY)]
        vocab = 256 if runner.layout.dtype == "uint8" else tiny.VOCAB
        loop.run(
            [
                loop.sequence([t % vocab for t in tiny.prompt(n)], TOKENS, sampling)
                for n, sampling in asked
            ],
            TOKENS,
            CHUNK,
        )
        self.batches, self.drawn, self.layout = recorder.batches, recorder.drawn, recorder.layout
        self.pool = bytes(loop.memory)


def heads(pool: bytes, layout: KvLayout) -> npt.NDArray[np.float32 | np.uint8]:
    """[blocks, kv heads, the head's part of a block]"""
    dtype = np.uint8 if layout.dtype == "uint8" else np.float32
    flat: npt.NDArray[np.float32 | np.uint8] = np.frombuffer(pool, dtype)
    return flat.reshape(BLOCKS, layout.kv_heads, -1)


def tokens(drawn: Sequence[Sequence[Drawn]]) -> list[list[tuple[int, int]]]:
    return [[(d.key, d.token) for d in step] for step in drawn]


def logprobs(drawn: Sequence[Sequence[Drawn]]) -> list[float]:
    return [d.logprob for step in drawn for d in step]


def whose(size: int, total: int) -> list[range]:
    """The kv heads of each rank."""
    if size > total:
        return [range(r // (size // total), r // (size // total) + 1) for r in range(size)]
    return [range(r * total // size, (r + 1) * total // size) for r in range(size)]


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("llama", 2),
        ("llama", 4),  # two kv heads, each on two ranks
        ("llama_mha_biased", 2),  # two kv heads a rank; biases are added once
        ("llama_mha_biased", 4),
        ("qwen2", 2),
        ("qwen3", 4),
        ("smollm2", 2),
        ("mixtral", 2),
        ("qwen3_moe", 4),
        ("llama_uneven_vocab", 4),
    ],
)
def test_a_group_says_and_keeps_what_one_rank_does(
    group: Ranks, model_path: Callable[[str], str], name: str, size: int
) -> None:
    alone = Alone(opened(model_path(name)))
    said = group(size, as_rank, model_path(name), alone.batches)
    assert tokens(said[0].drawn) == tokens(alone.drawn)
    assert logprobs(said[0].drawn) == pytest.approx(logprobs(alone.drawn), abs=1e-4)
    whole = heads(alone.pool, alone.layout)
    for one, its in zip(said, whose(size, alone.layout.kv_heads), strict=True):
        assert one.layout.model_kv_heads == alone.layout.kv_heads
        np.testing.assert_allclose(
            heads(one.pool, one.layout), whole[:, its.start : its.stop], rtol=1e-3, atol=1e-4
        )
    assert not any(d for follower in said[1:] for d in follower.drawn)


@pytest.mark.parametrize(("name", "size"), [("llama", 2), ("llama_uneven_vocab", 4)])
def test_a_group_scores_a_prompt_as_one_rank_does(
    group: Ranks, model_path: Callable[[str], str], name: str, size: int
) -> None:
    """CASES 90: followers have a share in the logits, and are told how many rows are scored."""
    runner, prompt = opened(model_path(name)), tiny.prompt(21)
    loop = Loop(runner, blocks=BLOCKS)
    first, beside = loop.sequence(prompt, 1), loop.sequence(prompt[:9], 1)
    batches = [[beside.step(9)]]
    for begin in range(0, 21, 8):
        end = min(begin + 8, 21)
        scoring = Scoring(prompt[begin + 1 : end + 1], 3)
        first.computed = begin
        batches.append([replace(first.step(8), scoring=scoring)])
        first.computed = end
    alone = [runner.execute(batch) for batch in batches]
    said = group(size, as_rank, model_path(name), batches)
    odds = [
        [o for step in drawn for d in step for o in d.scored] for drawn in (said[0].drawn, alone)
    ]
    assert len(odds[0]) == 20
    for one, other in zip(*odds, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
        assert [token for token, _ in one.top] == [token for token, _ in other.top]
    assert tokens(said[0].drawn) == tokens(alone)
    assert not any(d for follower in said[1:] for d in follower.drawn)


def test_ranks_with_the_same_head_keep_the_same_bytes(
    group: Ranks, model_path: Callable[[str], str]
) -> None:
    """Any of them may send it to a peer."""
    alone = Alone(opened(model_path("llama")))
    pools = [one.pool for one in group(4, as_rank, model_path("llama"), alone.batches)]
    assert pools[0] == pools[1] != pools[2] == pools[3]


@pytest.mark.parametrize("size", [2, 4])
def test_null_ranks_say_and_keep_exactly_what_one_does(group: Ranks, size: int) -> None:
    alone = Alone(opened("null"))
    said = group(size, as_rank, "null", alone.batches)
    assert said[0].drawn == alone.drawn
    whole = heads(alone.pool, alone.layout)
    for one, its in zip(said, whose(size, alone.layout.kv_heads), strict=True):
        np.testing.assert_array_equal(heads(one.pool, one.layout), whole[:, its.start : its.stop])
    assert not any(d for follower in said[1:] for d in follower.drawn)


def test_bfloat16_sums_agree_within_its_precision(
    group: Ranks, model_path: Callable[[str], str]
) -> None:
    """Tokens may fall otherwise, so the group is given those of one rank."""
    alone = Alone(opened(model_path("qwen3"), dtype="bfloat16"))
    said = group(2, as_rank, model_path("qwen3"), alone.batches, "bfloat16")
    assert said[0].layout.dtype == "bfloat16"
    first = [d.logprob for d in said[0].drawn[0]]
    assert first == pytest.approx([d.logprob for d in alone.drawn[0]], abs=0.5)


def test_each_of_two_ranks_has_half_of_the_vocabulary_in_memory(
    group: Ranks, tmp_path: Path
) -> None:
    """Measured: what loading a model of little else adds to a process's own memory."""
    vocab, hidden = 300_000, 64
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    layer = "model.layers.0."
    square = [f"{layer}self_attn.{x}_proj" for x in "qkvo"]
    square += [f"{layer}mlp.{x}_proj" for x in ("gate", "up", "down")]
    norms = [f"{layer}input_layernorm", f"{layer}post_attention_layernorm", "model.norm"]
    words = ["model.embed_tokens", "lm_head"]
    tensors = {f"{name}.weight": torch.zeros(hidden, hidden) for name in square}
    tensors |= {f"{name}.weight": torch.zeros(hidden) for name in norms}
    tensors |= {f"{name}.weight": torch.zeros(vocab, hidden) for name in words}
    save_file(tensors, tmp_path / "model.safetensors")
    both = 2 * vocab * hidden * 4
    [alone] = group(1, loading, str(tmp_path))
    shared = group(2, loading, str(tmp_path))
    assert alone == pytest.approx(both, rel=0.1)
    assert shared == [pytest.approx(both / 2, rel=0.1)] * 2


def test_a_rank_that_has_not_joined_executes_nothing(model_path: Callable[[str], str]) -> None:
    one = opened(model_path("llama"), 1, 2)
    one.bind(memoryview(bytearray(one.layout.block_bytes)), 1)
    with pytest.raises(RuntimeError, match="join come before execute"):
        one.execute([SeqStep(1, [1], 0, [0], None)])


@pytest.mark.matrix
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", [name for name in tiny.CONFIGS if name != "smollm2"])
def test_every_family_says_in_a_group_what_it_says_alone(
    group: Ranks, model_path: Callable[[str], str], name: str, size: int
) -> None:
    alone = Alone(opened(model_path(name)))
    said = group(size, as_rank, model_path(name), alone.batches)
    assert tokens(said[0].drawn) == tokens(alone.drawn)
