"""A process of this host whose only purpose is to be a peer's, and to die when a test wants it."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE
from asyncio.subprocess import Process as Child
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pdrt.data.process import host_identity, started_ticks
from pdrt.messages import Process


@asynccontextmanager
async def mortal() -> AsyncIterator[tuple[Child, Process]]:
    """What to kill, and what to tell of it. The memory that it is said to have is elsewhere."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-S", "-c", "input()", stdin=PIPE, stdout=PIPE
    )
    try:
        ticks = started_ticks(child.pid)
        assert ticks is not None
        yield child, Process(host=host_identity(), pid=child.pid, started=ticks)
    finally:
        if child.returncode is None:
            child.kill()
        await child.communicate()
