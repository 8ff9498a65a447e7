"""A group's sums are the same everywhere, and a lost rank is told to all that are left."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest
import torch

from pdrt.device import collective
from pdrt.device.collective import Collective
from pdrt.device.places import TcpPlace
from pdrt.errors import PeerLost
from tests.device.ranks import Place, context, places


def in_threads(folder: Path, size: int, way: str = "file") -> list[Collective]:
    """The ranks' ends of one group; gloo does not mind that they share a process."""
    group = places(folder, size) if way == "file" else apart(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda p: collective.join(p.rank, p.size, p.rendezvous, 10), group))


def apart(size: int) -> list[Place]:
    """Each at an address of its own, as on a node of its own."""
    first = TcpPlace.open("127.0.0.1", b"secret")
    others = [TcpPlace(first.host, first.port, f"127.0.0.{n + 1}", b"") for n in range(1, size)]
    return [Place(rank, size, where) for rank, where in enumerate([first, *others])]


@pytest.mark.parametrize("way", ["file", "tcp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_the_sum_is_in_place_and_the_same_on_every_rank(
    tmp_path: Path, dtype: torch.dtype, way: str
) -> None:
    ends = in_threads(tmp_path, 3, way)
    parts = [torch.arange(1000).view(2, 500).mul(rank + 1).to(dtype) for rank in range(3)]
    with ThreadPoolExecutor(3) as pool:
        sums = list(pool.map(lambda end, part: end.all_reduce_(part), ends, parts))
    assert [(end.rank, end.size) for end in ends] == [(0, 3), (1, 3), (2, 3)]
    for part, found in zip(parts, sums, strict=True):
        assert found is part
        assert torch.equal(found, sums[0])
    want = torch.arange(1000).view(2, 500) * 6
    torch.testing.assert_close(sums[0], want.to(dtype), rtol=0.02, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_gathered_comes_to_the_first_rank_in_order(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    ends = in_threads(tmp_path, 3)
    parts = [torch.full((2, 50), rank).to(dtype) for rank in range(3)]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda end, part: end.gather(part), ends, parts))
    assert found[1:] == [None, None]
    assert found[0] is not None
    for got, part in zip(found[0], parts, strict=True):
        assert torch.equal(got, part)


@pytest.mark.parametrize("way", ["file", "tcp"])
def test_ranks_of_two_kinds_meet_once_and_each_sums_with_its_own(tmp_path: Path, way: str) -> None:
    """tp 2 x cp 3: what tp ranks add up stays within a cp rank, and the other way round."""
    tp, cp = 2, 3
    group = places(tmp_path, tp * cp) if way == "file" else apart(tp * cp)
    with ThreadPoolExecutor(tp * cp) as pool:
        ends = list(
            pool.map(lambda p: collective.join_both(p.rank, tp, cp, p.rendezvous, 20), group)
        )
        own = [torch.tensor([10.0**rank]) for rank in range(tp * cp)]
        sums = pool.map(lambda end, part: end[0].all_reduce_(part.clone()), ends, own)
        assert [int(each) for each in sums] == [11, 11, 1100, 1100, 110000, 110000]
        gathered = pool.map(lambda end, part: end[1].all_gather(part), ends, own)
        found = [[int(part) for part in each] for each in gathered]
    assert found == [[1, 100, 10000], [10, 1000, 100000]] * cp
    assert [(t.rank, t.size, c.rank, c.size) for t, c in ends] == [
        (tp_rank, tp, cp_rank, cp) for cp_rank in range(cp) for tp_rank in range(tp)
    ]


def test_a_context_parallel_rank_that_left_is_missed_by_its_own_kind(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        join = collective.join_both
        stayed, left = pool.map(lambda p: join(p.rank, 1, 2, p.rendezvous, 10), places(tmp_path, 2))
    left[1].close()
    with pytest.raises(PeerLost, match="context-parallel rank 0 of 2"):
        stayed[1].all_gather(torch.zeros(1))


def test_a_first_rank_whose_others_left_gathers_nothing(tmp_path: Path) -> None:
    stayed, left = in_threads(tmp_path, 2)
    left.close()
    with pytest.raises(PeerLost, match="rank 0 of 2"):
        stayed.gather(torch.zeros(1))


def test_a_group_of_one_does_nothing(tmp_path: Path) -> None:
    alone = collective.join(0, 1, tmp_path / "nobody looks here", 0.1)
    values = torch.arange(3.0)
    assert alone.all_reduce_(values) is values
    assert alone.gather(values) == [values]
    assert values.tolist() == [0, 1, 2]
    assert list(tmp_path.iterdir()) == []
    alone.close()


def test_a_rank_whose_others_do_not_come_says_so_in_time(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(PeerLost, match=r"rank 1 of 2: the others did not come to .* within 0.2 s"):
        collective.join(1, 2, tmp_path / "group", 0.2)
    assert time.monotonic() - began < 2


def test_a_group_that_spans_nodes_listens_at_its_own_addresses_only() -> None:
    """Neither gloo nor its store ask who connects."""
    before = listening()
    ends = in_threads(Path(), 2, "tcp")
    assert {address for address, _ in listening() - before} == {"127.0.0.1", "127.0.0.2"}
    for end in ends:
        end.close()


def listening() -> set[tuple[str, int]]:
    found = psutil.Process().net_connections("tcp")
    return {(each.laddr.ip, each.laddr.port) for each in found if each.status == "LISTEN"}


def test_a_follower_whose_tp_0_is_not_there_says_so_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(PeerLost, match="rank 1 of 2: the others did not come to tcp:"):
        collective.join(1, 2, TcpPlace("127.0.0.1", port, "127.0.0.2", b""), 0.3)


def test_a_rank_that_has_left_sums_no_more_and_neither_do_the_others(tmp_path: Path) -> None:
    left, stayed = in_threads(tmp_path, 2)
    left.close()
    left.close()
    with pytest.raises(RuntimeError, match="has left"):
        left.all_reduce_(torch.zeros(1))
    with pytest.raises(PeerLost, match="rank 1 of 2"):
        stayed.all_reduce_(torch.zeros(1))


def sum_until_it_fails(place: Place, timeout_s: float, parent: Connection) -> None:
    """A rank in a process of its own: tells that it sums, then why and when that ended."""
    end = collective.join(place.rank, place.size, place.rendezvous, timeout_s)
    values = torch.zeros(1, 576)
    end.all_reduce_(values)
    parent.send("sums")
    try:
        while True:
            end.all_reduce_(values)
    except PeerLost as error:
        parent.send((time.monotonic(), str(error)))


@contextmanager
def summing(
    folder: Path, size: int, timeout_s: float
) -> Iterator[tuple[list[int], list[Connection]]]:
    """Pids of the ranks, all of them summing, and what they say."""
    forks, pids, heard, processes = context(), list[int](), list[Connection](), []
    for place in places(folder, size):
        ours, theirs = forks.Pipe(duplex=False)
        process = forks.Process(target=sum_until_it_fails, args=(place, timeout_s, theirs))
        process.start()
        theirs.close()
        assert process.pid is not None
        processes.append(process)
        pids.append(process.pid)
        heard.append(ours)
    try:
        assert [ours.recv() for ours in heard] == ["sums"] * size
        yield pids, heard
    finally:
        for process, ours in zip(processes, heard, strict=True):
            process.kill()
            process.join(5)
            process.close()
            ours.close()


def ended(heard: Connection) -> tuple[float, str]:
    assert heard.poll(10), "it hangs"
    at, why = heard.recv()
    return at, why


def test_a_ranks_death_is_told_to_all_others_within_the_timeout(tmp_path: Path) -> None:
    with summing(tmp_path, 3, timeout_s=2) as (pids, heard):
        killed = time.monotonic()
        os.kill(pids[2], signal.SIGKILL)
        for rank in (0, 1):
            at, why = ended(heard[rank])
            assert at - killed < 4
            assert f"rank {rank} of 3 (timeout 2 s): a rank died or is stuck" in why


def test_a_stuck_rank_holds_the_others_no_longer_than_the_timeout(tmp_path: Path) -> None:
    with summing(tmp_path, 3, timeout_s=1) as (pids, heard):
        stopped = time.monotonic()
        os.kill(pids[1], signal.SIGSTOP)
        for rank in (0, 2):
            assert 0.5 < ended(heard[rank])[0] - stopped < 3
