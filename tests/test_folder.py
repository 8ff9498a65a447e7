"""A private folder goes with its owner, and what a killed owner left goes with the next one."""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
from pathlib import Path

import pytest

from pdrt.folder import PrivateFolder

PREFIX = "pdrt-test-"


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_the_folder_is_private_and_goes_away(temporary: Path) -> None:
    one = PrivateFolder(PREFIX)
    (one.path / "socket").touch()
    assert one.path.parent == temporary
    assert stat.S_IMODE(one.path.stat().st_mode) == 0o700
    other = PrivateFolder(PREFIX)
    assert one.path.exists()
    assert other.path != one.path
    for folder in (one, other):
        folder.close()
    assert list(temporary.iterdir()) == []


def test_what_a_killed_one_left_is_removed_and_what_lives_is_not(temporary: Path) -> None:
    left, living, young, foreign = (temporary / f"{PREFIX}{name}" for name in "abcd")
    for folder in (left, living, young, foreign):
        folder.mkdir()
    for folder in (left, living, young):
        (folder / "lock").touch()
    for folder in (left, living, foreign):
        os.utime(folder, (0, 0))
    with (living / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        PrivateFolder(PREFIX).close()
    assert [folder.exists() for folder in (left, living, young, foreign)] == [
        False,
        True,
        True,
        True,
    ]
