"""Real processes, real signals: what a killed or a stopped peer means for memory."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from asyncio.subprocess import PIPE
from asyncio.subprocess import Process as Child
from collections.abc import AsyncIterator

import pytest

from pdrt.data.commands import AdmitReceiver, ExpectHandshakes, OpenReceiver, SendBlocks
from pdrt.data.events import (
    Quiet,
    ReceiveFailed,
    ReceiverReady,
    SendEnded,
    SenderReady,
    SendFailed,
)
from pdrt.data.process import host_identity, this_process
from pdrt.data.transport.faulty import Fault
from pdrt.messages import Process
from tests.data.child import FAST, TOKENS
from tests.data.managers import HASH, SOURCE, Side, record, route_to, side

pytestmark = pytest.mark.e2e


async def spawn(*arguments: str) -> Child:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.data.child", *arguments, stdout=PIPE
    )


async def line(child: Child) -> str:
    assert child.stdout is not None
    return (await child.stdout.readline()).decode().strip()


async def kill(child: Child) -> None:
    if child.returncode is None:
        child.kill()
    await child.communicate()


@pytest.fixture
async def writer() -> AsyncIterator[Child]:
    child = await spawn("prefill")
    yield child
    await kill(child)


async def reader_of(writer: Child) -> Side:
    """Our decode side, with the writer in the middle of its transfer."""
    endpoint, pid, started = (await line(writer)).split()
    process = Process(host=host_identity(), pid=int(pid), started=int(started))
    d = side("decode", lambda _source: route_to(endpoint, process), timeouts=FAST)
    await d.start()
    deadline = time.monotonic() + 60
    d.manager.do(OpenReceiver(1, 0, SOURCE, deadline))
    await d.until(ReceiverReady, 1)
    d.manager.do(AdmitReceiver(1, 0, (3, 4, 5), 0, 0, TOKENS, HASH, deadline))
    assert await line(writer) == "writing"
    return d


async def test_a_writer_that_is_killed_fails_the_transfer_and_frees_its_blocks(
    writer: Child,
) -> None:
    d = await reader_of(writer)
    writer.send_signal(signal.SIGKILL)
    async with asyncio.timeout(2):
        failed = await d.until(ReceiveFailed, 1)
        await d.until(Quiet, 1)
    assert failed.problem.is_retryable
    assert "its process has died" in failed.problem.message
    assert (d.manager.stats().rooms, d.manager.stats().peers) == (0, {})
    await d.stop()


async def test_a_stopped_writer_keeps_its_blocks_until_it_goes_on(writer: Child) -> None:
    d = await reader_of(writer)
    writer.send_signal(signal.SIGSTOP)
    async with asyncio.timeout(2):
        failed = await d.until(ReceiveFailed, 1)
    assert failed.problem.code == "peer_lost"
    assert not d.has(Quiet, 1)
    assert d.manager.stats().quarantined == 1
    writer.send_signal(signal.SIGCONT)
    await d.until(Quiet, 1)
    assert d.manager.stats().quarantined == 0
    await d.stop()


async def test_a_stopped_writer_keeps_its_blocks_until_it_is_dead(writer: Child) -> None:
    d = await reader_of(writer)
    writer.send_signal(signal.SIGSTOP)
    await d.until(ReceiveFailed, 1)
    assert not d.has(Quiet, 1)
    writer.send_signal(signal.SIGKILL)
    await d.until(Quiet, 1)
    await d.stop()


async def test_a_killed_decode_process_ends_the_sends_to_it() -> None:
    p = side("prefill", lambda _source: pytest.fail("prefill asks nobody"), timeouts=FAST)
    await p.start()
    me = this_process()
    p.manager.do(ExpectHandshakes(1, 0, TOKENS, HASH, time.monotonic() + 60))
    child = await spawn("decode", p.endpoint, str(me.pid), str(me.started))
    assert await line(child) == "waiting"
    await p.until(SenderReady, 1)
    p.faulty.next_writes(Fault.STALL)
    p.manager.do(SendBlocks(1, 0, (0, 1, 2), 0, record(1, TOKENS)))
    await kill(child)
    failed = await p.until(SendFailed, 1)
    await p.until(SendEnded, 1)
    assert "its process has died" in failed.problem.message
    assert (p.manager.stats().rooms, p.manager.stats().peers) == (0, {})
    await p.stop()
