"""`pdrt chat`: talk to any OpenAI-compatible server from the terminal, token by token.

One turn is one request on a connection of its own, so Ctrl-C in the middle of an answer closes
it and thereby ends the work behind it. Works with questions on a pipe too, one a line.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, TextIO, TypeAlias

from aiohttp import ClientError, ClientSession, ClientSSLError, ClientTimeout
from rich.console import Console

from pdrt.control.http import error_from_answer, reason_at_first, reason_of, tls_reason
from pdrt.errors import PdrtError, Unauthorized, Unavailable

_HELP: Final = "/new forgets the conversation, /quit (or Ctrl-D) ends, Ctrl-C stops an answer"
_AGAIN: Final = "Ctrl-C again ends, and so does Ctrl-D"
_CONNECT_S: Final = 5.0
Message: TypeAlias = dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """How the answers are asked for."""

    url: str  # with or without /v1
    model: str = ""  # empty: the first that the server names
    system: str = ""
    max_tokens: int = 512
    temperature: float = 0.1
    api_key: str = field(default="", repr=False)

    @property
    def base(self) -> str:
        url = self.url if "://" in self.url else f"http://{self.url}"
        return url.rstrip("/").removesuffix("/v1") + "/v1"

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}


@dataclass(slots=True)
class Told:
    """What is known of an answer when it has ended."""

    text: str = ""
    pieces: int = 0
    tokens: int = 0
    first_s: float = 0.0
    total_s: float = 0.0
    path: str = ""

    def summary(self) -> str:
        tokens = self.tokens or self.pieces
        after_first = max(self.total_s - self.first_s, 1e-9)
        rate = f", {(tokens - 1) / after_first:.0f} tokens/s" if tokens > 1 else ""
        path = f", {self.path}" if self.path else ""
        return f"{tokens} tokens, first after {self.first_s * 1000:.0f} ms{rate}{path}"


async def data_lines(chunks: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """The `data:` of server-sent events, however the bytes were cut, up to [DONE].

    What comes after it is read and dropped: who hangs up before the end has left, for the server.
    """
    rest, is_done = b"", False
    async for chunk in chunks:
        if is_done:
            continue
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                text = line[5:].strip().decode(errors="replace")
                if text == "[DONE]":
                    is_done = True
                    break
                yield text


async def ask(
    session: ClientSession, manner: Manner, model: str, messages: list[Message], told: Told
) -> AsyncIterator[str]:
    """The answer's text as it comes; `told` gains the rest. Raises PdrtError."""
    body = {
        "model": model,
        "messages": messages,
        "max_tokens": manner.max_tokens,
        "temperature": manner.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began = time.perf_counter()
    try:
        async with session.post(f"{manner.base}/chat/completions", json=body) as answer:
            if answer.status != 200:
                raise error_from_answer(answer.status, await answer.read(), manner.base)
            told.path = answer.headers.get("x-pd-path", "")
            async for data in data_lines(answer.content.iter_any()):
                if piece := _piece(data, told):
                    told.first_s = told.first_s or time.perf_counter() - began
                    told.text += piece
                    told.pieces += 1
                    yield piece
    except (ClientError, TimeoutError, OSError) as error:
        raise Unavailable(f"{manner.base}: {reason_of(error)}") from error
    finally:
        told.total_s = time.perf_counter() - began


def _piece(data: str, told: Told) -> str:
    """The new text in one event; errors in the middle of a stream are raised."""
    try:
        event: dict[str, Any] = json.loads(data)
    except ValueError as error:
        raise Unavailable(f"the server sent what is no JSON: {data[:100]}") from error
    if "error" in event:
        raise error_from_answer(500, data.encode(), "stream")
    if usage := event.get("usage"):
        told.tokens = int(usage.get("completion_tokens", 0))
    choices = event.get("choices") or [{}]
    return str(choices[0].get("delta", {}).get("content") or "")


async def first_model(session: ClientSession, base: str) -> str:
    """The name of the first model that is served. Raises PdrtError."""
    try:
        async with session.get(f"{base}/models") as answer:
            if answer.status != 200:
                raise error_from_answer(answer.status, await answer.read(), base)
            return str((await answer.json())["data"][0]["id"])
    except ClientSSLError as error:
        raise Unavailable(f"{base}: {tls_reason(error)}") from error
    except (ClientError, TimeoutError, OSError) as error:
        why = reason_at_first(error)
        raise Unavailable(f"nobody serves at {base} ({why}): is `pdrt up` running?") from error
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise Unavailable(f"{base}/models did not name a model") from error


class Chat:
    """A conversation. `lines` are what the person says; the answers go to `console`."""

    def __init__(self, manner: Manner, console: Console, runner: asyncio.Runner) -> None:
        self._manner, self._console, self._runner = manner, console, runner
        self._model = manner.model
        self._said: list[Message] = []
        self.failures = 0

    def open(self) -> None:
        """Find out whom we talk to. Raises PdrtError."""
        if not self._model:
            try:
                self._model = self._runner.run(self._find_model())
            except Unauthorized as error:
                raise Unauthorized(f"{error}: --api-key KEY, or PDRT_API_KEY") from error
        self._forget()

    @property
    def model(self) -> str:
        return self._model

    def talk(self, lines: Iterator[str]) -> None:
        for line in lines:
            match line.strip():
                case "":
                    continue
                case "/quit" | "/exit":
                    return
                case "/new":
                    self._forget()
                case "/help":
                    self._note(_HELP)
                case command if command[0] == "/" and command[1:].isalpha():
                    self._note(f"there is no {command}: {_HELP}")
                case text:
                    self._turn(text)

    def _turn(self, text: str) -> None:
        self._said.append({"role": "user", "content": text})
        told = Told()
        try:
            self._runner.run(self._stoppable(told))
        except (asyncio.CancelledError, KeyboardInterrupt):
            self._console.print()
            self._note("stopped")
        except PdrtError as error:
            self.failures += 1
            self._console.print()
            self._note(f"{error.code}: {error}", "red")
        if told.text:
            self._said.append({"role": "assistant", "content": told.text})
        else:
            self._said.pop()  # as if it had not been asked

    async def _stoppable(self, told: Told) -> None:
        """Ctrl-C ends the answer, and no more than that however often it is pressed."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        loop.add_signal_handler(signal.SIGINT, lambda: task.cancelling() or task.cancel())
        try:
            await self._answer(told)
        finally:
            loop.remove_signal_handler(signal.SIGINT)

    async def _answer(self, told: Told) -> None:
        async with self._session() as session:
            async for piece in ask(session, self._manner, self._model, self._said, told):
                self._console.out(piece, end="", highlight=False)
                self._console.file.flush()
        self._console.print()
        self._note(told.summary())

    async def _find_model(self) -> str:
        async with self._session() as session:
            return await first_model(session, self._manner.base)

    def _session(self) -> ClientSession:
        timeout = ClientTimeout(total=None, sock_connect=_CONNECT_S)
        return ClientSession(headers=self._manner.headers, timeout=timeout)

    def _forget(self) -> None:
        system = self._manner.system
        self._said = [{"role": "system", "content": system}] if system else []

    def _note(self, line: str, style: str = "dim") -> None:
        if self._console.is_terminal or style != "dim":
            self._console.print(line, style=style, markup=False, highlight=False)


def questions(
    stdin: TextIO, prompt: Callable[[], str] | None, note: Callable[[str], None]
) -> Iterator[str]:
    """Lines from a person (with a prompt) or from a pipe.

    A person ends with Ctrl-D. Ctrl-C drops the line, for it may have been meant for an answer
    that was just over; the second in a row ends.
    """
    if prompt is None:
        yield from stdin
        return
    is_leaving = False
    while True:
        try:
            line = prompt()
        except EOFError:
            return
        except KeyboardInterrupt:
            if is_leaving:
                return
            is_leaving = True
            note(_AGAIN)
        else:
            is_leaving = False
            yield line


def chat(manner: Manner, console: Console, stdin: TextIO) -> int:
    """Talk until the person leaves; the exit status. Raises PdrtError when nobody answers."""
    with asyncio.Runner() as runner:
        talk = Chat(manner, console, runner)
        talk.open()
        is_person = console.is_terminal and stdin.isatty()
        if is_person:
            console.print(f"{talk.model} at {manner.base}. {_HELP}", style="dim", markup=False)
            with contextlib.suppress(ImportError):
                importlib.import_module("readline")  # gives `input` editing and a history

        def note(line: str) -> None:
            console.print(f"\n{line}", style="dim", markup=False)

        talk.talk(questions(stdin, (lambda: input("> ")) if is_person else None, note))
        if is_person:
            console.print()
        return 1 if talk.failures and not is_person else 0
