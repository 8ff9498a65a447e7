"""Ranks add up integers; a rank that is gone, stuck or never comes is told to all others."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from pdrt.device import sums
from pdrt.device.places import Rendezvous, TcpPlace
from pdrt.device.sums import Line, Sums, meet
from pdrt.errors import PeerLost

SOON = 0.2
SECRET = b"known to this group alone"


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def places(way: str, folder: Path, size: int) -> list[Rendezvous]:
    """For each rank; on tcp each has an address of its own."""
    if way == "file":
        return [folder / "r"] * size
    first = TcpPlace.open("127.0.0.1", SECRET)
    others = [TcpPlace("127.0.0.1", first.port, f"127.0.0.{n + 1}", SECRET) for n in range(1, size)]
    return [first, *others]


def group(
    threads: ThreadPoolExecutor, folder: Path, size: int, timeout_s: float, way: str = "file"
) -> list[Sums]:
    """The last rank comes first."""
    where = places(way, folder, size)
    coming = [
        threads.submit(meet, rank, size, where[rank], timeout_s) for rank in reversed(range(size))
    ]
    return [each.result() for each in reversed(coming)]


def summed(
    threads: ThreadPoolExecutor, ranks: list[Sums], values: Callable[[int], list[int]]
) -> list[Future[list[int]]]:
    return [threads.submit(rank.of, values(number)) for number, rank in enumerate(ranks)]


@pytest.mark.parametrize("way", ["file", "tcp"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_rank_has_the_same_sums(
    threads: ThreadPoolExecutor, tmp_path: Path, size: int, way: str
) -> None:
    ranks = group(threads, tmp_path, size, 10, way)
    for count in (1, 300, 4096):

        def values(rank: int, count: int = count) -> list[int]:
            return [rank + i for i in range(count)]

        want = [sum(range(size)) + size * i for i in range(count)]
        said = summed(threads, ranks, values)
        assert [each.result() for each in said] == [want] * size
    for rank in ranks:
        rank.close()


@pytest.mark.parametrize("way", ["file", "tcp"])
@pytest.mark.parametrize("gone", [0, 1, 2])
def test_a_rank_that_is_gone_is_missed_by_all_others_at_once(
    threads: ThreadPoolExecutor, tmp_path: Path, gone: int, way: str
) -> None:
    ranks = group(threads, tmp_path, 3, 60, way)
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


@pytest.mark.parametrize("way", ["file", "tcp"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_never_comes_is_not_awaited_for_ever(
    rank: int, tmp_path: Path, way: str
) -> None:
    where = places(way, tmp_path, 2)
    with pytest.raises(PeerLost, match=f"rank {rank} of 2: the others did not come"):
        meet(rank, 2, where[rank], SOON)
    if isinstance(where[0], TcpPlace) and where[0].door is not None:
        where[0].door.close()


def test_who_does_not_know_the_secret_is_no_rank_and_does_not_keep_the_others_apart(
    threads: ThreadPoolExecutor, tmp_path: Path
) -> None:
    """Nor does rank 0 get anything out of one that has called it."""
    first, second = places("tcp", tmp_path, 2)
    assert isinstance(first, TcpPlace)
    waiting = threads.submit(meet, 0, 2, first, 10)
    stranger = TcpPlace(first.host, first.port, "127.0.0.1", b"guessed")
    with pytest.raises(PeerLost, match="rank 1 of 2"):
        meet(1, 2, stranger, 10)
    with socket.create_connection((first.host, first.port)) as raw:
        raw.sendall(b"\x04\0\0\0GET " + os.urandom(200))
    ranks = [threads.submit(meet, 1, 2, second, 10).result(), waiting.result()]
    assert [each.result() for each in summed(threads, ranks, lambda _rank: [2])] == [[4], [4]]
    for rank in ranks:
        rank.close()


def test_who_announces_more_than_a_greeting_has_said_enough() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall((101).to_bytes(4, "little"))
        with pytest.raises(ConnectionResetError, match="101 bytes are announced"):
            Line(ours).receive(100)


def test_who_greets_bit_by_bit_gets_no_more_time(threads: ThreadPoolExecutor) -> None:
    """One such caller after the other would keep a group from meeting."""
    ours, theirs = socket.socketpair()
    enough = threading.Event()

    def drip() -> None:
        theirs.sendall((100).to_bytes(4, "little"))
        for _ in range(100):
            theirs.sendall(b"x")
            if enough.wait(SOON / 4):
                return

    with ours, theirs:
        dripping = threads.submit(drip)
        line = Line(ours)
        line.until(time.monotonic() + SOON)
        with pytest.raises(TimeoutError):
            line.receive(100)
        enough.set()
        dripping.result()


def test_a_rank_that_came_early_is_still_there_when_the_last_one_comes(
    threads: ThreadPoolExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time for a greeting ends with it."""
    monkeypatch.setattr(sums, "_GREET_S", SOON)
    where = places("tcp", tmp_path, 3)
    early = [threads.submit(meet, rank, 3, where[rank], 10) for rank in (0, 1)]
    assert not wait(early, 2 * SOON).done
    ranks = [early[0], early[1], threads.submit(meet, 2, 3, where[2], 10)]
    for rank in ranks:
        rank.result().close()


def test_a_rank_does_not_join_whoever_else_listens_at_the_address(
    threads: ThreadPoolExecutor,
) -> None:
    """A false rank 0 knows all that is said, but not the secret."""
    false = TcpPlace.open("127.0.0.1", b"guessed")
    waiting = threads.submit(meet, 0, 2, false, SOON)
    place = TcpPlace(false.host, false.port, "127.0.0.1", SECRET)
    with pytest.raises(PeerLost, match="rank 1 of 2"):
        meet(1, 2, place, 10)
    with pytest.raises(PeerLost, match="did not come"):
        waiting.result()


def test_ranks_that_ask_for_different_sums_are_no_group(
    threads: ThreadPoolExecutor, tmp_path: Path
) -> None:
    ranks = group(threads, tmp_path, 2, 10)
    for each in summed(threads, ranks, lambda rank: [1] * (rank + 1)):
        with pytest.raises(PeerLost):
            each.result()
