"""The command `pdrt conformance`: options become what is asked."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Final

import typer
from rich.console import Console

from pdrt.errors import ConfigError

EXAMPLES: Final = (
    "Examples: `pdrt conformance --url http://127.0.0.1:8000` ·"
    " `pdrt conformance --url hybrid=http://10.0.0.1:8200 --url pd=http://10.0.0.2:8000`"
)
_URL: Final = re.compile(r"(?:(?P<name>[\w.+-]{1,40})=)?(?P<base>https?://[^\s=]+)")


def conformance(
    url: Annotated[
        list[str] | None,
        typer.Option(
            help="An OpenAI-compatible server, URL or NAME=URL; the answers of several are compared"
            " with the first one's. [default: http://127.0.0.1:8000]"
        ),
    ] = None,
    api_key: Annotated[
        str,
        typer.Option(envvar="PDRT_API_KEY", show_default=False, help="If the servers want one."),
    ] = "",
    model: Annotated[str, typer.Option(help="Empty: the first that each server names.")] = "",
    only: Annotated[str, typer.Option(help="Checks with one of these words, by commas.")] = "",
    timeout: Annotated[
        float, typer.Option(min=1.0, max=3600.0, help="Seconds that a check may take.")
    ] = 120.0,
    json_file: Annotated[str, typer.Option("--json", help="Write the results here.")] = "",
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress and no table.")] = False,
) -> None:
    """Check servers through the official OpenAI client, and that they answer alike.

    Exit status 1 when a check failed; what a server does not offer is told, and no failure.
    """
    from pdrt.conformance.shell import Asked
    from pdrt.conformance.shell import conformance as check

    asked = Asked(
        urls=named(url or ["http://127.0.0.1:8000"]),
        model=model,
        api_key=api_key,
        only=only,
        timeout_s=timeout,
        json_file=json_file,
        is_quiet=quiet,
    )
    raise typer.Exit(check(asked, Console(highlight=False)))


def named(urls: Sequence[str]) -> list[tuple[str, str]]:
    """Names and addresses without /v1. Raises ConfigError."""
    found = list[tuple[str, str]]()
    for text in urls:
        match = _URL.fullmatch(text)
        if not match:
            raise ConfigError(f"--url {text!r}: want http://HOST:PORT or NAME=http://HOST:PORT")
        base = match["base"].rstrip("/").removesuffix("/v1").rstrip("/")
        found.append((match["name"] or base.partition("://")[2], base))
    if len({name for name, _ in found}) < len(found):
        raise ConfigError("--url: two servers have the same name: give NAME=URL")
    return found
