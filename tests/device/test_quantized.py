"""Weights in int8: the product is that of the rounded matrix, on every path and every rank."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pdrt.config import ModelSection, NodeConfig
from pdrt.device.backends import open_runner
from pdrt.device.linear import Linear
from pdrt.device.models.blocks import Reader
from pdrt.device.models.llama import Llama
from pdrt.device.quantized import QuantizedLinear, Quantizer, scales
from pdrt.device.shard import Run, Shard
from pdrt.device.weights import Checkpoint
from pdrt.errors import ConfigError
from pdrt.modelspec import ModelSpec
from pdrt.settings import check
from tests.device import tiny
from tests.device.loop import Loop
from tests.device.tiny import Tiny

TOKENS = 20
CHUNK = 32
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")


def unheard(_stage: str, _done: int, _total: int) -> None:
    pass


def checkpoint(directory: Path, **tensors: torch.Tensor) -> Checkpoint:
    save_file(tensors, directory / "model.safetensors")
    return Checkpoint(directory, unheard)


def rounded(matrix: torch.Tensor) -> torch.Tensor:
    """The definition: what a matrix is in int8, in float32."""
    most = matrix.abs().amax(1, keepdim=True)
    step = torch.where(most == 0, torch.ones(()), most / 127)
    return (matrix / step).round() * step


# One matrix.


def test_a_matrix_is_rounded_to_255_steps_of_its_rows_largest_magnitude(tmp_path: Path) -> None:
    torch.manual_seed(1)
    matrix = torch.randn(24, 40) * torch.logspace(-3, 3, 24)[:, None]
    matrix[5] = 0
    weights = checkpoint(tmp_path, matrix=matrix)
    rows, columns = Run.all_of(24), Run.all_of(40)
    found = Quantizer(weights, "cpu").read({"matrix": rows}, columns, 26)
    assert found.weight.dtype is torch.int8
    assert int(found.weight.abs().max()) == 127
    torch.testing.assert_close(found.exact[:24], rounded(matrix), rtol=1e-6, atol=0)
    assert not found.exact[24:].any(), "what is below is zeros"
    assert ((found.exact[:24] - matrix).abs() <= 0.5001 * scales(matrix)[:, None]).all()


def test_ranks_have_parts_of_the_same_matrix(tmp_path: Path) -> None:
    """Also where columns are split: the whole row says what a step is."""
    torch.manual_seed(2)
    matrix = torch.randn(24, 40)
    weights = checkpoint(tmp_path, matrix=matrix)

    def read(rows: Run, columns: Run) -> torch.Tensor:
        return Quantizer(weights, "cpu").read({"matrix": rows}, columns, len(rows)).exact

    all_rows, all_columns = Run.all_of(24), Run.all_of(40)
    whole = read(all_rows, all_columns)
    halves = [read(all_rows, Run(first, first + 20, 40)) for first in (0, 20)]
    assert torch.equal(torch.cat(halves, 1), whole)
    halves = [read(Run(first, first + 12, 24), all_columns) for first in (0, 12)]
    assert torch.equal(torch.cat(halves), whole)


def test_a_matrix_is_read_in_portions_of_which_none_is_large(tmp_path: Path) -> None:
    class Watched(Checkpoint):
        largest = 0

        def copy(self, name: str, out: torch.Tensor, runs: Any = ()) -> None:
            self.largest = max(self.largest, out.numel())
            super().copy(name, out, runs)

    torch.manual_seed(4)
    matrix = torch.randn(7, 40)
    save_file({"matrix": matrix}, tmp_path / "model.safetensors")
    weights = Watched(tmp_path, unheard)
    quantizer = Quantizer(weights, "cpu", together=100)
    found = quantizer.read({"matrix": Run.all_of(7)}, Run.all_of(40), 7)
    assert weights.largest == 80, "two rows at a time"
    torch.testing.assert_close(found.exact, rounded(matrix), rtol=1e-6, atol=0)


def test_numbers_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    matrix = torch.ones(2, 4)
    matrix[1, 2] = torch.inf
    quantizer = Quantizer(checkpoint(tmp_path, matrix=matrix), "cpu")
    with pytest.raises(ConfigError, match="matrix has values that are not finite"):
        quantizer.read({"matrix": Run.all_of(2)}, Run.all_of(4), 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 100])
def test_the_product_is_that_of_the_matrix_it_stands_for(rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    weight = torch.randint(-127, 128, (24, 40), dtype=torch.int8)
    x, scale, bias = torch.randn(rows, 40).to(dtype), torch.rand(24), torch.randn(24).to(dtype)
    for offset in (None, bias):
        found = QuantizedLinear(weight, scale, offset)(x)
        want = Linear((weight * scale[:, None]).double())(x.double())
        want = want if offset is None else want + offset.double()
        assert found.dtype is dtype
        atol, rtol = (1e-3, 1e-5) if dtype is torch.float32 else (1.0, 0.02)
        torch.testing.assert_close(found.double(), want, atol=atol, rtol=rtol)


def test_matrices_share_the_memory_in_which_they_are_widened(tmp_path: Path) -> None:
    torch.manual_seed(3)
    large, small = torch.randn(20, 40), torch.randn(8, 16)
    quantizer = Quantizer(checkpoint(tmp_path, large=large, small=small), "cpu")
    both = [
        quantizer.read({name: Run.all_of(rows)}, Run.all_of(width), rows)
        for name, rows, width in (("large", 20, 40), ("small", 8, 16))
    ]
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        for matrix in (*both, *both):
            x = torch.ones(1, matrix.weight.shape[1]).to(dtype)
            want = matrix.exact.sum(1)[None]
            torch.testing.assert_close(matrix(x).float(), want, atol=0.05, rtol=0.02)


# In a model.


def dequantized(oracle: Any) -> Any:
    """Transformers' model with the matrices that ours stands for."""
    found = copy.deepcopy(oracle)
    tied = found.config.tie_word_embeddings
    with torch.no_grad():
        for name, weight in found.named_parameters():
            is_matrix = weight.ndim == 2 and name.split(".")[-2] in MATRICES
            if is_matrix and not (tied and "lm_head" in name):
                weight.copy_(rounded(weight))
    return found


def loop(directory: Path, dtype: str = "float32", **choices: Any) -> Loop:
    return Loop(tiny.runner(directory, dtype, quantize="int8", **choices))


@pytest.fixture(params=["compiled", "torch"])
def kernels(request: pytest.FixtureRequest) -> str:
    if request.param == "compiled":
        pytest.importorskip("numba", reason="pdrt[cpu] is not installed")
    found: str = request.param
    return found


@pytest.mark.parametrize("name", ["llama", "smollm2", "qwen3", "llama_mha_biased"])
def test_it_says_what_transformers_says_with_the_rounded_weights(
    tiny_model: Callable[[str], Tiny], name: str, kernels: str
) -> None:
    """Tied and not, with biases and without: in chunks, then decoded alone and together."""
    directory, oracle = tiny_model(name)
    rounded_oracle = dequantized(oracle)
    ours = loop(directory, kernels=kernels)
    assert any_int8(ours.runner)
    sequences = [ours.sequence(tiny.prompt(n), TOKENS) for n in (1, 17, 86)]
    ours.run(sequences, TOKENS, CHUNK)
    for sequence in sequences:
        want = tiny.answer(rounded_oracle, sequence.prompt, TOKENS)
        assert sequence.output == want, f"prompt of {len(sequence.prompt)}"
        assert ours.answer(sequence.prompt, TOKENS) == want
    prompt = sequences[-1].history
    exact, theirs = tiny.judged(oracle, prompt), tiny.judged(rounded_oracle, prompt)
    assert (exact - theirs).abs().mean() > 1e-3, "the rounding can be seen"


def any_int8(runner: Any) -> bool:
    return any(matrix.weight.dtype is torch.int8 for matrix in matrices(runner))


def matrices(runner: Any) -> Iterator[Any]:
    assert isinstance(runner.model, Llama)
    for layer in runner.model._layers:  # noqa: SLF001 - nobody else asks
        yield from (layer.qkv, layer.out, layer.mlp.gate_up, layer.mlp.down)  # type: ignore[attr-defined]
    yield runner.model._vocabulary.head  # noqa: SLF001 - as above


@pytest.mark.parametrize("name", ["llama", "llama_mha_biased", "qwen2"])
def test_compiled_loops_and_torch_find_the_same_logits(
    tiny_model: Callable[[str], Tiny], name: str
) -> None:
    pytest.importorskip("numba", reason="pdrt[cpu] is not installed")
    directory, _ = tiny_model(name)
    compiled, plain = (logits(loop(directory, kernels=each)) for each in ("compiled", "torch"))
    torch.testing.assert_close(compiled, plain, atol=1e-3, rtol=0)


def logits(ours: Loop) -> torch.Tensor:
    return tiny.decode_logits(ours, (1, 15, 40))


def test_a_request_is_told_the_same_alone_and_among_others(
    tiny_model: Callable[[str], Tiny],
) -> None:
    """In bfloat16, where AMX may multiply widened tiles."""
    pytest.importorskip("numba", reason="pdrt[cpu] is not installed")
    ours = loop(tiny_model("llama")[0], "bfloat16", kernels="compiled")
    alone, *_ = sequences = [ours.sequence(tiny.prompt(n), TOKENS) for n in (30, *range(2, 20))]
    other = ours.sequence(alone.prompt, TOKENS)
    ours.step([alone], 64)
    ours.step([other], 64)
    ours.step(sequences[1:], 64)
    ours.run(sequences, TOKENS)
    ours.run([other], TOKENS)
    assert other.output == alone.output
    assert other.logprobs == alone.logprobs


def test_decode_goes_on_from_the_bytes_of_a_prompts_blocks(
    tiny_model: Callable[[str], Tiny], kernels: str
) -> None:
    directory, oracle = tiny_model("llama")
    prefill, decode = loop(directory, kernels="torch"), loop(directory, kernels=kernels)
    here = prefill.sequence(tiny.prompt(40), TOKENS)
    prefill.run([here], 1, CHUNK)
    there = prefill.hand_over(here, decode, TOKENS)
    assert there.output == loop(directory).answer(here.prompt, TOKENS, CHUNK)
    assert there.output == tiny.answer(dequantized(oracle), here.prompt, TOKENS)


def test_bfloat16_is_nearer_to_the_rounded_weights_than_these_are_to_the_exact_ones(
    tiny_model: Callable[[str], Tiny], kernels: str
) -> None:
    """Scales are not rounded to bfloat16: that would shift whole rows."""
    directory, _ = tiny_model("llama")
    right = logits(loop(directory, kernels="torch"))
    found = logits(loop(directory, "bfloat16", kernels=kernels))
    plain = logits(Loop(tiny.runner(directory, "bfloat16", kernels="torch")))
    exact = logits(Loop(tiny.runner(directory, kernels="torch")))
    assert (found - right).abs().mean() <= 1.2 * (plain - exact).abs().mean()


def test_matrices_take_a_quarter_of_the_memory_of_float32(
    tiny_model: Callable[[str], Tiny],
) -> None:
    def held(runner: Any) -> int:
        return sum(each.weight.nbytes + scale(each).nbytes for each in matrices(runner))

    def rooms(matrix: Any) -> int:
        count: int = matrix._room._memory.numel()  # noqa: SLF001 - nobody else asks
        return count

    def scale(matrix: Any) -> torch.Tensor:
        return matrix.scale if isinstance(matrix, QuantizedLinear) else torch.empty(0)

    directory, _ = tiny_model("llama")
    wide, narrow = tiny.runner(directory), tiny.runner(directory, quantize="int8")
    assert {rooms(each) for each in matrices(narrow)} == {0}, "a trial leaves nothing behind"
    assert 0.25 < held(narrow) / held(wide) < 0.32, "scales count: rows are short here"


# Who is refused.


@pytest.mark.parametrize(
    ("name", "why"), [("mixtral", "has experts"), ("deepseek_v2", "has latent attention")]
)
def test_models_that_cannot_be_held_so_are_refused_before_weights_are_read(
    tiny_model: Callable[[str], Tiny], name: str, why: str
) -> None:
    directory, _ = tiny_model(name)
    with pytest.raises(ConfigError, match=f"quantize = 'int8'.*{why}"):
        ModelSpec.of(ModelSection(path=str(directory), quantize="int8"))
    with pytest.raises(ConfigError, match=why):
        tiny.runner(directory, quantize="int8")


def test_what_transformers_computes_and_what_has_no_weights_is_refused(
    tiny_model: Callable[[str], Tiny],
) -> None:
    directory, _ = tiny_model("llama")
    foreign = ModelSection(path=str(directory), quantize="int8", backend="transformers")
    with pytest.raises(ConfigError, match="through transformers"):
        ModelSpec.of(foreign)
    with pytest.raises(ConfigError, match="has no weights"):
        ModelSpec.of(ModelSection(path="null", quantize="int8"))


def test_a_pair_of_which_one_side_is_quantized_differs_and_says_both(
    tiny_model: Callable[[str], Tiny],
) -> None:
    directory, _ = tiny_model("llama")
    one, other = tiny.runner(directory, quantize="int8"), tiny.runner(directory)
    assert one.layout.differences(other.layout) == ["quantize: int8 here, none there"]
    assert one.layout.block_bytes == other.layout.block_bytes, "nothing else would tell them apart"


def test_a_worker_opens_what_the_settings_say(tiny_model: Callable[[str], Tiny]) -> None:
    directory, _ = tiny_model("llama")
    tables = {
        "model": {"path": str(directory), "quantize": "int8"},
        "device": {"kind": "cpu", "threads": 1},
    }
    runner = open_runner(check(NodeConfig, tables, "test"), unheard)
    assert runner.layout.quantize == "int8"
    assert all(each.weight.dtype is torch.int8 for each in matrices(runner))


def test_embedding_norms_and_biases_stay_as_they_are(tiny_model: Callable[[str], Tiny]) -> None:
    directory, _ = tiny_model("smollm2")
    spec = ModelSpec.read(directory)
    read = Reader(Checkpoint(directory, unheard), torch.float32, "cpu", "int8")
    hidden, rows = Run.all_of(spec.hidden), Shard(spec).vocab
    table = read.table({"model.embed_tokens.weight": rows}, hidden, spec.vocab)
    assert table.dtype is torch.float32
    model = tiny.runner(directory, quantize="int8")
    head = list(matrices(model))[-1]
    assert torch.equal(head.weight, table), "tied, the head is the embedding"
