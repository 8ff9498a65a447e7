"""Ranks add up integers; a rank that is gone, stuck or never comes is told to all others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from pdrt.device.sums import Sums, meet
from pdrt.errors import PeerLost

SOON = 0.2


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def group(threads: ThreadPoolExecutor, folder: Path, size: int, timeout_s: float) -> list[Sums]:
    """The last rank comes first."""
    coming = [
        threads.submit(meet, rank, size, folder / "r", timeout_s) for rank in reversed(range(size))
    ]
    return [each.result() for each in reversed(coming)]


def summed(
    threads: ThreadPoolExecutor, ranks: list[Sums], values: Callable[[int], list[int]]
) -> list[Future[list[int]]]:
    return [threads.submit(rank.of, values(number)) for number, rank in enumerate(ranks)]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_rank_has_the_same_sums(
    threads: ThreadPoolExecutor, tmp_path: Path, size: int
) -> None:
    ranks = group(threads, tmp_path, size, 10)
    for count in (1, 300, 4096):

        def values(rank: int, count: int = count) -> list[int]:
            return [rank + i for i in range(count)]

        want = [sum(range(size)) + size * i for i in range(count)]
        said = summed(threads, ranks, values)
        assert [each.result() for each in said] == [want] * size
    for rank in ranks:
        rank.close()


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_a_rank_that_is_gone_is_missed_by_all_others_at_once(
    threads: ThreadPoolExecutor, tmp_path: Path, gone: int
) -> None:
    ranks = group(threads, tmp_path, 3, 60)
    ranks.pop(gone).close()
    for each in summed(threads, ranks, lambda _rank: [1]):
        with pytest.raises(PeerLost, match="a rank died or is stuck"):
            each.result()


@pytest.mark.parametrize("stuck", [0, 1, 2])
def test_a_rank_that_is_stuck_is_missed_when_the_time_is_over(
    threads: ThreadPoolExecutor, tmp_path: Path, stuck: int
) -> None:
    ranks = group(threads, tmp_path, 3, SOON)
    late = ranks.pop(stuck)
    for each in summed(threads, ranks, lambda _rank: [1]):
        with pytest.raises(PeerLost, match=r"tensor-parallel rank \d of 3"):
            each.result()
    late.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_never_comes_is_not_awaited_for_ever(rank: int, tmp_path: Path) -> None:
    with pytest.raises(PeerLost, match=f"rank {rank} of 2: the others did not come"):
        meet(rank, 2, tmp_path / "r", SOON)


def test_ranks_that_ask_for_different_sums_are_no_group(
    threads: ThreadPoolExecutor, tmp_path: Path
) -> None:
    ranks = group(threads, tmp_path, 2, 10)
    for each in summed(threads, ranks, lambda rank: [1] * (rank + 1)):
        with pytest.raises(PeerLost):
            each.result()
