"""Asks a router once a second and draws what it says, until the person has seen enough."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import termios
import tty
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from aiohttp import ClientError, ClientSession, ClientSSLError, ClientTimeout
from rich.console import Console
from rich.live import Live

from pdrt.control.http import error_from_answer, reason_at_first, tls_reason
from pdrt.errors import BadMessage, NotFound, PdrtError, Unauthorized, Unavailable
from pdrt.top.frame import ALL, frame, room_for
from pdrt.top.view import View, read_view
from pdrt.top.words import span

_EVERY_S: Final = 1.0
_SLOWEST_S: Final = 8.0  # between two looks while nobody answers
_ASK_S: Final = 5.0
_MOST_BYTES: Final = 16 << 20
_PIPE_WIDTH: Final = 160  # of what is no terminal


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the person wants to see, and of whom."""

    url: str
    api_key: str = field(default="", repr=False)
    once: bool = False
    as_json: bool = False

    @property
    def base(self) -> str:
        url = self.url if "://" in self.url else f"http://{self.url}"
        return url.rstrip("/").removesuffix("/v1")

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}


async def ask(session: ClientSession, base: str) -> Any:
    """The overview as it came. Raises PdrtError that says what to do."""
    try:
        async with session.get(f"{base}/overview", allow_redirects=False) as answer:
            body = await answer.content.read(_MOST_BYTES)
            status = answer.status
    except ClientSSLError as error:
        raise Unavailable(f"{base}: {tls_reason(error)}") from error
    except (ClientError, TimeoutError, OSError) as error:
        is_late = isinstance(error, TimeoutError)
        why = f"silent for {_ASK_S:g} s" if is_late else reason_at_first(error)
        advice = "is `pdrt up` running? --url names another address"
        raise Unavailable(f"no router answers at {base} ({why}): {advice}") from error
    if status == 401:
        raise Unauthorized(f"the router at {base} wants an API key: --api-key KEY, or PDRT_API_KEY")
    if status == 404:
        raise NotFound(f"{base} has no /overview: it is no pdrt router, or an older one")
    if status != 200:
        raise error_from_answer(status, body, base)
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadMessage(f"{base}/overview is no JSON: is it a pdrt router?") from error


def watch(asked: Asked, console: Console) -> int:
    """The exit status. Raises PdrtError when the first look shows nothing."""
    with asyncio.Runner() as runner:
        return runner.run(_shown(asked, console))


async def _shown(asked: Asked, console: Console) -> int:
    timeout = ClientTimeout(total=_ASK_S, sock_connect=_ASK_S)
    async with ClientSession(headers=asked.headers, timeout=timeout) as session:
        body = await ask(session, asked.base)
        if asked.as_json:
            console.out(json.dumps(body, indent=2), highlight=False)
            return 0
        view = read_view(body)
        if asked.once or not console.is_terminal:
            _print(view, asked.base, console)
            return 0
        await _watch(session, asked.base, view, console)
    return 0


def _print(view: View, url: str, console: Console) -> None:
    """All of it, for a person who scrolls or a script that searches."""
    if not console.is_terminal:
        console.width = max(console.width, _PIPE_WIDTH)
    console.print(frame(view, url, ALL))


async def _watch(session: ClientSession, url: str, view: View, console: Console) -> None:
    over, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, over.set)
    heard_at, misses, trouble = loop.time(), 0, ""
    with _keys(over), Live(console=console, screen=True, auto_refresh=False) as live:
        while not over.is_set():
            room = room_for(view, *console.size)
            live.update(frame(view, url, room, trouble), refresh=True)
            if await _is_over(over, min(_EVERY_S * 2 ** min(misses, 3), _SLOWEST_S)):
                return
            try:
                view = read_view(await ask(session, url))
                heard_at, misses, trouble = loop.time(), 0, ""
            except PdrtError as error:
                misses += 1
                trouble = f"this is {span(loop.time() - heard_at)} old: {error}"


async def _is_over(over: asyncio.Event, within_s: float) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            await over.wait()
    return over.is_set()


@contextlib.contextmanager
def _keys(over: asyncio.Event) -> Iterator[None]:
    """`q` ends, without Enter; the terminal is as before on the way out."""
    if not sys.stdin.isatty():
        yield
        return
    keys, loop = sys.stdin.fileno(), asyncio.get_running_loop()

    def pressed() -> None:
        said = os.read(keys, 64)
        if not said:  # the terminal is gone
            loop.remove_reader(keys)
        if not said or said[:1] in (b"q", b"Q", b"\x03"):
            over.set()

    before = termios.tcgetattr(keys)
    tty.setcbreak(keys)
    loop.add_reader(keys, pressed)
    try:
        yield
    finally:
        loop.remove_reader(keys)
        termios.tcsetattr(keys, termios.TCSADRAIN, before)
