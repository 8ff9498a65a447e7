"""The other process of a two-process test: one side of a transfer that never ends by itself.

`prefill` waits for room 1, sends one chunk, and then holds the last write back.
`decode ENDPOINT PID STARTED` opens and admits room 1 and waits for ever.
"""

from __future__ import annotations

import asyncio
import sys
import time

from pdrt import telemetry
from pdrt.config import TimeoutsSection
from pdrt.data.commands import AdmitReceiver, ExpectHandshakes, OpenReceiver, SendBlocks
from pdrt.data.events import ReceiverReady, SenderReady
from pdrt.data.process import host_identity, this_process
from pdrt.data.transport.faulty import Fault
from pdrt.messages import Process, Route, Source
from tests.data.managers import HASH, SOURCE, record, route_to, side

TOKENS = 40
FAST = TimeoutsSection(heartbeat_s=0.2, heartbeat_timeout_s=0.15)


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


async def prefill() -> None:
    p = side("prefill", _nobody, timeouts=FAST)
    await p.start()
    me = this_process()
    p.manager.do(ExpectHandshakes(1, 0, TOKENS, HASH, time.monotonic() + 60))
    p.faulty.next_writes(None, Fault.STALL)
    say(p.endpoint, me.pid, me.started)
    await p.until(SenderReady, 1)
    p.manager.do(SendBlocks(1, 0, (0, 1), 0, None))
    p.manager.do(SendBlocks(1, 0, (2,), 2, record(1, TOKENS)))
    while not p.faulty.held:
        await asyncio.sleep(0)
    say("writing")
    await asyncio.Event().wait()


async def decode(endpoint: str, pid: int, started: int) -> None:
    process = Process(host=host_identity(), pid=pid, started=started)
    d = side("decode", lambda _source: route_to(endpoint, process), timeouts=FAST)
    await d.start()
    deadline = time.monotonic() + 60
    d.manager.do(OpenReceiver(1, 0, SOURCE, deadline))
    await d.until(ReceiverReady, 1)
    d.manager.do(AdmitReceiver(1, 0, (3, 4, 5), 0, 0, TOKENS, HASH, deadline))
    say("waiting")
    await asyncio.Event().wait()


def _nobody(_source: Source) -> Route:
    raise AssertionError("prefill asks nobody")


if __name__ == "__main__":
    telemetry.configure("error")  # on stderr: what we say is read
    _, role, *rest = sys.argv
    asyncio.run(prefill() if role == "prefill" else decode(rest[0], int(rest[1]), int(rest[2])))
