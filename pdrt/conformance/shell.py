"""`pdrt conformance`: every check against every endpoint, a table, and an exit status."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Final, TypeAlias

import aiohttp
import uvloop
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from pdrt import telemetry
from pdrt.conformance.check import Check, Failed, NotServed, Result, Verdict, compared
from pdrt.conformance.endpoint import Endpoint, opened
from pdrt.errors import ConfigError

Step: TypeAlias = Callable[[str], None]
_COLUMNS: Final = (
    TextColumn("{task.description}"),
    BarColumn(),
    MofNCompleteColumn(),
    TimeElapsedColumn(),
)
_STYLES: Final[dict[Verdict, str]] = {
    "pass": "green",
    "FAIL": "bold red",
    "not supported": "yellow",
    "not compared": "dim",
}
_NO: Final = (400, 404, 405, 422, 501)
_SAYS_NO: Final = re.compile(
    r"not supported|unsupported|not implemented|not a known field|not permitted|unrecognized", re.I
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    urls: Sequence[tuple[str, str]]  # name and address, without /v1
    model: str = ""
    api_key: str = ""
    only: str = ""
    timeout_s: float = 120.0
    json_file: str = ""
    is_quiet: bool = False


def all_checks() -> list[Check]:
    """Raises ConfigError where the official client is not installed."""
    try:
        from pdrt.conformance import chats, completions, service, tools
    except ImportError as error:
        install = "pip install 'pdrt[conformance]'"
        raise ConfigError(f"the official client is not installed ({error}): {install}") from None
    groups = (completions.checks(), chats.checks(), tools.checks(), service.checks())
    return [check for group in groups for check in group]


def chosen(only: str) -> list[Check]:
    """Raises ConfigError when no check has one of these words."""
    words = [word.strip() for word in only.split(",") if word.strip()]
    found = [
        check
        for check in all_checks()
        if not words or any(word in f"{check.group}: {check.name}" for word in words)
    ]
    if not found:
        raise ConfigError(f"--only {only!r}: no check has that in its name")
    return found


def conformance(asked: Asked, console: Console) -> int:
    """Check all and report; the exit status is 1 when a check failed. Raises PdrtError."""
    checks = chosen(asked.only)
    if asked.json_file:
        with contextlib.suppress(FileExistsError), open(asked.json_file, "x", encoding="utf-8"):
            pass
    with _progress(asked.is_quiet, len(checks) * len(asked.urls)) as step:
        telemetry.configure("warning")
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            rows = runner.run(checked(asked, checks, step))
    rows += compared(checks, rows)
    if not asked.is_quiet:
        show(console, [name for name, _ in asked.urls], rows)
    if asked.json_file:
        _write(asked.json_file, rows)
    return 1 if any(result.verdict == "FAIL" for row in rows for result in row) else 0


async def checked(asked: Asked, checks: Sequence[Check], step: Step) -> list[list[Result]]:
    """A row for each check, a result in it for each endpoint. Raises PdrtError."""
    async with AsyncExitStack() as stack:
        endpoints = [
            await stack.enter_async_context(
                opened(name, base, asked.model, asked.api_key, asked.timeout_s)
            )
            for name, base in asked.urls
        ]
        rows = list[list[Result]]()
        for check in checks:
            row = list[Result]()
            for endpoint in endpoints:
                step(f"{endpoint.name}: {check.name}")
                row.append(await tried(check, endpoint, asked.timeout_s))
            rows.append(row)
        return rows


async def tried(check: Check, endpoint: Endpoint, timeout_s: float) -> Result:
    """One check, however it ends."""
    told: object = None
    verdict: Verdict = "pass"
    why = ""
    try:
        async with asyncio.timeout(timeout_s):
            told = await check.run(endpoint)
    except NotServed as reason:
        verdict, why = "not supported", str(reason)
    except TimeoutError:
        verdict, why = "FAIL", f"expected an answer within {timeout_s:g} s, got none"
    except Exception as error:  # noqa: BLE001 - whatever a server says, the next check goes on
        verdict, why = judged(error)
    return Result(check.name, check.group, endpoint.name, verdict, why, told)


def judged(error: Exception) -> tuple[Verdict, str]:
    """What an exception says of the server. Raises it when it says something of us."""
    import openai

    match error:
        case Failed():
            return "FAIL", str(error)
        case openai.APIStatusError():
            words = f"{error.status_code}: {error.message[:200]}"
            if error.status_code in _NO and _SAYS_NO.search(words):
                return "not supported", words
            return "FAIL", f"expected an answer, got {words}"
        case openai.APIError() | aiohttp.ClientError() | OSError():
            return "FAIL", f"expected an answer, got {type(error).__name__}: {error}"
        case ValueError() | LookupError() | TypeError() | AttributeError():
            words = f"{type(error).__name__}: {error}"
            return "FAIL", f"expected OpenAI's schema, got what cannot be read so ({words})"
        case _:
            raise error


# For a person.


@contextmanager
def _progress(is_quiet: bool, total: int) -> Iterator[Step]:
    console = Console(stderr=True, highlight=False)
    with Progress(*_COLUMNS, console=console, disable=is_quiet) as bar:
        task, done = bar.add_task("opening", total=total), -1

        def step(text: str) -> None:
            nonlocal done
            done += 1
            bar.update(task, description=text, completed=done)

        yield step
        bar.update(task, description="checked", completed=total)


def show(console: Console, names: Sequence[str], rows: Sequence[Sequence[Result]]) -> None:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for title in ("", "check", *names):
        table.add_column(title, no_wrap=title in names)
    group = ""
    for row in rows:
        by_name = {result.endpoint: result for result in row}
        cells = [_cell(by_name.get(name)) for name in names]
        first = row[0]
        table.add_row(first.group if first.group != group else "", first.check, *cells)
        group = first.group
    console.print(table)
    for row in rows:
        for result in row:
            if result.why:
                line = f"{result.endpoint}: {result.check}: {result.verdict}: {result.why}"
                style = _STYLES[result.verdict]
                console.print(line, style=style, markup=False, soft_wrap=True)
    for name in names:
        mine = [result.verdict for row in rows for result in row if result.endpoint == name]
        told = ", ".join(f"{mine.count(v)} {v}" for v in _STYLES if v in mine)
        console.print(f"{name}: {told}")


def _cell(result: Result | None) -> str:
    return f"[{_STYLES[result.verdict]}]{result.verdict}[/]" if result else ""


def _write(file: str, rows: Sequence[Sequence[Result]]) -> None:
    points = [
        {key: value for key, value in asdict(result).items() if key != "told"}
        for row in rows
        for result in row
    ]
    with open(file, "w", encoding="utf-8") as out:
        json.dump(points, out, indent=1)
