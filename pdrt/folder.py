"""A directory that only we can read and that does not outlive us, however we end.

A lock in it says that its owner lives: what an earlier process left when it was killed is
removed by the next one that makes such a folder.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Final

_YOUNG_S: Final = 10.0  # made, and perhaps not locked yet
_LOCK: Final = "lock"


class PrivateFolder:
    """Made at once, mode 0700; `close` removes it with all that is in it."""

    def __init__(self, prefix: str) -> None:
        for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
            _remove_if_left(left)
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        self._lock = (self.path / _LOCK).open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _remove_if_left(folder: Path) -> None:
    try:
        with (folder / _LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            told = folder.stat()
            if told.st_uid == os.getuid() and time.time() - told.st_mtime > _YOUNG_S:
                shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        return  # in use, or not ours
