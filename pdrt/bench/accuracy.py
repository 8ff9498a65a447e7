"""`pdrt bench engine --accuracy`: how far rounding moves what a model says, against float32.

In float32 the model answers some prompts greedily. Every other way of holding it is then given the
same tokens, one decode step after the other as in serving, and its logits are compared: so a token
that falls otherwise does not make all that follow it incomparable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, TypeAlias

import tokenizers
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from pdrt.bench.shell import Report, write_points
from pdrt.config import NodeConfig
from pdrt.device import torchrunner
from pdrt.device.batch import Draw, SeqStep
from pdrt.device.collective import Solo
from pdrt.device.cores import threads_of
from pdrt.device.kv import KvPool
from pdrt.device.shard import Shard
from pdrt.device.torchrunner import TorchRunner
from pdrt.messages import Sampling
from pdrt.modelspec import ModelSpec, Quantize

Way: TypeAlias = tuple[str, Quantize]
EXACT: Final[Way] = ("float32", "none")
WAYS: Final[tuple[Way, ...]] = (("bfloat16", "none"), ("bfloat16", "int8"), ("float32", "int8"))
TOKENS: Final = 64  # of an answer
PROMPTS: Final = (
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived",
    "def fibonacci(n):\n    ",
    "Water boils at a lower temperature on a mountain because",
    "Question: What is 12 times 7?\nAnswer:",
    "To make a simple tomato soup, first",
    "The three laws of motion say that",
    "Dear Sir or Madam, I am writing to ask",
)
_GREEDY: Final = Sampling(max_tokens=1, temperature=0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Over all tokens of all answers; errors are of logits."""

    dtype: str
    quantize: Quantize
    tokens: int
    mean_error: float
    max_error: float
    kl: float  # mean Kullback-Leibler divergence from float32, in nats
    equal: float  # share of tokens that are the likeliest here too

    @staticmethod
    def of(way: Way, found: Tensor, exact: Tensor) -> Accuracy:
        """For logits [rows, vocab]."""
        error = (found - exact).abs()
        ours, right = (each.double().log_softmax(-1) for each in (found, exact))
        return Accuracy(
            *way,
            tokens=len(exact),
            mean_error=float(error.mean()),
            max_error=float(error.max()),
            kl=float((right.exp() * (right - ours)).sum(-1).mean()),
            equal=float((found.argmax(-1) == exact.argmax(-1)).float().mean()),
        )


class Steps:
    """Prompts, then one token of each at a time, over a pool of their own."""

    def __init__(self, runner: TorchRunner, prompts: Sequence[Sequence[int]], tokens: int) -> None:
        self._model, size = runner.model, runner.layout.block_size
        self._each = max(-(-(len(prompt) + tokens) // size) for prompt in prompts)
        blocks = self._each * len(prompts)
        self._memory = bytearray(blocks * runner.layout.block_bytes)
        memory = memoryview(self._memory)
        self._pool = KvPool(memory, blocks, runner.layout, "cpu", mirrored=False)
        self._ends = [0] * len(prompts)

    @torch.inference_mode()
    def logits(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        """[prompts, vocab] after these further tokens of each."""
        batch = [self._step(number, some) for number, some in enumerate(tokens)]
        with torchrunner.threads_restored():
            wave = self._model.lay_out(batch, self._pool)
            hidden = self._model.forward(wave, self._pool, Solo())
            found = self._model.logits(hidden[wave.drawn], Solo())
        assert found is not None, "a rank alone is the first"
        return found

    def _step(self, number: int, tokens: Sequence[int]) -> SeqStep:
        start = self._ends[number]
        self._ends[number] += len(tokens)
        table = range(number * self._each, (number + 1) * self._each)
        return SeqStep(number, tokens, start, table, Draw(_GREEDY, (), self._ends[number]))


def said(
    runner: TorchRunner,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    given: Sequence[Sequence[int]] | None = None,
) -> tuple[Tensor, list[list[int]]]:
    """Logits [tokens * prompts, vocab] and the tokens after each: the likeliest, or those given."""
    steps, found, taken = Steps(runner, prompts, tokens), list[Tensor](), list[list[int]]()
    following = list(map(list, prompts))
    for number in range(tokens):
        found.append(steps.logits(following))
        best = found[-1].argmax(-1).tolist() if given is None else given[number]
        taken.append(list(best))
        following = [[token] for token in best]
    return torch.cat(found), taken


def compare(
    open_way: Callable[[Way], TorchRunner],
    prompts: Sequence[Sequence[int]],
    told: Callable[[Way], None],
    tokens: int = TOKENS,
) -> list[Accuracy]:
    """Each of WAYS beside float32; one model is in memory at a time."""
    told(EXACT)
    exact, taken = said(open_way(EXACT), prompts, tokens)
    found = list[Accuracy]()
    for way in WAYS:
        told(way)
        found.append(Accuracy.of(way, said(open_way(way), prompts, tokens, taken)[0], exact))
    return found


def accuracy(config: NodeConfig, report: Report, console: Console) -> int:
    """Compare and report; the exit status. Raises PdrtError."""
    report.check()
    path = config.model.path
    spec = ModelSpec.read(path, config.model.max_model_len)
    tokenizer = tokenizers.Tokenizer.from_file(str(Path(path) / "tokenizer.json"))
    torch.set_num_threads(threads_of(config))

    def open_way(way: Way) -> TorchRunner:
        dtype, quantize = way
        return torchrunner.load(
            path,
            Shard(spec),
            device="cpu",
            dtype=dtype,
            block_size=config.scheduler.block_size,
            progress=lambda _stage, _done, _total: None,
            kernels=config.device.kernels,
            quantize=quantize,
        )

    def told(way: Way) -> None:
        if not report.is_quiet:
            Console(stderr=True).print(f"{_name(way)} ..", style="dim")

    prompts = [tokenizer.encode(text).ids for text in PROMPTS]
    found = compare(open_way, prompts, told)
    if not report.is_quiet:
        show(console, found)
    if report.json_file:
        write_points(report.json_file, [asdict(each) for each in found])
    return 0


def show(console: Console, found: Sequence[Accuracy]) -> None:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("against float32", no_wrap=True)
    for title in ("logit error, mean", "max", "KL, nats", "same token"):
        table.add_column(title, justify="right", no_wrap=True)
    for each in found:
        errors = f"{each.mean_error:.4f}", f"{each.max_error:.3f}"
        name = _name((each.dtype, each.quantize))
        table.add_row(name, *errors, f"{each.kl:.2e}", f"{100 * each.equal:.1f} %")
    console.print(table)
    if found:
        console.print(f"{found[0].tokens} tokens after {len(PROMPTS)} prompts", style="dim")


def _name(way: Way) -> str:
    dtype, quantize = way
    return dtype if quantize == "none" else f"{quantize} in {dtype}"
