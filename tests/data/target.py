"""The other process of the contract suite: a decode rank's memory that may be killed or stopped.

`python -m tests.data.target NAME` prints what a writer needs, then waits for the end of stdin.
"""

from __future__ import annotations

import asyncio
import os
import sys

import msgpack

from pdrt.data.process import this_process
from pdrt.data.transport.promise import Peer
from pdrt.messages import Process, Region
from tests.data.transports import KEY, everywhere, pool, target


async def serve(name: str) -> None:
    memory = pool()
    transport = target(name, memory)
    transport.admit(KEY, everywhere(memory))
    sys.stdout.write(_packed(memory.region(transport.offers)) + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(os.read, 0, 1)
    await transport.close()


def _packed(region: Region) -> str:
    process = this_process()
    fields = {name: getattr(region, name) for name in Region.__dataclass_fields__}
    packed: bytes = msgpack.packb([process.host, process.pid, process.started, fields])
    return packed.hex()


def parsed(line: str, name: str) -> Peer:
    """The peer that a child's line describes."""
    host, pid, started, fields = msgpack.unpackb(bytes.fromhex(line))
    return Peer(name, Process(host=host, pid=pid, started=started), Region(**fields))


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
