"""What the router reads of a leader's work, from what leaders really say."""

from __future__ import annotations

import pytest

from pdrt.control.instances import read_status
from pdrt.control.told import LoadTold, WorkerTold
from pdrt.errors import BadMessage

SAID = {
    "role": "decode",
    "state": "ready",
    "load": {"running": 3, "waiting": 1, "blocks_used": 5, "blocks_total": 9, "new": 1},
    "totals": {"at": 12.5, "tokens_out": 70, "sent_bytes": 4096},
    "workers": [{"rank": "0,0,0", "state": "ready", "transports": {"tcp://a:1#7.8": "shm"}}],
}


def test_the_load_and_the_totals_and_the_workers_are_read() -> None:
    status = read_status(SAID)
    assert status.load == LoadTold(running=3, waiting=1, blocks_used=5, blocks_total=9)
    assert (status.totals.at, status.totals.tokens_out, status.totals.retractions) == (12.5, 70, 0)
    assert status.workers == (
        WorkerTold(rank="0,0,0", state="ready", transports={"tcp://a:1#7.8": "shm"}),
    )


def test_an_older_leader_that_tells_none_of_it_is_no_worse() -> None:
    status = read_status({"role": "decode", "state": "ready"})
    assert status.is_ready
    assert (status.load.blocks_total, status.workers) == (0, ())


def test_figures_that_moved_are_no_news_about_the_instance() -> None:
    assert read_status(SAID) == read_status({**SAID, "load": {"running": 4}, "workers": []})
    assert read_status(SAID) != read_status({**SAID, "state": "draining"})


def test_nonsense_is_a_typed_refusal() -> None:
    with pytest.raises(BadMessage, match="running"):
        read_status({**SAID, "load": {"running": "many"}})
