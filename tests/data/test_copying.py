"""Copies of runs, whichever way they are done."""

from __future__ import annotations

import numpy as np
import pytest

from pdrt.data.layout import NO_RUNS, Runs
from pdrt.data.transport.copying import PIECE, copy, pieces


def random_runs(count: int, size: int, length: int) -> Runs:
    places = np.random.default_rng(5).permutation(size // length)[:count] * length
    targets = np.random.default_rng(6).permutation(size // length)[:count] * length
    return np.stack((places, targets, np.full(count, length)), axis=1).astype(np.int64)


@pytest.mark.parametrize(
    ("count", "length"), [(0, 1), (1, 8), (7, 64), (3000, 64), (40, 4096), (3, 70000)]
)
def test_every_run_arrives_and_nothing_else_changes(count: int, length: int) -> None:
    size = 1 << 20
    source = np.random.default_rng(1).integers(0, 255, size, dtype=np.uint8)
    target = np.zeros(size, dtype=np.uint8)
    expected = target.copy()
    runs = random_runs(count, size, length)
    for src, dst, part in runs.tolist():
        expected[dst : dst + part] = source[src : src + part]
    for piece in pieces(runs):
        copy(piece, source.ctypes.data, target.ctypes.data)
    assert np.array_equal(target, expected)


@pytest.mark.parametrize(
    "runs",
    [
        [(0, 0, 3 * PIECE + 5)],
        [(0, 0, PIECE), (PIECE, PIECE, 1)],
        [(n * 10, n * 20, 10) for n in range(5000)],
        [(5, 7, 9), (0, 1 << 30, 2 * PIECE), (1, 2, 3)],
    ],
)
def test_pieces_are_small_and_say_the_same(runs: list[tuple[int, int, int]]) -> None:
    whole = np.array(runs, dtype=np.int64)
    parts = list(pieces(whole))
    assert all(len(part) <= 1024 for part in parts)
    assert all(int(part[:, 2].sum()) <= 2 * PIECE for part in parts)
    joined: list[list[int]] = []
    for src, dst, length in np.concatenate(parts).tolist():
        last = joined[-1] if joined else None
        is_same_run = last and last[0] + last[2] == src and last[1] + last[2] == dst
        if is_same_run and last and last[2] % PIECE == 0:
            last[2] += length
        else:
            joined.append([src, dst, length])
    assert sum(run[2] for run in joined) == sum(length for *_, length in runs)
    assert joined[0][:2] == list(runs[0][:2])


def test_no_runs_are_no_pieces() -> None:
    assert list(pieces(NO_RUNS)) == []
