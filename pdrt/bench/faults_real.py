"""Faults of real instances: a prefill and a decode node without a model, killed and stopped.

They compute nothing (the `null` device) but take their time for it, and all else is real: workers,
handshakes, transfers, heartbeats. What they hold is read from what their leaders say of themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from aiohttp import ClientError, ClientSession, ClientTimeout

from pdrt.bench.faults_client import Caller, Got
from pdrt.bench.faults_rows import OneRow
from pdrt.bench.faults_verdict import BOUND_S, Want
from pdrt.config import PortsSection
from pdrt.device.poolsize import host_bytes
from pdrt.errors import PeerLost, Unavailable
from pdrt.folder import PrivateFolder
from pdrt.up.layout import Machine, Part, Wanted, child_environment, lay_out
from pdrt.up.place import free_port, new_key
from pdrt.up.processes import Child, command, end

Who: TypeAlias = Literal["prefill", "decode"]
_PREFIX: Final = "pdrt-faults-real-"
_FREE: Final = PortsSection(router=0, prefill=0, decode=0, hybrid=0, bootstrap=0)
_STEP_MS: Final = 20.0
_TOKEN_MS: Final = 1.0
_PROMPT: Final = [1] * 3000  # three seconds of prefill
_LONG: Final = 400  # tokens: eight seconds of decode
_HELD: Final = ("rooms", "running")  # blocks wait until a stopped writer is proven harmless
_READY_S: Final = 60.0
_LOOK_S: Final = 0.02
_ASK_S: Final = 1.0
_END_S: Final = 10.0


class RealGround:
    """1P1D and its router, as processes."""

    def __init__(
        self, parts: list[Part], folder: Path, bearer: str, environ: Mapping[str, str]
    ) -> None:
        self._parts = {part.name.partition(" ")[0]: part for part in parts}
        self._folder, self._environ = folder, environ
        self._children: dict[str, Child] = {}
        self._headers = {"authorization": f"Bearer {bearer}"}
        self.caller = Caller("127.0.0.1", self._parts["router"].port, 20.0, model="null")

    async def start(self) -> None:
        """What does not run. Raises nothing: `well` says whether it serves."""
        for name, part in self._parts.items():
            child = self._children.get(name)
            if child is None or child.exit_status is not None:
                if child is not None:
                    child.close()
                conf = self._folder / f"{name}.toml"
                conf.write_text(part.toml())
                told = child_environment(part, self._environ)
                log = conf.with_suffix(".log")
                self._children[name] = await Child.start(part, command(part, conf), log, told)

    async def stop(self) -> None:
        for name in self._children:
            self.signal(name, signal.SIGCONT)
        await end(list(self._children.values()), _END_S, asyncio.Event())
        for child in self._children.values():
            await child.wait()
            child.close()

    def signal(self, name: str, number: int) -> None:
        """To a node and its workers: they are one session."""
        child = self._children[name]
        if child.exit_status is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, number)

    async def worker(self, name: str) -> int:
        """The process of its one worker. Raises PeerLost."""
        pid: int = (await self._status(name))["workers"][0]["pid"]
        return pid

    async def runs(self, name: str) -> None:
        """Until this node has a request in its steps. Raises PeerLost when none comes."""
        began = time.monotonic()
        while time.monotonic() - began < _END_S:
            if self._sums(await self._status(name))["running"]:
                return
            await asyncio.sleep(_LOOK_S)
        raise PeerLost(f"no request came to run on {name}")

    async def released(self, within_s: float) -> float | None:
        """Seconds until no node that answers has a request any more."""
        began = time.monotonic()
        while time.monotonic() - began < within_s:
            if not await self._hold():
                return time.monotonic() - began
            await asyncio.sleep(_LOOK_S)
        return None

    async def _hold(self) -> bool:
        for name in ("prefill", "decode"):
            status = await self._status(name, missing_ok=True)
            if any(self._sums(status).values()) or status.get("rooms"):
                return True
        return False

    @staticmethod
    def _sums(status: Mapping[str, Any]) -> dict[str, int]:
        workers = status.get("workers", [])
        return {name: sum(worker.get(name, 0) for worker in workers) for name in _HELD}

    async def _status(self, name: str, *, missing_ok: bool = False) -> dict[str, Any]:
        """What a leader says of itself; of one that is gone nothing."""
        url = f"{self._parts[name].url}/internal/status"
        timeout = ClientTimeout(total=_ASK_S)
        try:
            async with (
                ClientSession(headers=self._headers, timeout=timeout) as session,
                session.get(url) as answer,
            ):
                return dict(await answer.json())
        except (ClientError, OSError, ValueError) as error:
            if missing_ok:
                return {}
            raise PeerLost(f"{name} does not answer: {error}") from error

    async def well(self) -> float | None:
        """All run again, and so long it took until a request was served; None: it is not."""
        for name in self._children:
            self.signal(name, signal.SIGCONT)
        began = time.monotonic()
        while time.monotonic() - began < _READY_S:
            await self.start()
            ready = self.caller.request(b"", method="GET", path="/ready")
            if (await self.caller.send(ready)).status == 200:
                got = await self.caller.ask(stream=False, ignore_eos=True)
                if got.status == 200:
                    return time.monotonic() - began
            await asyncio.sleep(0.1)
        return None


@asynccontextmanager
async def real_started(environ: Mapping[str, str]) -> AsyncIterator[RealGround]:
    """Raises Unavailable when the instances do not come up."""
    with contextlib.closing(PrivateFolder(_PREFIX)) as private:
        key_file = private.path / "key"
        key = new_key(key_file)
        wanted = replace(Wanted(), model="null", kv_memory=float(1 << 22))
        machine = Machine(cores=2, memory=host_bytes())
        parts = lay_out(wanted, _FREE, key_file, machine, free_port)
        for part in parts:
            if part.role != "router":
                part.tables["device"] |= {
                    "kind": "null",
                    "step_ms": _STEP_MS,
                    "token_ms": _TOKEN_MS,
                }
                part.tables["scheduler"] |= {"prefix_cache": False, "max_prefill_tokens": 64}
        ground = RealGround(parts, private.path, key.bearer(), environ)
        try:
            if await ground.well() is None:
                raise Unavailable(f"the instances do not serve; their logs are in {private.path}")
            yield ground
        finally:
            await ground.stop()


# Rows.

Real: TypeAlias = OneRow[RealGround]
_LOST: Final = (500, 502, 503)


def real_rows() -> Iterator[Real]:
    lost = Want(statuses=_LOST)
    told = Want(ends="error event")
    left = Want(ends="left")
    for how, number in (("killed", signal.SIGKILL), ("stopped", signal.SIGSTOP)):
        yield OneRow(f"prefill {how} while it computes", _struck("prefill", number), lost)
        yield OneRow(f"decode {how} while it waits", _struck("decode", number), lost)
        yield OneRow(f"decode {how} in mid-stream", _struck_in_stream(number), told)
    yield OneRow("prefill's worker killed", _worker_killed("prefill"), lost)
    yield OneRow("decode's worker killed in mid-stream", _worker_killed_in_stream, told)
    for stream, kind in ((True, "stream"), (False, "json")):
        yield OneRow(f"gone while prefill computes, {kind}", _left_prefilling(stream), left)
    yield OneRow("gone in mid-stream", _left_decoding, left)
    yield OneRow("deadline while prefill computes", _late, Want(statuses=(504,)))
    yield OneRow("a prompt that cannot fit", _too_long, Want(statuses=(400,)))


RealAct: TypeAlias = Callable[[RealGround], Awaitable[Got]]


def _ask(
    ground: RealGround,
    *,
    stream: bool,
    prompt: Sequence[int] = _PROMPT,
    tokens: int = _LONG,
    **more: object,
) -> bytes:
    asked = {"max_tokens": tokens, "ignore_eos": True, "temperature": 0, **more}
    return ground.caller.request(ground.caller.body(stream=stream, prompt=prompt, **asked))


def _struck(who: Who, number: int) -> RealAct:
    """A signal while prefill computes and decode waits; what the client hears after it."""

    async def act(ground: RealGround) -> Got:
        async with ground.caller.line() as line:
            await line.say(_ask(ground, stream=False))
            await ground.runs("prefill")
            ground.signal(who, number)
            return await line.converse()

    return act


def _struck_in_stream(number: int) -> RealAct:
    async def act(ground: RealGround) -> Got:
        async with ground.caller.line() as line:
            await line.say(_ask(ground, stream=True, prompt=[1] * 8))
            await line.events(5)
            ground.signal("decode", number)
            return await line.converse()

    return act


def _worker_killed(who: Who) -> RealAct:
    async def act(ground: RealGround) -> Got:
        worker = await ground.worker(who)
        async with ground.caller.line() as line:
            await line.say(_ask(ground, stream=False))
            await ground.runs("prefill")
            os.kill(worker, signal.SIGKILL)
            return await line.converse()

    return act


async def _worker_killed_in_stream(ground: RealGround) -> Got:
    """It is started again: the stream goes on then, or its client hears that it does not."""
    worker = await ground.worker("decode")
    async with ground.caller.line() as line:
        await line.say(_ask(ground, stream=True, prompt=[1] * 8))
        await line.events(5)
        os.kill(worker, signal.SIGKILL)
        paused = await line.silence(2 * BOUND_S)
        got = await line.converse() if line.is_over else Got(end="left")
        got.total_s = paused
        if paused > BOUND_S:
            got.problem = f"silent for {paused:.1f} s, wanted a word within {BOUND_S:g} s"
        return got


def _left_prefilling(stream: bool) -> RealAct:
    async def act(ground: RealGround) -> Got:
        async with ground.caller.line() as line:
            await line.say(_ask(ground, stream=stream))
            await ground.runs("prefill")
        return Got(end="left")

    return act


async def _left_decoding(ground: RealGround) -> Got:
    async with ground.caller.line() as line:
        await line.say(_ask(ground, stream=True, prompt=[1] * 8))
        await line.events(5)
    return Got(end="left")


async def _late(ground: RealGround) -> Got:
    return await ground.caller.send(_ask(ground, stream=False, timeout_s=1.0))


async def _too_long(ground: RealGround) -> Got:
    return await ground.caller.send(_ask(ground, stream=True, tokens=100_000_000))
