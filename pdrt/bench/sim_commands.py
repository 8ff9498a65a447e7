"""The commands of `pdrt sim`: a cluster on a virtual clock; each imports what it runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pdrt.bench.options import ItlLimit, Layouts, PointsFile, QuietSweep, TtftLimit
from pdrt.sim.check_command import CHECK, check

sim = typer.Typer(
    help="A cluster on a virtual clock: real policies and schedulers, modelled times.",
    no_args_is_help=True,
    epilog="Example: `pdrt sim sweep --workers 4`",
)
sim.command("check", epilog=CHECK)(check)


@sim.command(
    "sweep",
    epilog="Examples: `pdrt sim sweep` · `pdrt sim sweep --workers 8 --layouts route8,1P7D,2P6D` ·"
    " `pdrt sim sweep --cost mine.toml --inputs 512,4096 --outputs 512,1024 --rate 20` ·"
    " `pdrt sim sweep --chunk 512 --folder small-chunks --json points.json`",
)
def sweep(
    cost: Annotated[
        str, typer.Option(help="A cost file, or the name of one that comes with pdrt.")
    ] = "efa-deepseek-v2-lite",
    workers: Annotated[
        int, typer.Option(min=2, max=1024, help="That each layout has, all equal.")
    ] = 4,
    layouts: Layouts = "all",
    inputs: Annotated[
        str, typer.Option(help="Input lengths. [default: 128,256 ... 4096]", show_default=False)
    ] = "",
    at_output: Annotated[int, typer.Option(min=1, help="Output length meanwhile.")] = 256,
    outputs: Annotated[
        str, typer.Option(help="Output lengths. [default: 64,128 ... 2048]", show_default=False)
    ] = "",
    at_input: Annotated[int, typer.Option(min=1, help="Input length meanwhile.")] = 512,
    requests: Annotated[int, typer.Option(min=1, max=1_000_000, help="Of each point.")] = 1024,
    rate: Annotated[
        float | None,
        typer.Option(min=0.001, help="Requests a second, Poisson. [default: all at once]"),
    ] = None,
    concurrency: Annotated[
        int, typer.Option(min=0, help="In flight instead, the next when one ends; 0: as --rate.")
    ] = 0,
    chunk: Annotated[
        int, typer.Option(min=0, show_default="the cost file's", help="Prompt tokens of a step.")
    ] = 0,
    ttft_limit: TtftLimit = 2000.0,
    itl_limit: ItlLimit = 100.0,
    seed: Annotated[int, typer.Option(min=1, help="Of lengths and arrivals.")] = 1,
    folder: Annotated[
        str,
        typer.Option(
            "--folder",
            "--out",
            help="Of the points; those that lie there are kept. [default: sim-COST-WORKERS]",
            show_default=False,
        ),
    ] = "",
    json_file: PointsFile = "",
    quiet: QuietSweep = False,
) -> None:
    """Every layout of N equal workers, over input and output lengths, in the simulator.

    The same points, tables and pictures as `pdrt bench sweep`, of machines that you need not have.
    """
    from pdrt import telemetry
    from pdrt.bench.shell import Report
    from pdrt.bench.sim_sweep import Asked
    from pdrt.bench.sim_sweep import sweep as simulate_all
    from pdrt.bench.sweep import Shown
    from pdrt.bench.sweep_command import arrangements_of, grid_of
    from pdrt.bench.sweep_points import Store
    from pdrt.sim.cost import load
    from pdrt.sim.run import changed
    from pdrt.sim.tally import Good
    from pdrt.sim.workload import Arrivals

    telemetry.configure("error")
    report = Report(json_file, is_quiet=quiet)
    report.check()
    machine = load(cost)
    asked = Asked(
        cost=changed(machine, max_prefill_tokens=chunk) if chunk else machine,
        layouts=arrangements_of(layouts, workers),
        grid=grid_of(inputs, outputs, at_input, at_output, full=True),
        requests=requests,
        arrivals=Arrivals(rate or float("inf"), concurrency=concurrency),
        seed=seed,
        good=Good(ttft_limit / 1e3, itl_limit / 1e3),
    )
    named = re.sub(r"[^\w-]+", "-", machine.name).strip("-")  # whatever a file is called
    place = Path(folder or f"sim-{named}-{workers}")
    store = Store(place, asked.settings(workers))
    raise typer.Exit(simulate_all(asked, store, Shown(report, Console(highlight=False))))
