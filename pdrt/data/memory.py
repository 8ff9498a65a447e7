"""The memory that KV lives in: anonymous, shared by handle, gone with its last user.

A memfd has no name in any file system, so kill -9 leaves nothing behind. It is sealed against
shrinking, so a writer that has mapped it can never be killed by SIGBUS. Who maps it checks
that it is what the handle says and still belongs to the process that the handle names.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
from contextlib import suppress
from dataclasses import dataclass

import msgpack
import numpy as np

from pdrt.data.process import is_same_host, started_ticks
from pdrt.errors import TransferFailed
from pdrt.messages import KvLayout, Process, Region

SLOT_BYTES = 64
SUM_BYTES = 4
PROBE_BYTES = 1 << 20
PAGE = 4096
_NAME = "pdrt-kv"


@dataclass(frozen=True, slots=True)
class MemoryHandle:
    """Where the memory of another process is found: a descriptor of that process."""

    pid: int
    fd: int
    inode: int
    size: int

    def pack(self) -> bytes:
        packed: bytes = msgpack.packb([self.pid, self.fd, self.inode, self.size])
        return packed

    @staticmethod
    def unpack(data: bytes) -> MemoryHandle:
        """Raises TransferFailed for anything that is no handle."""
        try:
            fields = msgpack.unpackb(data, max_array_len=4)
        except (ValueError, msgpack.UnpackException) as error:
            raise TransferFailed(f"no memory handle: {error}") from error
        if not (isinstance(fields, list) and [type(f) for f in fields] == [int] * 4):
            raise TransferFailed("no memory handle: four numbers wanted")
        return MemoryHandle(*fields)


class HostMemory:
    """Our own memory: touched once, sealed, and described by `handle`."""

    probe_at = probe_bytes = 0  # where peers may try the way

    def __init__(self, size: int) -> None:
        self.size = max(PAGE, _paged(size))
        self.fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, self.size)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        mapped = mmap.mmap(self.fd, self.size)
        with suppress(OSError):  # only where the kernel allows huge pages for shared memory
            mapped.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(mapped)
        self.array = np.frombuffer(mapped, dtype=np.uint8)
        self.array[::PAGE] = 0  # first touches are slow: all of them now, none under load

    @property
    def address(self) -> int:
        return int(self.array.ctypes.data)

    def handle(self) -> bytes:
        inode = os.fstat(self.fd).st_ino
        return MemoryHandle(os.getpid(), self.fd, inode, self.size).pack()

    def close(self) -> None:
        """Nobody can map it from now on; it is unmapped here when the last view is dropped."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class PeerMemory:
    """Another process's memory, mapped here until the last reference to this object goes."""

    def __init__(self, handle: MemoryHandle, process: Process) -> None:
        """Map it, pages and all (this may take a while). Raises TransferFailed."""
        if handle.pid != process.pid or not is_same_host(process):
            raise TransferFailed(f"pid {handle.pid} cannot be reached through shared memory")
        fd = _open(handle)
        try:
            _check(fd, handle)
            if started_ticks(process.pid) != process.started:
                raise TransferFailed(f"pid {handle.pid} is another process now")
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            self.array = np.frombuffer(mmap.mmap(fd, handle.size, flags=flags), dtype=np.uint8)
        except (OSError, ValueError, OverflowError) as error:
            raise TransferFailed(f"memory of pid {handle.pid} cannot be mapped: {error}") from error
        finally:
            os.close(fd)

    @property
    def size(self) -> int:
        return len(self.array)

    @property
    def address(self) -> int:
        return int(self.array.ctypes.data)


def _open(handle: MemoryHandle) -> int:
    path = f"/proc/{handle.pid}/fd/{handle.fd}"
    try:
        if not os.readlink(path).startswith(f"/memfd:{_NAME}"):  # never open what is not ours
            raise TransferFailed(f"{path} is no KV memory")
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise TransferFailed(f"{path} cannot be opened: {error.strerror}") from error


def _check(fd: int, handle: MemoryHandle) -> None:
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_ino != handle.inode:
        raise TransferFailed(f"memory of pid {handle.pid} is not the one that was described")
    if found.st_size != handle.size:
        raise TransferFailed(
            f"memory of pid {handle.pid} has {found.st_size} bytes, not {handle.size}"
        )
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise TransferFailed(f"memory of pid {handle.pid} could shrink under the writer")


class PoolMemory(HostMemory):
    """A rank's memory, part by part, page-aligned: slots, probe area, checksums, KV pool.

    `slots` are rows of `writers` metadata slots, one for each rank that may write to us.
    """

    probe_bytes = PROBE_BYTES

    def __init__(self, layout: KvLayout, blocks: int, slots: int, writers: int = 1) -> None:
        self.layout, self.blocks, self.slots, self.writers = layout, blocks, slots, writers
        self.probe_at = _paged(slots * writers * SLOT_BYTES)
        self.sums_at = self.probe_at + _paged(PROBE_BYTES)
        self.pool_at = self.sums_at + _paged(blocks * layout.kv_heads * SUM_BYTES)
        super().__init__(self.pool_at + blocks * layout.block_bytes)

    @property
    def slots_view(self) -> memoryview:
        return self.view[: self.slots * self.writers * SLOT_BYTES]

    @property
    def pool_view(self) -> memoryview:
        return self.view[self.pool_at : self.pool_at + self.blocks * self.layout.block_bytes]

    def region(self, offers: dict[str, bytes]) -> Region:
        """How a peer is told of this memory; `offers` as a transport makes them."""
        return Region(
            offers=offers,
            size=self.size,
            slots_at=0,
            slots=self.slots * self.writers,
            pool_at=self.pool_at,
            blocks=self.blocks,
            sums_at=self.sums_at,
            probe_at=self.probe_at,
            probe_bytes=self.probe_bytes,
        )


def _paged(size: int) -> int:
    return -(-size // PAGE) * PAGE
