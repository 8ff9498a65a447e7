"""The command `pdrt plan`: its options, and nothing that takes time to load."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from pdrt.errors import ConfigError

if TYPE_CHECKING:
    from pdrt.sim.cost import Cost
    from pdrt.sim.plan import Candidate, Plan, Wanted

PLAN: Final = (
    "Examples: `pdrt plan --input-len 4096 --output-len 256 --rate 4 --ttft 2000 --itl 50"
    " --workers 4` · `pdrt plan --cost mine.toml --input-len lognormal:800:0.8 --output-len 64..256"
    " --rate 2 --workers 8 --plot plan.png` · a cost file of your own machine: `pdrt bench"
    " calibrate --out mine.toml`"
)
_COLUMNS: Final = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
_SLOWEST: Final = 0.001  # requests a second
_USUAL: Final = "efa-deepseek-v2-lite"


def plan(
    input_len: Annotated[
        str, typer.Option(help="Tokens of prompts: 512, 256..1024 or lognormal:MEAN:SIGMA[:MOST].")
    ],
    output_len: Annotated[str, typer.Option(help="Tokens of answers, in the same way.")],
    rate: Annotated[
        float, typer.Option(help="Requests a second, by chance (Poisson); inf: all at once.")
    ],
    workers: Annotated[int, typer.Option(help="Equal devices to arrange, or groups of them.")],
    ttft: Annotated[
        float, typer.Option(min=0.0, help="Milliseconds to the first token at most.")
    ] = 2000.0,
    itl: Annotated[
        float, typer.Option(min=0.0, help="Milliseconds between tokens: 99 % of gaps at most.")
    ] = 100.0,
    cost: Annotated[str, typer.Option(help="A cost file, or the name of a shipped one.")] = _USUAL,
    chunk: Annotated[str, typer.Option(help="Chunk sizes to try. [default: usual ones]")] = "",
    burstiness: Annotated[
        float,
        typer.Option(
            min=0.01, max=1000.0, help="1: Poisson; below, requests come in bursts (gamma)."
        ),
    ] = 1.0,
    requests: Annotated[
        int, typer.Option(min=1, max=100_000, help="To simulate for each candidate.")
    ] = 400,
    seed: Annotated[int, typer.Option(min=0, help="Of lengths and arrivals.")] = 1,
    plot: Annotated[str, typer.Option(help="Draw goodput over the ratio here.")] = "",
    json_file: Annotated[str, typer.Option("--json", help="Write what was found here.")] = "",
    quiet: Annotated[
        bool, typer.Option("--quiet", help="No progress and no table: the verdict alone.")
    ] = False,
) -> None:
    """Whether to disaggregate, and in which ratio: every arrangement is tried in the simulator.

    Prints the best by goodput (requests within the limits a second), the runner-up, the plain
    alternative of hybrid instances behind a router, and why.
    """
    from pdrt import telemetry
    from pdrt.sim.cost import load
    from pdrt.sim.plan import Wanted
    from pdrt.sim.plan_plot import check_plot
    from pdrt.sim.tally import Good
    from pdrt.sim.workload import Arrivals

    telemetry.configure("error")
    if plot:
        check_plot(plot)
    if json_file and not Path(json_file).resolve().parent.is_dir():
        raise ConfigError(f"--json {json_file}: there is no directory {Path(json_file).parent}")
    if json_file and Path(json_file).is_dir():
        raise ConfigError(f"--json {json_file} is a directory")
    if not rate >= _SLOWEST:
        raise ConfigError(f"--rate {rate:g}: want {_SLOWEST:g} or more, or inf for all at once")
    wanted = Wanted(
        input=input_len,
        output=output_len,
        arrivals=Arrivals(math.inf if math.isinf(rate) else rate, burstiness),
        good=Good(ttft / 1e3, itl / 1e3),
        workers=workers,
        requests=requests,
        seed=seed,
        chunks=_chunks(chunk),
    )
    found = _searched(load(cost), wanted, is_quiet=quiet)
    _report(found, json_file, plot, Console(highlight=False), is_quiet=quiet)


def _searched(cost: Cost, wanted: Wanted, *, is_quiet: bool) -> Plan:
    from pdrt.sim.plan import Search, candidates

    err = Console(stderr=True, highlight=False)
    with Progress(*_COLUMNS, console=err, transient=True, disable=is_quiet) as bar:
        total = len(candidates(cost, wanted.workers, wanted.chunks))
        task = bar.add_task("", total=total)

        def told(candidate: Candidate) -> None:
            bar.update(task, advance=1, description=f"{candidate!s:<36}")

        return Search(cost, wanted, told).plan()


def _report(found: Plan, json_file: str, plot: str, console: Console, *, is_quiet: bool) -> None:
    from pdrt.sim.plan_plot import draw
    from pdrt.sim.plan_words import json_of, table, verdict

    if not is_quiet:
        console.print(table(found))
    for line in verdict(found):
        console.print(line, soft_wrap=True)
    if json_file:
        Path(json_file).write_text(json.dumps(json_of(found), indent=1), encoding="utf-8")
    if plot:
        draw(found, plot)


def _chunks(text: str) -> list[int]:
    """Raises ConfigError."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdecimal() and 1 <= int(part) <= 1_000_000 for part in parts):
        raise ConfigError(f"--chunk {text!r}: want tokens such as 256, or 128,512")
    return sorted({int(part) for part in parts})
