"""The command `pdrt sim check`: its options, and nothing that takes time to load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

from pdrt.errors import ConfigError

CHECK: Final = (
    "Examples: `pdrt sim check points --cost cpu-2core` · your own machine: `pdrt bench calibrate"
    " --out mine.toml`, `pdrt bench sweep --workers 2 --folder points`, `pdrt sim check points"
    " --cost mine.toml`"
)


def check(
    points: Annotated[Path, typer.Argument(help="The folder of a sweep, or a file of points.")],
    cost: Annotated[str, typer.Option(help="A cost file, or the name of a shipped one.")],
    json_file: Annotated[str, typer.Option("--json", help="Write the comparison here.")] = "",
    quiet: Annotated[bool, typer.Option("--quiet", help="Only the summary, no points.")] = False,
) -> None:
    """Hold the simulator against a measured sweep: every point simulated, and how far it is off.

    Ends with the share of figures within 15 % and whether the best layout is the same.
    """
    from pdrt import telemetry
    from pdrt.sim.check import compare
    from pdrt.sim.check_words import json_of, lines, table
    from pdrt.sim.cost import load
    from pdrt.sim.measured import read_points

    if json_file and not Path(json_file).resolve().parent.is_dir():
        raise ConfigError(f"--json {json_file}: there is no directory {Path(json_file).parent}")
    telemetry.configure("error")
    console, err = Console(highlight=False), Console(stderr=True, highlight=False)
    measured = read_points(points)
    with err.status("simulating") as status:
        found = compare(load(cost), measured, status.update)
    if not quiet:
        console.print(table(found))
    for line in lines(found):
        console.print(line, soft_wrap=True, markup=False)
    if json_file:
        Path(json_file).write_text(json.dumps(json_of(found), indent=1), encoding="utf-8")
