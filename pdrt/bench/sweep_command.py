"""The command `pdrt bench sweep`: its options, and what they ask of which layouts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console

from pdrt import config
from pdrt.bench.options import ItlLimit, Layouts, PointsFile, QuietSweep, RequestTimeout, TtftLimit
from pdrt.config import NodeConfig
from pdrt.errors import ConfigError
from pdrt.given import with_size

if TYPE_CHECKING:
    from pdrt.bench.sweep_points import Grid
    from pdrt.sim.arrangement import Arrangement

SWEEP: Final = (
    "Examples: `pdrt bench sweep` · `pdrt bench sweep --workers 4 --folder four` ·"
    " `pdrt bench sweep --model null --workers 8 --layouts dp,route8,2P6D`"
)
_MOST_WORKERS: Final = 64
_FEW, _MANY = 16, 1024  # requests: of the usual sweep, and of --full
_NULL: Final = "null"
_DEVICE: Final = {"step_ms": 5.0, "token_ms": 0.2}  # null's, unless told otherwise


def sweep(
    workers: Annotated[
        int, typer.Option(min=2, max=_MOST_WORKERS, help="That each layout has, all equal.")
    ] = 2,
    layouts: Layouts = "all",
    model: Annotated[
        str,
        typer.Option(
            help="A model's directory, llama-100m or tiny (random ones made here), or null: a"
            " device that computes nothing and takes its time."
        ),
    ] = "llama-100m",
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "bfloat16",
    step_ms: Annotated[
        float | None,
        typer.Option(min=0.0, help="Milliseconds of a step of the null device. [default: 5]"),
    ] = None,
    token_ms: Annotated[
        float | None,
        typer.Option(min=0.0, help="And of each prompt token in it. [default: 0.2]"),
    ] = None,
    inputs: Annotated[str, typer.Option(help="Input lengths. [default: 64,128,256,512,1024]")] = "",
    at_output: Annotated[
        int, typer.Option(min=0, show_default="64", help="Output length meanwhile.")
    ] = 0,
    outputs: Annotated[str, typer.Option(help="Output lengths. [default: 16,32,64,128,256]")] = "",
    at_input: Annotated[
        int, typer.Option(min=0, show_default="128", help="Input length meanwhile.")
    ] = 0,
    full: Annotated[
        bool,
        typer.Option(
            "--full",
            help="Published lengths: inputs up to 4096 at output 256, outputs up to 2048 at"
            " input 512, 1,024 requests.",
        ),
    ] = False,
    requests: Annotated[int, typer.Option(min=0, show_default="16", help="Of each point.")] = 0,
    concurrency: Annotated[
        int, typer.Option(min=0, max=4096, help="In flight; 0: all at once.")
    ] = 0,
    rounds: Annotated[
        int, typer.Option(min=1, help="So often each point, pooled: where others use the machine.")
    ] = 1,
    chunk: Annotated[
        int, typer.Option(min=0, show_default="as in serving", help="Prompt tokens of a step.")
    ] = 0,
    ttft_limit: TtftLimit = 2000.0,
    itl_limit: ItlLimit = 100.0,
    timeout: RequestTimeout = 300.0,
    seed: Annotated[int, typer.Option(min=1, help="Of the prompts.")] = 1,
    folder: Annotated[
        str, typer.Option(help="Of the points; those that lie there are kept. [default: sweep-N]")
    ] = "",
    json_file: PointsFile = "",
    quiet: QuietSweep = False,
) -> None:
    """Every layout of N equal workers, over input and output lengths: which one wins where.

    Starts baseline dp, Route 2, Route N, 1P(N-1)D and (N/2)P(N/2)D in turn; four pictures.
    """
    from pdrt.bench.layouts import Ground, Layout
    from pdrt.bench.random_model import NAMED, prepared
    from pdrt.bench.shell import Report
    from pdrt.bench.summary import Limits
    from pdrt.bench.sweep import Asked, Shown
    from pdrt.bench.sweep import sweep as measure
    from pdrt.bench.sweep_points import Amount, Store
    from pdrt.modelspec import ModelSpec
    from pdrt.up.layout import Wanted

    grid = grid_of(inputs, outputs, at_input, at_output, full=full)
    shapes = [Layout(each, chunk) for each in arrangements_of(layouts, workers)]
    device = device_of(model, step_ms, token_ms)
    report = Report(json_file, is_quiet=quiet)
    report.check()
    path = str(prepared(config.cache_dir(), model, NAMED[model])) if model in NAMED else model
    own = {"path": path} if path == _NULL else {"path": path, "dtype": dtype}
    defaults = config.load(NodeConfig, None, options={"model": own})
    wanted = with_size(Wanted(dtype=own.get("dtype", "")), defaults)
    vocab = ModelSpec.read(wanted.model, backend=defaults.model.backend).vocab
    many = requests or (_MANY if full else _FEW)
    amount = Amount(many, concurrency, vocab - 1, seed, rounds)
    limits = Limits(ttft_limit / 1000, itl_limit / 1000)
    asked = Asked(layouts=shapes, grid=grid, amount=amount, limits=limits, timeout_s=timeout)
    cores = sorted(os.sched_getaffinity(0))
    ground = Ground(wanted, defaults, config.process_environ(), cores, device)
    settings = {
        **amount.told(),
        "workers": workers,
        "model": Path(path).name,
        "dtype": own.get("dtype"),
        "chunk": chunk or defaults.scheduler.max_prefill_tokens,
        "limits_ms": limits.json(),
        **device,
    }
    store = Store(Path(folder or f"sweep-{workers}"), settings)
    raise typer.Exit(measure(asked, ground, store, Shown(report, Console(highlight=False))))


def device_of(model: str, step_ms: float | None, token_ms: float | None) -> dict[str, float]:
    """Settings of the null device. Raises ConfigError where another one is used."""
    if model == _NULL:
        given = {"step_ms": step_ms, "token_ms": token_ms}
        return {**_DEVICE, **{name: ms for name, ms in given.items() if ms is not None}}
    for option, ms in (("--step-ms", step_ms), ("--token-ms", token_ms)):
        if ms is not None:
            raise ConfigError(f"{option} is of --model null: leave it out")
    return {}


def arrangements_of(text: str, workers: int) -> Sequence[Arrangement]:
    """Raises ConfigError."""
    from pdrt.sim.arrangement import arrangements, named

    if text == "all":
        return arrangements(workers)
    names = dict.fromkeys(part.strip() for part in text.split(",") if part.strip())
    if not names:
        raise ConfigError("--layouts: want all, or names such as dp,route2,1P1D")
    return [named(name, workers) for name in names]


def grid_of(inputs: str, outputs: str, at_input: int, at_output: int, *, full: bool) -> Grid:
    """Raises ConfigError."""
    from pdrt.bench.sweep_points import PUBLISHED, QUARTER, lengths_of

    usual = PUBLISHED if full else QUARTER
    return replace(
        usual,
        inputs=lengths_of(inputs, "--inputs") if inputs else usual.inputs,
        outputs=lengths_of(outputs, "--outputs") if outputs else usual.outputs,
        at_input=at_input or usual.at_input,
        at_output=at_output or usual.at_output,
    )
