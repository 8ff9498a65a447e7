"""The writer's questions to the target, one at a time, over encrypted sockets of the cluster."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, TypeVar

from pdrt.bench.words import ANSWER, QUESTION, Answer, Bye, Question, Sorry
from pdrt.config import bracketed
from pdrt.data.wire import Wire
from pdrt.errors import BadMessage, ConfigError, Unavailable
from pdrt.keys import ClusterKey
from pdrt.messages import decode, encode

_ANSWER_S: Final = 60.0
A = TypeVar("A")


def split_address(text: str, option: str) -> tuple[str, int]:
    """HOST:PORT as an address and a number; a name is looked up. Raises ConfigError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(
            f"{option} {text}: want HOST:PORT, such as 10.0.0.2:18900 or [fd00::2]:18900"
        )
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"{option} {text}: {error.strerror}") from error
    return str(found[0][4][0]), int(port)


def own_address(towards: str) -> str:
    """Our address on the way to that one. Raises ConfigError where there is no way."""
    family = socket.AF_INET6 if ":" in towards else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((towards, 9))  # sends nothing
        except OSError as error:
            raise ConfigError(f"there is no way to {towards}: {error.strerror}") from error
        return str(probe.getsockname()[0])


class ControlLine:
    """The writer's end. Only `asking` makes one."""

    def __init__(self, wire: Wire, target: str, patience_s: float) -> None:
        self._wire, self._target, self._patience_s = wire, target, patience_s
        self._number = 0

    @property
    def endpoint(self) -> str:
        return self._wire.endpoint

    def next_number(self) -> int:
        self._number += 1
        return self._number

    async def ask(self, question: Question, kind: type[A]) -> A:
        """The answer of this kind. Raises Unavailable when there is none in time."""
        self._wire.send(self._target, encode(QUESTION, question))
        try:
            async with asyncio.timeout(self._patience_s):
                answer = await self._answer_to(question.number)
        except TimeoutError:
            raise Unavailable(
                f"{self._target} does not answer within {self._patience_s:g} s: does `pdrt bench"
                " transfer --listen` run there, with the same cluster key, and does a firewall let"
                f" it reach {self.endpoint}?"
            ) from None
        if isinstance(answer, Sorry):
            raise Unavailable(f"{self._target}: {answer.reason}")
        if not isinstance(answer, kind):
            raise Unavailable(f"{self._target} answers with {type(answer).__name__}")
        return answer

    async def _answer_to(self, number: int) -> Answer:
        while True:
            try:
                answer = decode(ANSWER, await self._wire.receive())
            except BadMessage:
                continue
            if answer.number == number:
                return answer

    def leave(self) -> None:
        self._wire.send(self._target, encode(QUESTION, Bye(number=self.next_number())))


@asynccontextmanager
async def guarded_wire(key: ClusterKey, host: str, port: int = 0) -> AsyncIterator[Wire]:
    """A socket that listens there and lets members of the cluster in. Raises ConfigError."""
    wire = Wire(key, host)
    guard: asyncio.Task[None] | None = None
    try:
        wire.start(port)
        guard = asyncio.create_task(wire.guard())
        yield wire
    finally:
        if guard is not None:
            guard.cancel()
            await asyncio.gather(guard, return_exceptions=True)
        wire.close()


@asynccontextmanager
async def asking(
    key: ClusterKey, host: str, port: int, patience_s: float = _ANSWER_S
) -> AsyncIterator[ControlLine]:
    """A line to the target at host and port, from whichever address of ours leads there."""
    async with guarded_wire(key, own_address(host)) as wire:
        line = ControlLine(wire, f"tcp://{bracketed(host)}:{port}", patience_s)
        yield line
        line.leave()
