"""Where the cluster stands: free ports, and a private directory that does not outlive it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from pdrt.errors import ConfigError
from pdrt.keys import ClusterKey
from pdrt.up.layout import Part

_PREFIX: Final = "pdrt-up-"
_YOUNG_S: Final = 10.0


def check_free(parts: Sequence[Part]) -> None:
    """Raises ConfigError naming address and port of what is taken already."""
    for part in parts:
        for port in part.ports:
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((part.host, port))
                except OSError as error:
                    raise ConfigError(
                        f"{part.name} needs port {port} on {part.host}: {error.strerror}; stop what"
                        " uses it (another `pdrt up`?), or choose another with"
                        f" PDRT_PORTS_{part.role.upper()} or PDRT_PORTS_BOOTSTRAP (0: a free one)"
                    ) from error


def free_port(host: str) -> int:
    """A port that nobody has just now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """A directory for keys, configs and logs that only we can read, removed at the end.

    A lock on it says that we live: what an earlier `pdrt up` left when it was killed is removed.
    """
    parent = Path(tempfile.gettempdir())
    for left in parent.glob(f"{_PREFIX}*"):
        _remove_if_left(left)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))  # mode 0700
    try:
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_if_left(folder: Path) -> None:
    try:
        with (folder / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            told = folder.stat()
            if told.st_uid == os.getuid() and time.time() - told.st_mtime > _YOUNG_S:
                shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        return  # in use, or not ours


def new_key(file: Path) -> ClusterKey:
    """A fresh cluster key, written where only we can read it."""
    text = secrets.token_hex(32)
    file.touch(mode=0o600)
    file.write_text(text + "\n")
    return ClusterKey.from_text(text)
