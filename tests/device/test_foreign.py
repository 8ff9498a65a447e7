"""Through transformers' own code over our paged cache, a model says what it says by itself."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from pdrt.config import ModelSection, NodeConfig
from pdrt.device import torchrunner
from pdrt.device.attention import lay_out
from pdrt.device.backends import open_runner
from pdrt.device.batch import Scoring, SeqStep
from pdrt.device.collective import Collective
from pdrt.device.foreignattention import Terms
from pdrt.device.foreignstep import PagedStep, Spans
from pdrt.device.kv import KvPool
from pdrt.device.models import foreign
from pdrt.device.models.foreigncheck import check
from pdrt.device.shard import Shard
from pdrt.device.torchrunner import TorchRunner
from pdrt.errors import ConfigError
from pdrt.messages import KvLayout
from pdrt.modelspec import Backend, ModelSpec
from tests.device import tiny
from tests.device.foreign_tiny import CONFIGS, WINDOW
from tests.device.loop import Loop

BLOCK, CHUNK, TOKENS = 8, 32, 8
LENGTHS = [1, WINDOW + 1, int(2.7 * CHUNK)]
Tiny: TypeAlias = tuple[Path, Any]  # its directory, and transformers' own


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tiny]:
    @functools.cache
    def make(name: str) -> Tiny:
        directory = tmp_path_factory.mktemp(name)
        return directory, tiny.save(CONFIGS[name], len(name), directory)

    return make


@pytest.fixture(scope="module")
def runner(model: Callable[[str], Tiny]) -> Callable[[str], TorchRunner]:
    """Each is loaded once; every test binds a pool of its own to it."""
    return functools.cache(lambda name: load(model(name)[0]))


def load(directory: Path, backend: Backend = "transformers", dtype: str = "float32") -> TorchRunner:
    return torchrunner.load(
        directory,
        Shard(ModelSpec.read(directory, backend=backend)),
        device="cpu",
        dtype=dtype,
        block_size=BLOCK,
        progress=lambda _stage, _done, _total: None,
    )


def plain(oracle: Any, prompt: Sequence[int], output: Sequence[int]) -> list[int]:
    """What transformers says after the prompt and after each token but the last, in one pass.

    When that is the output, greedy `generate` says it too, and in a fraction of its time.
    """
    with torch.no_grad():
        logits = oracle(torch.tensor([[*prompt, *output[:-1]]]), use_cache=False).logits
    said: list[int] = logits[0, len(prompt) - 1 :].argmax(-1).tolist()
    return said


@pytest.mark.parametrize("name", CONFIGS)
def test_each_says_what_transformers_says(
    model: Callable[[str], Tiny], runner: Callable[[str], TorchRunner], name: str
) -> None:
    """Prompts shorter and longer than its window, in chunks that do and do not divide them."""
    oracle = model(name)[1]
    loop = Loop(runner(name))
    for length in LENGTHS:
        prompt = tiny.prompt(length)
        output = loop.answer(prompt, TOKENS, CHUNK)
        assert output == plain(oracle, prompt, output), f"prompt of {length}"


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "llama4"])
def test_mixed_batches_and_all_chunk_sizes_change_nothing(
    model: Callable[[str], Tiny], runner: Callable[[str], TorchRunner], name: str
) -> None:
    """Chunks and decode steps share batches, sequences join late."""
    oracle = model(name)[1]
    loop = Loop(runner(name))
    sequences = [loop.sequence(tiny.prompt(n, seed=3), TOKENS) for n in (9, 40, 1, 70, 31)]
    for joined, chunk in enumerate((1, 5, BLOCK, WINDOW), 1):
        loop.run(sequences[:joined], joined, chunk)
    loop.run(sequences, TOKENS, BLOCK + 1)
    for sequence in sequences:
        assert sequence.output == plain(oracle, sequence.prompt, sequence.output)


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_greedy_generate_says_the_same(
    model: Callable[[str], Tiny], runner: Callable[[str], TorchRunner], name: str
) -> None:
    prompt = tiny.prompt(50)
    want = tiny.answer(model(name)[1], prompt, TOKENS)
    assert Loop(runner(name)).answer(prompt, TOKENS, CHUNK) == want


def test_decode_goes_on_in_another_pool_from_the_bytes_of_the_prompts_blocks(
    model: Callable[[str], Tiny], runner: Callable[[str], TorchRunner]
) -> None:
    oracle = model("gemma3")[1]
    prefill = Loop(runner("gemma3"))
    here = prefill.sequence(tiny.prompt(45), TOKENS)
    prefill.run([here], 1, CHUNK)
    decode = Loop(runner("gemma3"), seed=3)  # the runner has this one's pool from now on
    there = prefill.hand_over(here, decode, TOKENS)
    assert there.output == plain(oracle, here.prompt, there.output)


def test_a_native_model_says_the_same_through_transformers(
    model: Callable[[str], Tiny], runner: Callable[[str], TorchRunner]
) -> None:
    native, through = load(model("llama")[0], "native"), runner("llama")
    assert native.layout == through.layout
    prompt = tiny.prompt(50)
    answers = []
    for each in (native, through):
        loop = Loop(each)
        sequence = loop.sequence(prompt, TOKENS)
        loop.run([sequence], TOKENS, CHUNK)
        answers.append(sequence)
    assert answers[0].output == answers[1].output
    assert answers[0].logprobs == pytest.approx(answers[1].logprobs, abs=1e-4)


def test_prompt_tokens_are_scored_with_capped_logits(
    model: Callable[[str], Tiny], runner: Callable[[str], TorchRunner]
) -> None:
    oracle, loop = model("gemma2")[1], Loop(runner("gemma2"))
    prompt = tiny.prompt(20)
    sequence = loop.sequence(prompt, 1)
    step = SeqStep(1, prompt, 0, sequence.blocks, None, scoring=Scoring(prompt[1:]))
    (drawn,) = loop.runner.execute([step])
    with torch.no_grad():
        odds = oracle(torch.tensor([prompt])).logits[0].log_softmax(-1)
    want = [float(odds[i, token]) for i, token in enumerate(prompt[1:])]
    assert [scored.logprob for scored in drawn.scored] == pytest.approx(want, abs=1e-3)


def test_bfloat16_is_served(model: Callable[[str], Tiny]) -> None:
    loop = Loop(load(model("gpt_oss")[0], dtype="bfloat16"))
    sequence = loop.sequence(tiny.prompt(40), TOKENS)
    loop.run([sequence], TOKENS, CHUNK)
    assert all(map(math.isfinite, sequence.logprobs))


def test_blocks_outside_of_the_window_are_not_read() -> None:
    """A decode step far behind its window has a mask of the window's blocks alone."""
    layout = KvLayout(block_size=BLOCK, dtype="float32", layers=1, kv_heads=1, head_dim=4)
    pool = KvPool(memoryview(bytearray(16 * layout.block_bytes)), 16, layout, "cpu", mirrored=False)
    wave = lay_out([SeqStep(1, [5], 100, range(16), None)], pool, Spans(pool))
    (span,) = PagedStep(wave, pool).spans
    seen = span.look(Terms(1.0, window=10), BLOCK)
    assert seen.first_block == 91 // BLOCK
    assert seen.mask.shape == (1, 1, 1, (100 // BLOCK + 1 - 91 // BLOCK) * BLOCK)
    assert int(seen.mask.sum()) == 10


def test_loading_is_told(model: Callable[[str], Tiny]) -> None:
    told = list[tuple[str, int, int]]()
    path = model("olmo2")[0]
    config = NodeConfig(model=ModelSection(path=str(path), dtype="float32"))
    open_runner(config, lambda *progress: told.append(progress))
    assert {stage for stage, _, _ in told} == {"weights"}
    assert told[0][1] < told[-1][1] == told[-1][2]


def only_config(where: Path, config: Any) -> Path:
    """A model directory without weights: what is refused here is refused before they are read."""
    config.architectures = [
        transformers.AutoModelForCausalLM._model_mapping[type(config)].__name__  # noqa: SLF001 - the public way makes a model
    ]
    config.save_pretrained(where)
    return where


def small(name: str, **fields: Any) -> Any:
    shape = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
        "max_position_embeddings": 64,
    }
    return getattr(transformers, f"{name}Config")(**shape | fields)


REFUSED = {
    "StableLm": "StableLmForCausalLM is not supported: its attention does not go through",
    "Falcon": "FalconForCausalLM is not supported: its attention does not go through",
    "Bert": "BertLMHeadModel is not supported: its attention looks ahead",
    "DiffLlama": "DiffLlamaForCausalLM is not supported: 4 of its 2 layers attend",
}


@pytest.mark.parametrize(("name", "says"), REFUSED.items())
def test_what_cannot_be_served_is_refused_by_name_before_weights_are_read(
    tmp_path: Path, name: str, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        load(only_config(tmp_path, small(name)))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architectures": ["NovelForCausalLM"]}, "transformers .* has no such language model"),
        ({"architectures": ["OlmoForCausalLM"]}, "its model_type is 'olmo2'"),
        ({"model_type": "novel"}, "its config is not understood"),
        ({}, "no \\*.safetensors"),
    ],
)
def test_code_that_comes_with_a_model_is_not_run(
    tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    config = json.loads((only_config(tmp_path, small("Olmo2")) / "config.json").read_text())
    config["auto_map"] = {
        "AutoConfig": "novel.NovelConfig",
        "AutoModelForCausalLM": "novel.NovelForCausalLM",
    }
    (tmp_path / "novel.py").write_text("raise SystemExit('it ran')\n")
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ConfigError, match=says):
        load(tmp_path)


@pytest.mark.parametrize(
    ("key", "says"),
    [("model.norm.weight", "the weights lack model.norm.weight"), ("", "not a whole safetensors")],
)
def test_weights_that_are_not_all_there_are_refused(
    model: Callable[[str], Tiny], tmp_path: Path, key: str, says: str
) -> None:
    source = model("olmo2")[0]
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    where = tmp_path / "model.safetensors"
    if key:
        weights = load_file(source / "model.safetensors")
        del weights[key]
        save_file(weights, where, metadata={"format": "pt"})
    else:
        where.write_bytes((source / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(ConfigError, match=says):
        load(tmp_path)


class Forgetful(foreign.Foreign):
    """Takes each row's answer for the next one's."""

    def forward(self, wave: Any, pool: KvPool, group: Collective) -> Tensor:
        return super().forward(wave, pool, group).roll(1, 0)


def test_a_model_that_says_something_else_over_the_paged_cache_is_refused_with_the_figure(
    model: Callable[[str], Tiny],
) -> None:
    path = model("olmo2")[0]
    sound = load(path).model
    assert isinstance(sound, foreign.Foreign)
    check(sound, torch.float32, "cpu")
    with pytest.raises(ConfigError, match=r"its logits are \d.* of their size away"):
        check(Forgetful(sound.shard, sound.model), torch.float32, "cpu")


def test_a_foreign_model_has_one_rank(model: Callable[[str], Tiny]) -> None:
    spec = ModelSpec.read(model("gemma2")[0])
    assert spec.backend == "transformers"
    with pytest.raises(ConfigError, match=r"Gemma2ForCausalLM .* serves tp = 1 alone"):
        Shard(spec, 0, 2)
