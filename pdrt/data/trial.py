"""64 MiB through one transport between two memories of one process: what `pdrt doctor` shows.

In a process of its own: what a foreign library prints, breaks or never ends stays there.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from typing import Final

import numpy as np

from pdrt.config import TransferSection
from pdrt.data.memory import PoolMemory
from pdrt.data.process import this_process
from pdrt.data.transport.choose import open_transport
from pdrt.data.transport.promise import Ended, Key, Peer, Transport, Write
from pdrt.errors import PdrtError, TransferFailed
from pdrt.keys import ClusterKey
from pdrt.messages import KvLayout

LIMIT_S: Final = 8.0
_MARK: Final = "pdrt-trial "  # before our line, among what foreign libraries print
_LAYOUT: Final = KvLayout(block_size=16, dtype="uint8", layers=16, kv_heads=1, head_dim=1024)
_BLOCKS: Final = (64 << 20) // _LAYOUT.block_bytes
_KEY: Final[Key] = (1, 0)


async def trial(config: TransferSection, local_ip: str) -> float:
    """GB/s of one transport between two memories of this process. Raises PdrtError."""
    key = ClusterKey(secrets.token_bytes(32))
    here, there = memory(), memory()
    writer = open_transport(config, here, local_ip, key)
    target = open_transport(config, there, local_ip, key)
    try:
        return await move(writer, here, target, there)
    finally:
        await writer.close()
        await target.close()


def memory() -> PoolMemory:
    return PoolMemory(_LAYOUT, _BLOCKS, 1)


async def move(writer: Transport, here: PoolMemory, target: Transport, there: PoolMemory) -> float:
    """GB/s of the second of two writes, whose bytes were looked at. Raises PdrtError."""
    here.pool_view[:] = np.random.default_rng(7).bytes(len(here.pool_view))
    target.admit(_KEY, np.array([[0, there.size]], dtype=np.int64))
    await writer.attach(Peer("doctor", this_process(), there.region(target.offers)))
    ends, runs, seconds = writer.ends(), _scattered(here.pool_at), 0.0
    for number in (1, 2):
        there.array[there.pool_at :] = 0
        began = time.perf_counter()
        writer.start(Write(number, "doctor", runs, key=_KEY))
        await _well_ended(ends, number)
        seconds = time.perf_counter() - began
    if here.pool_view != there.pool_view:
        raise TransferFailed("what arrived is not what was sent")
    return len(here.pool_view) / seconds / 1e9


def _scattered(pool_at: int) -> np.typing.NDArray[np.int64]:
    """Each block to its own place, in an order in which no two are neighbours."""
    size = _LAYOUT.block_bytes
    offsets = pool_at + np.arange(_BLOCKS, dtype=np.int64).reshape(2, -1).T.ravel() * size
    return np.stack((offsets, offsets, np.full(_BLOCKS, size)), axis=1)


async def _well_ended(ends: AsyncIterator[Ended], number: int) -> None:
    async for end in ends:
        if end.id == number:
            if end.error is not None:
                raise TransferFailed(end.error)
            return
    raise TransferFailed("the transport has ended")


def try_out(config: TransferSection, local_ip: str) -> float:
    """`trial` in a new process. Raises TransferFailed, or TimeoutError after LIMIT_S."""
    command = [sys.executable, "-m", "pdrt.data.trial", config.model_dump_json(), local_ip]
    try:
        done = subprocess.run(command, capture_output=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"not finished within {LIMIT_S:g} s") from None
    for line in done.stdout.decode(errors="replace").splitlines():
        if line.startswith(_MARK):
            told = json.loads(line.removeprefix(_MARK))
            if "error" in told:
                raise TransferFailed(told["error"])
            return float(told["gb_per_s"])
    last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["nothing was said"]
    raise TransferFailed(f"the trial ended with status {done.returncode}: {last[0]}")


def main(config: str, local_ip: str) -> None:
    told: dict[str, float | str]
    try:
        section = TransferSection.model_validate_json(config)
        told = {"gb_per_s": asyncio.run(trial(section, local_ip))}
    except PdrtError as error:
        told = {"error": str(error)}
    sys.stdout.write(f"\n{_MARK}{json.dumps(told)}\n")
    sys.stdout.flush()
    os._exit(0)  # no foreign thread or destructor has a say in how we end


if __name__ == "__main__":
    main(*sys.argv[1:])
