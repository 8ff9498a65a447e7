"""A worker's device threads keep to their share of the node's cores."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest

from pdrt.config import NodeConfig
from pdrt.device.cores import cores_of, pin, threads_of
from pdrt.errors import ConfigError


def _config(workers: int = 1, **device: Any) -> NodeConfig:
    parallel = {"world_size": workers, "tp": workers, "devices_per_node": workers}
    return NodeConfig.model_validate({"parallel": parallel, "device": device})


def test_workers_of_a_node_have_equal_shares_of_neighbours() -> None:
    config = _config(workers=2, cores=[4, 5, 8, 9])
    assert [cores_of(config, place) for place in (0, 1)] == [(4, 5), (8, 9)]
    assert cores_of(_config(workers=2), 0) == ()


@pytest.mark.parametrize(
    ("workers", "cores", "says"),
    [(2, [0, 1, 2], "no equal shares"), (1, [0, 0], "twice"), (1, [4096], "cannot be used here")],
)
def test_cores_that_cannot_be_shared_are_refused(workers: int, cores: list[int], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        pin(_config(workers, cores=cores), 0)


def test_threads_that_a_pinned_thread_starts_stay_with_it() -> None:
    last, seen = max(os.sched_getaffinity(0)), list[tuple[set[int], int]]()

    def inner() -> None:
        seen.append((os.sched_getaffinity(0), threads_of(_config(cores=[last]))))

    def device() -> None:
        pin(_config(cores=[last]), 0)
        other = threading.Thread(target=inner)
        other.start()
        other.join()

    thread = threading.Thread(target=device)
    thread.start()
    thread.join()
    assert seen == [({last}, 1)]


def test_threads_are_an_equal_share_unless_they_are_named() -> None:
    cores = len(os.sched_getaffinity(0))
    assert threads_of(_config()) == cores
    assert threads_of(_config(workers=2)) == max(1, cores // 2)
    assert threads_of(_config(workers=2, threads=7)) == 7
