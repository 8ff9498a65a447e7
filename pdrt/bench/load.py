"""Load for OpenAI-compatible servers: streamed completions at a concurrency or a rate.

One process and one loop: a token costs a read of the socket, a clock and an append. What the
client itself used of a core is counted, for a client that is busy measures itself.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector

from pdrt.bench.heard import Piece, Record
from pdrt.bench.prompts import Ask
from pdrt.bench.talk import Talk
from pdrt.chat import first_model
from pdrt.control.http import cause_of, error_from_answer
from pdrt.errors import ConfigError

Form: TypeAlias = Literal["completions", "generate"]
Send: TypeAlias = Callable[[bytes], Awaitable[Record]]
Done: TypeAlias = Callable[[Record], None]
Clock: TypeAlias = Callable[[], float]
_JSON: Final = {"content-type": "application/json"}
_SERVER: Final = re.compile(
    r"(?:(?P<name>[\w.+ -]{1,40})=)?"
    r"(?P<url>(?:https?://)?(?:\[[\da-fA-F:]+\]|[\w.-]+)(?::\d{1,5})?(?:/\S*)?)"
)
_CONNECT_S: Final = 10.0
_PATHS: Final[dict[Form, str]] = {"completions": "/v1/completions", "generate": "/generate"}


def form_of(text: str) -> Form:
    """Raises ConfigError."""
    match text:
        case "completions" | "generate":
            return text
        case _:
            raise ConfigError(
                f"--dialect {text!r}: want completions (OpenAI's) or generate (pdrt's)"
            )


@dataclass(frozen=True, slots=True)
class Server:
    """Who is asked, and in which dialect."""

    name: str
    base: str  # without /v1
    model: str = ""
    form: Form = "completions"

    @staticmethod
    def parse(text: str, form: Form = "completions") -> Server:
        """`URL` or `NAME=URL`, with or without /v1. Raises ConfigError."""
        match = _SERVER.fullmatch(text)
        if not match:
            raise ConfigError(f"--url {text!r}: want http://HOST:PORT or NAME=http://HOST:PORT")
        url = match["url"] if "://" in match["url"] else f"http://{match['url']}"
        base = url.rstrip("/").removesuffix("/v1").rstrip("/")
        return Server(match["name"] or base.partition("://")[2], base, form=form)

    async def named(self, session: ClientSession, model: str) -> Server:
        """With the model's name: the one given, else the first that it serves. Raises PdrtError."""
        return Server(
            self.name,
            self.base,
            model or await first_model(session, f"{self.base}/v1"),
            self.form,
        )

    def body(self, ask: Ask) -> bytes:
        """Greedy, to the full length, with the counts at the end."""
        sampling = {"max_tokens": ask.max_tokens, "temperature": 0, "ignore_eos": True}
        if self.form == "generate":
            named = {"model": self.model} if self.model else {}
            told = {"prompt": ask.prompt, "sampling_params": sampling, "stream": True}
            return json.dumps(told | named).encode()
        usage = {"stream": True, "stream_options": {"include_usage": True}}
        return json.dumps({"model": self.model, "prompt": ask.prompt, **sampling, **usage}).encode()

    @property
    def url(self) -> str:
        return self.base + _PATHS[self.form]


@asynccontextmanager
async def client(timeout_s: float, api_key: str = "") -> AsyncIterator[ClientSession]:
    """Each request has a connection of its own: llama.cpp closes one without saying so."""
    timeout = ClientTimeout(total=timeout_s, sock_connect=_CONNECT_S)
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    connector = TCPConnector(limit=0, force_close=True)
    async with ClientSession(timeout=timeout, headers=headers, connector=connector) as session:
        yield session


async def send(session: ClientSession, url: str, body: bytes, record: Record, clock: Clock) -> None:
    """One request: what came is in the record, a failure too, and all before a cancellation."""
    try:
        async with session.post(url, data=body, headers=_JSON) as answer:
            if answer.status != 200:
                error = error_from_answer(answer.status, await answer.read(), url)
                record.fail(error.code, str(error))
            else:
                async for data in answer.content.iter_any():
                    record.pieces.append(Piece(clock(), data))
    except TimeoutError:
        record.fail("timeout", f"{url} did not answer in time")
    except (ClientError, OSError) as error:
        code = "cut_off" if record.pieces else "unreachable"
        record.fail(code, f"{url}: {cause_of(error)}")
    record.ended = clock()


def sender(session: ClientSession, server: Server, clock: Clock = time.perf_counter) -> Send:
    """Sends bodies to one server."""

    async def sending(body: bytes) -> Record:
        record = Record(clock())
        await send(session, server.url, body, record, clock)
        return record

    return sending


@dataclass(frozen=True, slots=True)
class Ran:
    """A load that is over: what came of its requests, and what it took."""

    records: Sequence[Record]
    seconds: float
    client_s: float  # processor time of this process

    @property
    def client_share(self) -> float:
        """Of one core."""
        return self.client_s / self.seconds


async def steady(send: Send, talks: Sequence[Talk], concurrency: int, done: Done) -> Ran:
    """That many conversations under way, from the first to the last."""
    records = list[Record]()
    left = iter(talks)

    async def one_after_another(talks: Iterator[Talk]) -> None:
        for talk in talks:
            await _converse(send, talk, records, done)

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(concurrency, len(talks))):
                tasks.create_task(one_after_another(left))

    return await _timed(main, records)


async def arriving(
    send: Send,
    talks: Sequence[Talk],
    gaps_s: Iterator[float],
    most: int,
    done: Done,
    clock: Clock = time.perf_counter,
) -> Ran:
    """Conversations that come whether or not others are over, `most` under way at a time."""
    records = list[Record]()
    places = asyncio.Semaphore(most)

    async def one(talk: Talk) -> None:
        async with places:
            await _converse(send, talk, records, done)

    async def main() -> None:
        due = clock()
        async with asyncio.TaskGroup() as tasks:
            for talk, gap_s in zip(talks, gaps_s, strict=False):
                if due > clock():
                    await asyncio.sleep(due - clock())
                tasks.create_task(one(talk))
                due += gap_s

    return await _timed(main, records)


async def _converse(send: Send, talk: Talk, records: list[Record], done: Done) -> None:
    """Its turns, one after the other."""
    while talk.body is not None:
        record = await send(talk.body)
        for each in (record, *talk.hear(record)):
            records.append(each)
            done(each)


async def _timed(main: Callable[[], Awaitable[None]], records: Sequence[Record]) -> Ran:
    began, used = time.perf_counter(), time.process_time()
    await main()
    return Ran(records, time.perf_counter() - began, time.process_time() - used)
