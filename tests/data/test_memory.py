"""KV memory is shared by handle, sealed, and reached only when it is what was described."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import msgpack
import pytest

from pdrt.data.memory import PAGE, PROBE_BYTES, HostMemory, MemoryHandle, PeerMemory, PoolMemory
from pdrt.data.process import this_process
from pdrt.errors import TransferFailed
from pdrt.messages import KvLayout

LAYOUT = KvLayout(block_size=4, dtype="float32", layers=2, kv_heads=1, head_dim=8)


@pytest.fixture
def memory() -> Iterator[HostMemory]:
    memory = HostMemory(3 * PAGE + 1)
    yield memory
    memory.close()


def test_what_is_written_through_the_mapping_is_seen_by_the_owner(memory: HostMemory) -> None:
    peer = PeerMemory(MemoryHandle.unpack(memory.handle()), this_process())
    assert peer.size == memory.size == 4 * PAGE
    peer.array[5000] = 77
    assert memory.view[5000] == 77


def test_the_mapping_outlives_its_owner(memory: HostMemory) -> None:
    peer = PeerMemory(MemoryHandle.unpack(memory.handle()), this_process())
    memory.close()
    peer.array[:] = 1  # no SIGBUS, no harm


def test_memory_cannot_shrink_under_a_writer(memory: HostMemory) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(memory.fd, PAGE)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"inode": 1}, "not the one that was described"),
        ({"size": PAGE}, f"has {4 * PAGE} bytes, not {PAGE}"),
        ({"fd": 9999}, "cannot be opened"),
        ({"pid": 1}, "cannot be reached"),
        ({"pid": -1}, "cannot be reached"),
        ({"fd": 0}, "is no KV memory|cannot be opened"),
    ],
)
def test_a_handle_that_does_not_fit_is_refused(
    memory: HostMemory, change: dict[str, int], reason: str
) -> None:
    handle = replace(MemoryHandle.unpack(memory.handle()), **change)
    with pytest.raises(TransferFailed, match=reason):
        PeerMemory(handle, this_process())


def test_a_later_process_with_the_same_pid_is_refused(memory: HostMemory) -> None:
    other = replace(this_process(), started=1)
    with pytest.raises(TransferFailed, match="another process now"):
        PeerMemory(MemoryHandle.unpack(memory.handle()), other)


def test_a_process_of_another_host_cannot_be_reached(memory: HostMemory) -> None:
    other = replace(this_process(), host="elsewhere")
    with pytest.raises(TransferFailed, match="cannot be reached"):
        PeerMemory(MemoryHandle.unpack(memory.handle()), other)


def test_only_sealed_memory_of_ours_is_mapped() -> None:
    """A peer must not make us open what it likes, nor memory that it can pull away."""
    fd = os.memfd_create("pdrt-kv")
    os.ftruncate(fd, PAGE)
    handle = MemoryHandle(os.getpid(), fd, os.fstat(fd).st_ino, PAGE)
    try:
        with pytest.raises(TransferFailed, match="could shrink"):
            PeerMemory(handle, this_process())
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"junk",
        b"\xc1",
        msgpack.packb({}),
        msgpack.packb([1, 2, 3]),
        msgpack.packb([1, 2, 3, "x"]),
        msgpack.packb([True, 1, 1, 1]),
        msgpack.packb([1] * 9),
    ],
)
def test_junk_is_no_handle(data: bytes) -> None:
    with pytest.raises(TransferFailed, match="no memory handle"):
        MemoryHandle.unpack(data)


def test_slots_and_pool_do_not_overlap_and_the_region_says_where_they_are() -> None:
    memory = PoolMemory(LAYOUT, blocks=3, slots=65)
    region = memory.region({"shm": memory.handle()})
    assert len(memory.slots_view) == 65 * 64
    assert len(memory.pool_view) == 3 * LAYOUT.block_bytes
    assert (region.slots, region.probe_at, region.probe_bytes) == (65, 2 * PAGE, PROBE_BYTES)
    assert region.sums_at == region.probe_at + PROBE_BYTES
    assert region.pool_at == region.sums_at + PAGE
    assert region.size == memory.size >= region.pool_at + 3 * LAYOUT.block_bytes
    memory.pool_view[0] = 9
    assert memory.view[region.pool_at] == 9
    memory.close()


def test_nothing_is_left_behind_by_a_killed_owner() -> None:
    """Anonymous memory has no name that could stay in /dev/shm."""
    before = set(os.listdir("/dev/shm"))
    code = "from pdrt.data.memory import HostMemory; import os; HostMemory(1 << 20); os._exit(9)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 9
    assert set(os.listdir("/dev/shm")) <= before
