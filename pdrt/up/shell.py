"""`pdrt up`: starts the parts, tells when they serve, watches them, and takes them down again.

It restarts nothing: a node restarts its own workers, and a dead node is reported with its last
words. The first Ctrl-C drains, the second ends at once. Nothing is left behind, neither after
that nor, but for a directory that the next `pdrt up` removes, after a kill -9.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import uvloop
from aiohttp import ClientError, ClientSession, ClientTimeout
from rich.console import Console

from pdrt.config import NodeConfig, PortsSection
from pdrt.device.poolsize import host_bytes
from pdrt.errors import PeerLost, Unavailable
from pdrt.folder import PrivateFolder
from pdrt.keys import ClusterKey
from pdrt.up.layout import Machine, Part, Wanted, child_environment, lay_out
from pdrt.up.place import check_free, free_port, new_key
from pdrt.up.processes import Child, command, end
from pdrt.up.screen import Screen, read_loaded, read_ways, readable, status_line, ways_in_short

_PREFIX: Final = "pdrt-up-"
_LOOK_S: Final = 0.1
_STATUS_S: Final = 1.0
_ASK_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Patience:
    startup_s: float
    drain_s: float
    tell_s: float = 5.0  # how often it is said why the router is not ready yet


class Asked:
    """What signals asked for: to stop, and then to stop at once."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.hurry = asyncio.Event()
        self.ignores_interrupts = False  # while another program has the terminal

    def listen(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self.heard, number)

    def heard(self, number: int) -> None:
        if number == signal.SIGINT and self.ignores_interrupts:
            return
        if self.stop.is_set():
            self.hurry.set()
        self.stop.set()

    async def stop_within(self, seconds: float) -> None:
        """Return after that long, or at once when it is time to stop."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.stop.wait()


Program: TypeAlias = Callable[[Part, Path], list[str]]
Meanwhile: TypeAlias = Callable[
    [str, Asked], Awaitable[None]
]  # given the router's URL; ends the cluster
MakeMeanwhile: TypeAlias = Callable[[Sequence[Part]], Meanwhile]


class Cluster:
    """The parts as running processes. Used once: `serve` starts and ends them."""

    def __init__(
        self,
        parts: Sequence[Part],
        folder: Path,
        key: ClusterKey,
        screen: Screen,
        environ: Mapping[str, str],
        program: Program = command,
    ) -> None:
        self._parts, self._folder, self._screen, self._environ = parts, folder, screen, environ
        self._program = program
        self._headers = {"authorization": f"Bearer {key.bearer()}"}
        self.children: list[Child] = []
        self._router = next(part for part in parts if part.role == "router")

    async def serve(self, patience: Patience, meanwhile: Meanwhile | None = None) -> int:
        """Run until asked to stop; the exit status. Raises PdrtError when it cannot start."""
        asked = Asked()
        asked.listen()
        try:
            await self._start()
            if await self._becomes_ready(asked, patience):
                await self._tell_ready()
                if meanwhile is None:
                    await self._watch(asked)
                else:
                    self._screen.rest()
                    await meanwhile(self._router.url, asked)
            self._screen.rest()
        finally:
            is_clean = await self._end(asked, patience.drain_s)
        return 0 if is_clean else 1

    async def _start(self) -> None:
        for part in self._parts:
            conf = self._conf(part)
            conf.write_text(part.toml())
            self._screen.starting(part)
            child = await Child.start(
                part,
                self._program(part, conf),
                conf.with_suffix(".log"),
                child_environment(part, self._environ),
            )
            self.children.append(child)

    def _conf(self, part: Part) -> Path:
        return self._folder / f"{part.name.replace(' ', '-')}.toml"

    async def _becomes_ready(self, asked: Asked, patience: Patience) -> bool:
        """False when asked to stop before. Raises PeerLost or Unavailable when it never will."""
        until, tell_at = time.monotonic() + patience.startup_s, 0.0
        async with self._session() as session:
            while time.monotonic() < until:
                self._hear()
                for child in self.children:
                    if child.exit_status is not None:
                        self._tell_end(child)
                        raise PeerLost(f"{child.part.name} ended before the cluster was ready")
                statuses = await self._statuses(session, self.children)
                self._tell_loading(statuses)
                are_ready = all(
                    s is not None and s.get("state") == "ready" for s in statuses.values()
                )
                if are_ready:
                    if await _is_ready(session, self._router.url):
                        return True
                    now = time.monotonic()
                    if tell_at and now >= tell_at:
                        await self._tell_why_not_ready(session)
                        tell_at = 0.0
                    tell_at = tell_at or now + patience.tell_s
                await asked.stop_within(_LOOK_S)
                if asked.stop.is_set():
                    return False
            reason = await self._why_not_ready(session)
        raise Unavailable(f"not ready after {patience.startup_s:g} s; the router says: {reason}")

    def _hear(self) -> None:
        for child in self.children:
            child.new_lines()

    def _tell_loading(self, statuses: Mapping[str, Mapping[str, Any] | None]) -> None:
        for part in self._parts:
            if status := statuses.get(part.name):
                for loaded in read_loaded(status):
                    self._screen.loading(part, loaded)
                if status.get("state") == "ready":
                    self._screen.is_ready(part)

    async def _tell_ready(self) -> None:
        async with self._session() as session:
            statuses = await self._statuses(session, self.children)
        for part in self._parts:
            self._screen.is_ready(part)
        self._screen.rest()
        nodes = ", ".join(map(_described, self._parts[:-1]))
        self._screen.say(
            f"ready: {self._router.url}/v1{_way(self._parts, statuses.values())}", "bold green"
        )
        self._screen.say(f"{nodes}; logs in {self._folder}", "dim")

    async def _watch(self, asked: Asked) -> None:
        """Show the load and report the dead until asked to stop, or until nobody is left."""
        self._screen.say(f"{self._router.url}/ in a browser, or {self._top()}, shows it", "dim")
        self._screen.say("Ctrl-C drains and stops", "dim")
        was_ready = True
        async with self._session() as session:
            while not asked.stop.is_set():
                self._hear()
                for child in self.children:
                    if child.exit_status is not None and not child.is_told:
                        self._tell_end(child)
                        again = shlex.join(["pdrt", *child.part.arguments(self._conf(child.part))])
                        self._screen.say(f"to start it again, in another terminal: {again}", "dim")
                was_ready = await self._tell_readiness(session, was_ready)
                living = [child for child in self.children if child.exit_status is None]
                if not living:
                    return
                self._screen.status(status_line(await self._statuses(session, living)))
                await asked.stop_within(_STATUS_S)

    def _top(self) -> str:
        """How `pdrt top` finds this router, which it looks for on the usual port."""
        is_usual = self._router.port == PortsSection().router
        return "pdrt top" if is_usual else f"pdrt top --url {self._router.url}"

    async def _tell_readiness(self, session: ClientSession, was_ready: bool) -> bool:
        """Whether requests can be served just now; said when it has changed."""
        is_ready = await _is_ready(session, self._router.url)
        if was_ready and not is_ready:
            self._screen.problem(f"no longer ready: {await self._why_not_ready(session)}")
        elif is_ready and not was_ready:
            self._screen.say("ready again", "bold green")
        return is_ready

    async def _tell_why_not_ready(self, session: ClientSession) -> None:
        reason = await self._why_not_ready(session)
        self._screen.say(f"all nodes are ready, the router is not yet: {reason}", "yellow")
        self._screen.say(f"logs in {self._folder}", "dim")

    async def _why_not_ready(self, session: ClientSession) -> object:
        told = await _ask(session, f"{self._router.url}/ready")
        return told.get("reason") if isinstance(told, Mapping) else told

    async def _statuses(
        self, session: ClientSession, living: Sequence[Child]
    ) -> dict[str, Mapping[str, Any] | None]:
        nodes = [child.part for child in living if child.part.role != "router"]
        told = await asyncio.gather(*(_ask(session, f"{n.url}/internal/status") for n in nodes))
        return {
            node.name: answer if isinstance(answer, Mapping) else None
            for node, answer in zip(nodes, told, strict=True)
        }

    def _tell_end(self, child: Child) -> None:
        child.is_told = True
        if child.exit_status == 0:  # as somebody asked of it
            self._screen.say(f"{child.part.name} has drained and ended", "yellow")
        else:
            self._screen.problem(
                f"{child.part.name} ended with exit status {child.exit_status}; its last words:",
                [readable(line) for line in child.last_lines()],
            )

    async def _end(self, asked: Asked, grace_s: float) -> bool:
        """Router first, so that what is under way finishes. Whether all ended as they should."""
        router = [child for child in self.children if child.part.role == "router"]
        nodes = [child for child in self.children if child.part.role != "router"]
        failed = [child for child in self.children if child.exit_status]
        if router or nodes:
            self._screen.say("draining; Ctrl-C again ends at once", "dim")
        until = time.monotonic() + grace_s + 1.0
        killed = await end(router, grace_s, asked.hurry)
        killed += await end(nodes, max(1.0, until - time.monotonic()), asked.hurry)
        how = "was ended at once, as asked" if asked.hurry.is_set() else ""
        for child in killed:
            name = child.part.name
            self._screen.problem(f"{name} {how or 'did not end in time and was killed'}")
        for child in self.children:
            if child.exit_status and child not in killed and not child.is_told:
                self._tell_end(child)
                failed.append(child)
            child.close()
        return not killed and not failed

    def _session(self) -> ClientSession:
        return ClientSession(headers=self._headers, timeout=ClientTimeout(total=_ASK_S))


def _described(part: Part) -> str:
    shape = f" ({part.shape})" if str(part.shape) else ""
    return f"{part.name} at {part.url}{shape}"


def _way(parts: Sequence[Part], statuses: Iterable[Mapping[str, Any] | None]) -> str:
    """How KV moves, where it does: as those say who get it, else as it was asked for."""
    transfers = [part.tables.get("transfer", {}) for part in parts if part.role == "prefill"]
    if not transfers:
        return ""
    told = ways_in_short(way for status in statuses if status for way in read_ways(status))
    return f" (KV moves by {told or transfers[0].get('transport', 'auto')})"


async def _is_ready(session: ClientSession, url: str) -> bool:
    try:
        async with session.get(f"{url}/ready") as answer:
            return answer.status == 200
    except (ClientError, TimeoutError, OSError):
        return False


async def _ask(session: ClientSession, url: str) -> object:
    """The JSON answer, or what went wrong as text."""
    try:
        async with session.get(url) as answer:
            return await answer.json()
    except (ClientError, TimeoutError, OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def up(
    wanted: Wanted,
    defaults: NodeConfig,
    console: Console,
    environ: Mapping[str, str],
    make_meanwhile: MakeMeanwhile | None = None,
) -> int:
    """Bring the cluster up, and return when it is down again. Raises PdrtError.

    With `make_meanwhile` it is used for that, and goes down when that has ended.
    """
    with contextlib.closing(PrivateFolder(_PREFIX)) as private:
        folder = private.path
        key_file = folder / "key"
        key = new_key(key_file)
        parts = lay_out(wanted, defaults.ports, key_file, _this_machine(), free_port)
        check_free(parts)
        patience = Patience(defaults.timeouts.startup_s, defaults.timeouts.drain_s)
        with Screen(console) as screen, asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
            cluster = Cluster(parts, folder, key, screen, environ)
            meanwhile = make_meanwhile(parts) if make_meanwhile else None
            return loop.run(cluster.serve(patience, meanwhile))


def _this_machine() -> Machine:
    return Machine(
        cores=len(os.sched_getaffinity(0)),
        memory=host_bytes(),
    )


def chatting(_parts: Sequence[Part]) -> Meanwhile:
    return _chat


async def _chat(url: str, asked: Asked) -> None:
    """Give the terminal to `pdrt chat`; Ctrl-C is its business until it ends."""
    asked.ignores_interrupts = True
    chat = await asyncio.create_subprocess_exec(sys.executable, "-m", "pdrt", "chat", "--url", url)
    async with asyncio.TaskGroup() as tasks:
        over = tasks.create_task(chat.wait())
        stopped = tasks.create_task(asked.stop.wait())
        await asyncio.wait([over, stopped], return_when=asyncio.FIRST_COMPLETED)
        if not over.done():
            chat.terminate()
        stopped.cancel()
    asked.ignores_interrupts = False
