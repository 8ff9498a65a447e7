"""`pdrt bench engine`: how near decode and prefill on one device come to the machine's limit.

The runner that workers use, in this process, without scheduler and server: the batches that they
would plan, over blocks scattered in the pool. In each round the machine's rates are taken first,
then every case has its turn; a share is the median of the rounds' own shares.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final, Literal, Protocol, TypeAlias

from rich import box
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table

from pdrt.bench.facts import machine_facts
from pdrt.bench.limits import Clock, Probe, Rates, Work
from pdrt.bench.shell import Report, write_points
from pdrt.config import NodeConfig
from pdrt.device.backends import open_runner
from pdrt.device.batch import Draw, Runner, SeqStep
from pdrt.device.cores import threads_of
from pdrt.device.kv import DTYPES
from pdrt.errors import ConfigError
from pdrt.messages import Sampling
from pdrt.modelspec import ModelSpec

Kind: TypeAlias = Literal["decode", "prefill"]
PROMPT: Final = 128  # tokens of each sequence before it is decoded
_GREEDY: Final = Sampling(max_tokens=1, temperature=0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Case:
    """A decode step of `rows` sequences, which yields as many tokens, or a prompt of `rows`."""

    kind: Kind
    rows: int

    def __str__(self) -> str:
        return f"decode x{self.rows}" if self.kind == "decode" else f"prefill {self.rows}"

    def held(self, steps: int) -> int:
        """Tokens in the pool."""
        return self.rows if self.kind == "prefill" else self.rows * (PROMPT + steps)

    def limit_s(self, work: Work, rates: Rates, steps: int) -> float:
        if self.kind == "prefill":
            return rates.prefill_s(work, self.rows)
        return rates.decode_s(work, self.rows, PROMPT + steps // 2)


CASES: Final = (
    Case("decode", 1),
    Case("decode", 8),
    Case("decode", 32),
    Case("prefill", 512),
    Case("prefill", 2048),
)


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured: cases, turns of each, decode steps in a turn."""

    cases: tuple[Case, ...] = CASES
    rounds: int = 9
    steps: int = 32


QUICK: Final = Effort(rounds=3, steps=8)


class Engine(Protocol):
    """What can be measured: the runner, or a peer."""

    @property
    def name(self) -> str: ...

    def seconds(self, case: Case, steps: int) -> float:
        """Of one decode step, as is usual among `steps`, or of the prompt."""
        ...


@dataclass(slots=True)
class Series:
    """What the rounds found for a case: seconds, and the machine's rates then."""

    engine: str
    dtype: str
    case: Case
    seconds: list[float] = field(default_factory=list)
    limits: list[float] = field(default_factory=list)

    @property
    def per_s(self) -> float:
        return self.case.rows / statistics.median(self.seconds)

    @property
    def limit_per_s(self) -> float:
        return self.case.rows / statistics.median(self.limits)

    @property
    def share(self) -> float:
        """Of the limit: the median of the rounds' shares."""
        pairs = zip(self.limits, self.seconds, strict=True)
        return statistics.median(limit / seconds for limit, seconds in pairs)


class Ours:
    """The runner over a pool of its own, in which blocks of a sequence are scattered."""

    name = "pdrt"

    def __init__(self, runner: Runner, vocab: int, chunk: int, most: int, clock: Clock) -> None:
        """`most` tokens may be held at once; prompts are computed in chunks, as in serving."""
        self._runner, self._chunk, self._clock = runner, chunk, clock
        self._size = runner.layout.block_size
        blocks = 2 * -(-most // self._size)  # enough where no sequence fills its last block
        self._memory = bytearray(blocks * runner.layout.block_bytes)
        runner.bind(memoryview(self._memory), blocks)
        random = Random(3)
        self._blocks = random.sample(range(blocks), blocks)
        self._tokens = [random.randrange(vocab) for _ in range(most)]

    def seconds(self, case: Case, steps: int) -> float:
        if case.kind == "prefill":
            return self._timed(*self._prompt(0, case.rows, case.rows))
        room, keys = PROMPT + steps, range(case.rows)
        for key in keys:
            self._timed(*self._prompt(key, PROMPT, room))
        return statistics.median(
            self._timed([self._step(key, at, at + 1, room) for key in keys])
            for at in range(PROMPT, room)
        )

    def _timed(self, *batches: list[SeqStep]) -> float:
        began = self._clock()
        for batch in batches:
            self._runner.execute(batch)
        return self._clock() - began

    def _prompt(self, key: int, tokens: int, room: int) -> Iterator[list[SeqStep]]:
        for start in range(0, tokens, self._chunk):
            yield [self._step(key, start, min(start + self._chunk, tokens), room)]

    def _step(self, key: int, start: int, end: int, room: int) -> SeqStep:
        each = -(-room // self._size)
        table = self._blocks[key * each : (key + 1) * each]
        return SeqStep(key, self._tokens[start:end], start, table, Draw(_GREEDY, (), end))


def measure(
    engines: Sequence[Engine],
    probe: Callable[[], Rates],
    work: Work,
    dtype: str,
    effort: Effort,
    told: Callable[[Case], None],
) -> list[Series]:
    """Rounds in which each case, on each engine, has its turn; a first one warms up."""
    found = [Series(e.name, dtype, case) for case in effort.cases for e in engines]
    named = {engine.name: engine for engine in engines}
    for number in range(effort.rounds + 1):
        for series in found:
            rates = probe()
            seconds = named[series.engine].seconds(series.case, effort.steps)
            told(series.case)
            if number:
                series.seconds.append(seconds)
                series.limits.append(series.case.limit_s(work, rates, effort.steps))
    return found


@dataclass(frozen=True, slots=True)
class Asked:
    """What is measured: a model in some dtypes, alone or beside transformers."""

    config: NodeConfig
    dtypes: tuple[str, ...]
    effort: Effort
    peer: bool = False


def engine(asked: Asked, report: Report, console: Console) -> int:
    """Measure and report; the exit status. Raises PdrtError."""
    report.check()
    found = list[Series]()
    turns = len(asked.effort.cases) * (asked.effort.rounds + 1) * (2 if asked.peer else 1)
    bar = Progress(console=Console(stderr=True), auto_refresh=False, disable=report.is_quiet)
    with bar:
        for dtype in asked.dtypes:
            task = bar.add_task(f"{dtype}: loading", total=turns)

            def told(case: Case, dtype: str = dtype, task: TaskID = task) -> None:
                bar.update(task, advance=1, description=f"{dtype}: {case!s:<12}", refresh=True)

            found += measured(asked, dtype, told)
    if not report.is_quiet:
        show(console, found, threads_of(asked.config))
    if report.json_file:
        write_points(report.json_file, points(found))
    return 0


def dtypes_of(text: str) -> tuple[str, ...]:
    """A list of dtypes. Raises ConfigError."""
    found = tuple(filter(None, (part.strip() for part in text.split(","))))
    if not found or set(found) - {"float32", "bfloat16"}:
        raise ConfigError(f"--dtype {text!r}: want float32, bfloat16 or both, as a list")
    return found


def measured(asked: Asked, dtype: str, told: Callable[[Case], None]) -> list[Series]:
    """Load the model in one dtype, on each engine, and measure. Raises PdrtError."""
    model = asked.config.model.model_copy(update={"dtype": dtype})
    config, effort = asked.config.model_copy(update={"model": model}), asked.effort
    spec = ModelSpec.read(model.path, model.max_model_len)
    work = Work.of(spec, DTYPES[dtype], model.quantize)
    runner = open_runner(config, lambda _stage, _done, _total: None)
    most = max(case.held(effort.steps) for case in effort.cases)
    chunk = config.scheduler.max_prefill_tokens
    engines = list[Engine]([Ours(runner, spec.vocab, chunk, most, time.perf_counter)])
    if asked.peer:
        from pdrt.bench.transformers_peer import Transformers

        engines.append(Transformers(model.path, DTYPES[dtype], time.perf_counter))
    name = dtype if model.quantize == "none" else f"{dtype} {model.quantize}"
    return measure(engines, Probe(work, DTYPES[dtype]), work, name, effort, told)


def show(console: Console, found: Sequence[Series], threads: int) -> None:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for title in ("dtype", "engine", "case"):
        table.add_column(title, no_wrap=True)
    for title in ("ms", "tokens/s", "limit", "share of it"):
        table.add_column(title, justify="right", no_wrap=True)
    for series in found:
        ms = statistics.median(series.seconds) * 1000
        figures = f"{ms:.1f}", f"{series.per_s:.0f}", f"{series.limit_per_s:.0f}"
        table.add_row(
            series.dtype, series.engine, str(series.case), *figures, f"{series.share:.2f}"
        )
    console.print(table)
    facts = "; ".join(f"{name} {value}" for name, value in machine_facts().items())
    console.print(f"threads {threads}; {facts}", style="dim", soft_wrap=True)


def points(found: Sequence[Series]) -> list[dict[str, object]]:
    """For `--json`."""
    facts = machine_facts()
    return [
        {
            "engine": series.engine,
            "dtype": series.dtype,
            "kind": series.case.kind,
            "rows": series.case.rows,
            "tokens_per_s": series.per_s,
            "limit_tokens_per_s": series.limit_per_s,
            "share": series.share,
            "seconds": series.seconds,
            "limit_seconds": series.limits,
            "machine": facts,
        }
        for series in found
    ]
