"""Processes are told apart for good, and their death is known at once."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from dataclasses import replace

from pdrt.data.process import DeathWatch, is_same_host, started_ticks, this_process
from pdrt.messages import Process


def sleeper() -> tuple[subprocess.Popen[bytes], Process]:
    """A child that waits to be killed."""
    code = "import sys; sys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    started = started_ticks(child.pid)
    assert started is not None
    return child, Process(host=this_process().host, pid=child.pid, started=started)


def reap(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.communicate()


def test_this_process_has_a_name() -> None:
    me = this_process()
    assert me.pid == os.getpid()
    assert me.started == started_ticks(os.getpid())
    assert is_same_host(me)
    assert not is_same_host(replace(me, host="elsewhere"))


def test_a_process_that_is_not_has_no_start() -> None:
    assert started_ticks(2**22 + 1) is None


async def test_a_killed_process_is_told_once() -> None:
    told: asyncio.Queue[Process] = asyncio.Queue()
    watch = DeathWatch(told.put_nowait)
    child, process = sleeper()
    assert watch.watch(process)
    assert watch.watch(process)  # twice is once
    child.send_signal(signal.SIGKILL)
    assert await told.get() == process
    reap(child)
    watch.close()
    assert told.empty()


async def test_a_stopped_process_is_not_dead() -> None:
    told: asyncio.Queue[Process] = asyncio.Queue()
    watch = DeathWatch(told.put_nowait)
    child, process = sleeper()
    watch.watch(process)
    child.send_signal(signal.SIGSTOP)
    for _ in range(50):
        await asyncio.sleep(0)
    assert told.empty()
    reap(child)
    assert await told.get() == process
    watch.close()


async def test_one_that_is_dead_already_is_told_too() -> None:
    told: asyncio.Queue[Process] = asyncio.Queue()
    child, process = sleeper()
    reap(child)
    watch = DeathWatch(told.put_nowait)
    assert watch.watch(process)
    assert await told.get() == process
    watch.close()


async def test_a_reused_pid_is_not_taken_for_the_process() -> None:
    told: asyncio.Queue[Process] = asyncio.Queue()
    watch = DeathWatch(told.put_nowait)
    earlier = replace(this_process(), started=1)  # had our pid before us
    assert watch.watch(earlier)
    assert await told.get() == earlier
    watch.close()


async def test_who_lives_on_another_host_cannot_be_watched() -> None:
    watch = DeathWatch(lambda _process: None)
    assert not watch.watch(replace(this_process(), host="elsewhere"))
    watch.close()


async def test_nothing_stays_open_after_close() -> None:
    before = len(os.listdir("/proc/self/fd"))
    watch = DeathWatch(lambda _process: None)
    child, process = sleeper()
    watch.watch(process)
    watch.close()
    reap(child)
    assert len(os.listdir("/proc/self/fd")) <= before
