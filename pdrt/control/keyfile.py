"""The file of API keys on disk: replaced whole, 0600, by one writer at a time."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeAlias

from pdrt.control.apikeys import KeyRecord, records_in, text_of
from pdrt.errors import ConfigError
from pdrt.settings import read_toml

Change: TypeAlias = Callable[[Sequence[KeyRecord]], Sequence[KeyRecord]]


def read_keys(path: Path) -> Sequence[KeyRecord]:
    """Raises ConfigError for a file that is not there or not right."""
    return records_in(read_toml(path), str(path))


def change_keys(path: Path, change: Change) -> None:
    """Read, change and replace. A reader finds the old file or the new one. Raises ConfigError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _locked(path):
            _replace(path, text_of(change(read_keys(path) if path.exists() else [])))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error}") from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.with_name(path.name + ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _replace(path: Path, text: str) -> None:
    fresh = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as out:
            with suppress(FileNotFoundError, PermissionError):  # it stays whose it was
                owner = path.stat()
                os.fchown(out.fileno(), owner.st_uid, owner.st_gid)
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
