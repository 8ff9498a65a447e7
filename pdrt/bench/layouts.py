"""Layouts that are measured against each other: started on cores of their own, asked, ended.

One at a time, so that none has to share its cores with another's idle processes. Cores are
divided equally among a layout's workers; where there are more workers than cores, each computes
with one thread and all share all cores. Router and client run on any of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, TypeAlias, TypeVar

from rich.console import Console

from pdrt.bench.bound import bound
from pdrt.bench.shell import run
from pdrt.config import NodeConfig, PortsSection
from pdrt.device.poolsize import host_bytes
from pdrt.errors import PeerLost, Unavailable
from pdrt.folder import PrivateFolder
from pdrt.sim.arrangement import Arrangement
from pdrt.up.layout import Machine, Part, Value, Wanted, lay_out
from pdrt.up.place import free_port, new_key
from pdrt.up.processes import command
from pdrt.up.screen import Screen
from pdrt.up.shell import Asked, Cluster, Patience

T = TypeVar("T")
Ask: TypeAlias = Callable[[str], Awaitable[T]]  # given the router's URL
_FREE: Final = PortsSection(router=0, prefill=0, decode=0, hybrid=0, bootstrap=0, admin=0)
_WIDE: Final = 10_000  # so that no line is cut in two
_MOST_WORDS: Final = 600  # characters
_PREFIX: Final = "pdrt-bench-"
# Both cores are full while prompts are computed: who is late to answer is not dead.
_PATIENT: Final[dict[str, Value]] = {"heartbeat_s": 10.0, "heartbeat_timeout_s": 10.0}


@dataclass(frozen=True, slots=True)
class Layout:
    """Workers in an arrangement, and the chunks that they compute prompts in."""

    arrangement: Arrangement
    chunk: int = 0  # tokens; 0: the default

    @property
    def name(self) -> str:
        return self.arrangement.name

    @property
    def is_apart(self) -> bool:
        return self.arrangement.is_apart

    def of(self, model: Wanted) -> Wanted:
        """What `pdrt up` would be asked for."""
        its = self.arrangement
        return replace(
            model, prefill=its.prefills, decode=its.decodes, hybrid=its.hybrids, hybrid_dp=its.dp
        )

    def scheduler(self) -> dict[str, Value]:
        """Every prompt is computed, however often it was seen."""
        chunk: dict[str, Value] = {"max_prefill_tokens": self.chunk} if self.chunk else {}
        return {"prefix_cache": False, **chunk}


def placed(parts: Sequence[Part], usable: Sequence[int]) -> dict[str, Sequence[int]]:
    """The cores of each part, by its name: equal shares of a worker, or all for all."""
    each = len(usable) // max(1, sum(part.workers for part in parts if part.role != "router"))
    found, at = dict[str, Sequence[int]](), 0
    for part in parts:
        if part.role == "router" or not each:
            found[part.name] = usable
        else:
            found[part.name] = usable[at : at + each * part.workers]
            at += each * part.workers
    return found


@dataclass(frozen=True, slots=True)
class Ground:
    """What all layouts have in common."""

    model: Wanted  # its directory, dtype and size
    defaults: NodeConfig
    environ: Mapping[str, str]
    cores: Sequence[int]
    device: Mapping[str, Value] = field(default_factory=dict)  # settings of it

    def parts(self, layout: Layout, key_file: Path) -> list[Part]:
        machine = Machine(cores=len(self.cores), memory=host_bytes())
        parts = lay_out(layout.of(self.model), _FREE, key_file, machine, free_port)
        cores = placed(parts, self.cores)
        for part in parts:
            part.tables["timeouts"] = dict(_PATIENT)
            if part.role != "router":
                part.tables["scheduler"] |= layout.scheduler()
                part.tables["device"] |= self.device
                if part.workers > 1 and layout.arrangement.workers <= len(self.cores):
                    part.tables["device"]["cores"] = list(cores[part.name])
        return parts

    def found_by(self, layout: Layout, ask: Ask[T]) -> T:
        """What `ask` found out of the running cluster. Raises PdrtError, and KeyboardInterrupt."""
        with contextlib.closing(PrivateFolder(_PREFIX)) as private:
            key_file = private.path / "key"
            key = new_key(key_file)

            said = io.StringIO()
            screen = Screen(Console(file=said, width=_WIDE))
            parts = self.parts(layout, key_file)
            cores = placed(parts, self.cores)

            def program(part: Part, conf: Path) -> list[str]:
                return bound(cores[part.name], command(part, conf))

            cluster = Cluster(parts, private.path, key, screen, self.environ, program)
            found = list[T]()

            async def meanwhile(url: str, asked: Asked) -> None:
                found.extend(await _unless_stopped(ask(url), asked))

            patience = Patience(self.defaults.timeouts.startup_s, self.defaults.timeouts.drain_s)
            try:
                run(cluster.serve(patience, meanwhile))
            except PeerLost as error:
                raise Unavailable(f"{error}: {last_words(said.getvalue())}") from error
        if not found:
            raise KeyboardInterrupt
        return found[0]


def last_words(said: str) -> str:
    """The last error that a part told, or what it said last."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error:")]
    return (errors or lines or ["it said nothing"])[-1][:_MOST_WORDS]


async def _unless_stopped(asking: Awaitable[T], asked: Asked) -> list[T]:
    """Nothing when it was interrupted."""

    async def ask() -> T:
        return await asking

    async with asyncio.TaskGroup() as tasks:
        found = tasks.create_task(ask())
        stopped = tasks.create_task(asked.stop.wait())
        await asyncio.wait([found, stopped], return_when=asyncio.FIRST_COMPLETED)
        if not found.done():
            found.cancel()
        stopped.cancel()
    return [] if found.cancelled() else [found.result()]
