"""Options that several commands have, each written once."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import typer

TtftLimit: TypeAlias = Annotated[
    float, typer.Option(min=0.0, help="Goodput: milliseconds to the first token at most.")
]
ItlLimit: TypeAlias = Annotated[
    float, typer.Option(min=0.0, help="Goodput: milliseconds of 99 % of a request's own gaps.")
]
RequestTimeout: TypeAlias = Annotated[
    float, typer.Option(min=1.0, max=86400.0, help="Seconds that a request may take.")
]
Layouts: TypeAlias = Annotated[
    str, typer.Option(help="all, or some: dp, route2, routeN, xPyD, by commas.")
]
PointsFile: TypeAlias = Annotated[str, typer.Option("--json", help="Write all points here too.")]
QuietSweep: TypeAlias = Annotated[bool, typer.Option("--quiet", help="No progress and no tables.")]
