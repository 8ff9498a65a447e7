"""The writer's questions to the target, one at a time, over encrypted sockets of the cluster."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from typing import Final, TypeAlias, TypeVar

from pdrt.bench.handshakes import WHY, Attempts, Standing
from pdrt.bench.words import ANSWER, QUESTION, Answer, Bye, Question, Sorry
from pdrt.config import bracketed
from pdrt.data.wire import Wire
from pdrt.errors import BadMessage, ConfigError, Unavailable
from pdrt.keys import ClusterKey
from pdrt.messages import decode, encode

_ANSWER_S: Final = 60.0
_LOOK_S: Final = 0.1
_TELL_S: Final = 5.0
A = TypeVar("A")
Told: TypeAlias = Callable[[str], None]  # a line for a person who waits


def to_nobody(_line: str) -> None:
    pass


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

    def __init__(
        self, wire: Wire, target: str, patience_s: float, attempts: Attempts, told: Told
    ) -> None:
        self._wire, self._target, self._patience_s = wire, target, patience_s
        self._attempts, self._told = attempts, told
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
        telling = asyncio.create_task(self._tell())
        try:
            async with asyncio.timeout(self._patience_s):
                answer = await self._answer_to(question.number)
        except TimeoutError:
            raise Unavailable(
                f"{self._target} does not answer within {self._patience_s:g} s:"
                f" {self._why(self._attempts.look())}"
            ) from None
        finally:
            telling.cancel()
            await asyncio.gather(telling, return_exceptions=True)
        self._told = to_nobody  # from now on a person sees the progress
        if isinstance(answer, Sorry):
            raise Unavailable(f"{self._target}: {answer.reason}")
        if not isinstance(answer, kind):
            raise Unavailable(f"{self._target} answers with {type(answer).__name__}")
        return answer

    async def _tell(self) -> None:
        """What is found out at once, and that we still wait every few seconds."""
        began, told_at, said = time.monotonic(), 0.0, None
        while self._told is not to_nobody:
            await asyncio.sleep(_LOOK_S)
            standing, waited = self._attempts.look(), time.monotonic() - began
            if standing in ("refused", "stranger") and standing != said:
                said, line = standing, "trying on"
            elif waited - told_at >= _TELL_S:
                line = "still waiting"
            else:
                continue
            told_at = waited
            self._told(
                f"{self._target}: {self._why(standing)}"
                f" ({line}, {waited:.0f} of {self._patience_s:g} s)"
            )

    def _why(self, standing: Standing) -> str:
        if standing == "known":
            return (
                f"{WHY[standing]}: does a firewall let it reach {self.endpoint}, and is it `pdrt"
                " bench transfer --listen`?"
            )
        return WHY[standing]

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
    key: ClusterKey,
    host: str,
    port: int,
    patience_s: float = _ANSWER_S,
    told: Told = to_nobody,
) -> AsyncIterator[ControlLine]:
    """A line to the target at host and port, from whichever address of ours leads there."""
    target = f"tcp://{bracketed(host)}:{port}"
    async with guarded_wire(key, own_address(host)) as wire:
        with closing(Attempts(wire.watched(target))) as attempts:
            line = ControlLine(wire, target, patience_s, attempts, told)
            yield line
            line.leave()
