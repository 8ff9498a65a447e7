"""The end that is written to: a process with a pool, every transport over it, and a plain loop.

`pdrt bench transfer --listen` serves one writer on another host; run as a module it is the child
of a writer on this one, gets its orders in a line on its standard input, and ends with it.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Final, NoReturn, cast, get_args

import numpy as np
import uvloop
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pdrt import telemetry
from pdrt.bench.control_line import Told, guarded_wire, to_nobody
from pdrt.bench.handshakes import Strangers
from pdrt.bench.pairing import Pairing, Stretch, checksum
from pdrt.bench.plain import PlainReceiver
from pdrt.bench.ways import KEY, open_named, pool_memory
from pdrt.bench.words import (
    ANSWER,
    BENCH_PROTOCOL,
    QUESTION,
    Answer,
    Bye,
    Check,
    Farewell,
    Hello,
    Question,
    Sorry,
    Sum,
    Welcome,
)
from pdrt.config import TransportName
from pdrt.data.memory import PoolMemory
from pdrt.data.process import this_process
from pdrt.data.transport.promise import Transport
from pdrt.data.wire import Wire
from pdrt.device.poolsize import host_bytes
from pdrt.errors import BadMessage, ConfigError, PdrtError, Unavailable
from pdrt.keys import ClusterKey
from pdrt.messages import decode, encode

_SILENCE_S: Final = 600.0  # a writer that asks nothing for so long is gone
_MOST_OF_MEMORY: Final = 0.8
_LOOK_S: Final = 0.2
_TELL_S: Final = 5.0


class Orders(BaseModel):
    """What a writer tells its child."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    host: str
    key_hex: Annotated[str, Field(repr=False)]


async def serve(
    key: ClusterKey,
    host: str,
    port: int,
    wait_s: float,
    listening: Callable[[str], None],
    told: Told = to_nobody,
) -> None:
    """Serve one writer to its end. Raises ConfigError, or Unavailable when nobody comes."""
    async with guarded_wire(key, host, port) as wire, Target(key, host) as target:
        with closing(Strangers(wire.watched())) as strangers:
            listening(wire.endpoint)
            telling = asyncio.create_task(_tell(strangers, told))
            try:
                await _answer_all(wire, target, wait_s, strangers)
            finally:
                telling.cancel()
                await asyncio.gather(telling, return_exceptions=True)


async def _tell(strangers: Strangers, told: Told) -> None:
    """Of the first stranger at once, and then of how many there were by now."""
    known = 0
    while told is not to_nobody:
        if (count := strangers.look()) != known:
            known = count
            told(_refusals(count))
            await asyncio.sleep(_TELL_S)
        await asyncio.sleep(_LOOK_S)


def _refusals(count: int) -> str:
    times = "once" if count == 1 else f"{count} times"
    return (
        f"a stranger was refused {times}: it has another cluster key (PDRT_SECURITY_KEY_FILE,"
        " PDRT_SECURITY_KEY), or is no pdrt"
    )


async def _answer_all(wire: Wire, target: Target, wait_s: float, strangers: Strangers) -> None:
    while True:
        try:
            async with asyncio.timeout(wait_s):
                frame = await wire.receive()
        except TimeoutError:
            count = strangers.look()
            but = f"; {_refusals(count)}" if count else ""
            raise Unavailable(f"no writer has asked for anything in {wait_s:g} s{but}") from None
        try:
            question = decode(QUESTION, frame)
        except BadMessage:
            continue
        if isinstance(question, Hello):
            target.writer, wait_s = question.endpoint, _SILENCE_S
        answer = await target.answer(question)
        wire.send(target.writer, encode(ANSWER, answer))
        if isinstance(question, Bye):
            return


@dataclass(slots=True)
class Target:
    """The pool and what was opened over it; made by the first `Hello`."""

    key: ClusterKey
    host: str
    writer: str = ""
    _memory: PoolMemory | None = None
    _pairing: Callable[[int], Pairing] | None = None
    _stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def __aenter__(self) -> Target:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self._stack.aclose()

    async def answer(self, question: Question) -> Answer:
        try:
            match question:
                case Hello():
                    return await self._welcome(question)
                case Check():
                    return Sum(number=question.number, value=self._check(question))
                case Bye():
                    return Farewell(number=question.number)
        except PdrtError as error:
            return Sorry(number=question.number, reason=str(error))

    def _check(self, check: Check) -> int:
        if self._memory is None or self._pairing is None:
            raise BadMessage("there is no pool yet")
        pairing = self._pairing(check.block_bytes)
        stretch = Stretch(check.first, check.count, check.turn)
        return checksum(self._memory.pool_view, pairing.targets(stretch), check.block_bytes)

    async def _welcome(self, hello: Hello) -> Welcome:
        if hello.protocol != BENCH_PROTOCOL:
            raise ConfigError(f"protocol {BENCH_PROTOCOL} here, {hello.protocol} there")
        if self._memory is not None:
            raise ConfigError("it serves another writer")
        if hello.pool_bytes > _MOST_OF_MEMORY * host_bytes():
            raise ConfigError(f"a pool of {hello.pool_bytes} bytes is too large for this host")
        memory = self._memory = pool_memory(hello.pool_bytes)
        self._stack.callback(memory.close)
        self._pairing = cache(lambda size: Pairing(hello.pool_bytes, size))
        offers, refused = dict[str, bytes](), dict[str, str]()
        for name in hello.transports:
            try:
                offers |= (await self._open(name, memory)).offers
            except PdrtError as error:
                refused[name] = str(error)
        plain = PlainReceiver(self.host, memory.pool_view, self._pairing)
        self._stack.callback(plain.close)
        return Welcome(
            number=hello.number,
            process=this_process(),
            region=memory.region(offers),
            refused=refused,
            plain_port=plain.port,
            plain_token=plain.token,
        )

    async def _open(self, name: str, memory: PoolMemory) -> Transport:
        if name not in get_args(TransportName):
            raise ConfigError(f"{name} is not known here")
        transport = open_named(cast("TransportName", name), memory, self.host, self.key)
        self._stack.push_async_callback(_close(transport))
        pool = np.array([[memory.pool_at, len(memory.pool_view)]], dtype=np.int64)
        transport.admit(KEY, pool)
        return transport


def _close(transport: Transport) -> Callable[[], Awaitable[None]]:
    return transport.close


def _orphaned() -> None:
    """The writer has ended, however it did."""
    if not os.read(0, 4096):
        os._exit(1)


async def _serve_parent(orders: Orders) -> None:
    asyncio.get_running_loop().add_reader(0, _orphaned)

    def listening(endpoint: str) -> None:
        sys.stdout.write(f"{endpoint}\n")
        sys.stdout.flush()

    key = ClusterKey(bytes.fromhex(orders.key_hex))
    await serve(key, orders.host, 0, _SILENCE_S, listening)


def main() -> NoReturn:
    try:
        orders = Orders.model_validate_json(sys.stdin.readline())
    except ValidationError as error:
        sys.exit(f"pdrt bench: {error}")
    telemetry.configure("warning")
    sys.setswitchinterval(0.001)  # as in a worker
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve_parent(orders))
    sys.stdout.flush()
    os._exit(0)  # no engine's threads or exit handlers are waited for


if __name__ == "__main__":
    main()
