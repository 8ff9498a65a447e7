"""The command `pdrt top`: its options, and nothing that takes time to load."""

from __future__ import annotations

from typing import Annotated, Final

import typer
from rich.console import Console

TOP: Final = (
    "Examples: `pdrt top` · `pdrt top --url http://10.0.0.1:8000` ·"
    " `pdrt top --json | jq .instances`"
)


def top(
    url: Annotated[str, typer.Option(help="The router.")] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str,
        typer.Option(envvar="PDRT_API_KEY", show_default=False, help="If the router wants one."),
    ] = "",
    once: Annotated[
        bool, typer.Option("--once", help="Print it once and end, as into a pipe.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the router's overview once, as it is.")
    ] = False,
) -> None:
    """Watch a cluster: instances, KV, rates, running requests and the last errors.

    The router shows the same at `/` in a browser. `q` or Ctrl-C ends.
    """
    from pdrt.top.shell import Asked, watch

    asked = Asked(url=url, api_key=api_key, once=once, as_json=as_json)
    raise typer.Exit(watch(asked, Console(highlight=False)))
