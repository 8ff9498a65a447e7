"""Layouts that are measured against each other: started on cores of their own, asked, ended.

One at a time, so that none has to share its cores with another's idle processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeAlias, TypeVar

from rich.console import Console

from pdrt.bench.bound import bound
from pdrt.bench.shell import run
from pdrt.config import NodeConfig, PortsSection
from pdrt.device.poolsize import host_bytes
from pdrt.folder import PrivateFolder
from pdrt.up.layout import Machine, Part, Value, Wanted, lay_out
from pdrt.up.place import free_port, new_key
from pdrt.up.processes import command
from pdrt.up.screen import Screen
from pdrt.up.shell import Asked, Cluster, Patience

T = TypeVar("T")
Ask: TypeAlias = Callable[[str], Awaitable[T]]  # given the router's URL
_FREE: Final = PortsSection(router=0, prefill=0, decode=0, hybrid=0, bootstrap=0, admin=0)
_PREFIX: Final = "pdrt-bench-"
# Both cores are full while prompts are computed: who is late to answer is not dead.
_PATIENT: Final[dict[str, Value]] = {"heartbeat_s": 10.0, "heartbeat_timeout_s": 10.0}


@dataclass(frozen=True, slots=True)
class Layout:
    """1P1D with a core each, or one hybrid instance on both cores with chunks of a size."""

    name: str
    chunk: int = 0  # tokens; 0: prefill and decode apart

    @property
    def is_apart(self) -> bool:
        return not self.chunk

    def cores(self, part: Part, usable: Sequence[int]) -> Sequence[int]:
        """Where a part runs, of two cores; the router runs wherever the client does."""
        match part.role:
            case "prefill":
                return usable[:1]
            case "decode":
                return usable[1:2]
            case "hybrid":
                return usable[:2]
            case "router":
                return usable

    def scheduler(self) -> dict[str, Value]:
        """Every prompt is computed, however often it was seen."""
        chunk = {"max_prefill_tokens": self.chunk} if self.chunk else {}
        return {"prefix_cache": False, **chunk}


@dataclass(frozen=True, slots=True)
class Ground:
    """What all layouts have in common."""

    model: Wanted  # its directory, dtype and size
    defaults: NodeConfig
    environ: Mapping[str, str]
    cores: Sequence[int]

    def parts(self, layout: Layout, key_file: Path) -> list[Part]:
        machine = Machine(cores=2, memory=host_bytes())
        pairs, hybrids = int(layout.is_apart), int(not layout.is_apart)
        wanted = replace(self.model, prefill=pairs, decode=pairs, hybrid=hybrids)
        parts = lay_out(wanted, _FREE, key_file, machine, free_port)
        for part in parts:
            part.tables["timeouts"] = dict(_PATIENT)
            if part.role != "router":
                part.tables["scheduler"] |= layout.scheduler()
        return parts

    def found_by(self, layout: Layout, ask: Ask[T]) -> T:
        """What `ask` found out of the running cluster. Raises PdrtError, and KeyboardInterrupt."""
        with contextlib.closing(PrivateFolder(_PREFIX)) as private:
            key_file = private.path / "key"
            key = new_key(key_file)

            def program(part: Part, conf: Path) -> list[str]:
                return bound(layout.cores(part, self.cores), command(part, conf))

            screen = Screen(Console(file=io.StringIO()))
            parts = self.parts(layout, key_file)
            cluster = Cluster(parts, private.path, key, screen, self.environ, program)
            found = list[T]()

            async def meanwhile(url: str, asked: Asked) -> None:
                found.extend(await _unless_stopped(ask(url), asked))

            patience = Patience(self.defaults.timeouts.startup_s, self.defaults.timeouts.drain_s)
            run(cluster.serve(patience, meanwhile))
        if not found:
            raise KeyboardInterrupt
        return found[0]


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
