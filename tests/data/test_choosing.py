"""Several transports as one: the first that reaches a peer has it, and no refusal is silent."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from structlog.testing import capture_logs

from pdrt.config import TransferSection
from pdrt.data.memory import PoolMemory
from pdrt.data.process import this_process
from pdrt.data.transport.choose import open_transport
from pdrt.data.transport.choosing import Choosing
from pdrt.data.transport.faulty import FaultyTransport
from pdrt.data.transport.promise import Ended, Peer, Transport, Write
from pdrt.data.transport.shm import ShmTransport
from pdrt.errors import TransferFailed
from pdrt.keys import ClusterKey
from pdrt.messages import Region
from pdrt.settings import check
from tests.data.scripted import Scripted
from tests.data.transports import LAYOUT

HERE = this_process()
ELSEWHERE = replace(HERE, host="another boot/pid:[1]")
NO_AREAS = np.empty((0, 2), dtype=np.int64)


def peer(*offers: str, is_here: bool = True, name: str = "d") -> Peer:
    handles = {each: each.encode() for each in offers}
    region = Region(offers=handles, size=0, slots_at=0, slots=0, pool_at=0, blocks=0)
    return Peer(name, HERE if is_here else ELSEWHERE, region)


@pytest.mark.parametrize(
    ("offers", "is_here", "chosen"),
    [
        (("shm", "tcp", "nixl"), True, "shm"),
        (("tcp", "shm"), True, "shm"),  # the writer's order counts
        (("shm", "tcp", "nixl"), False, "nixl"),  # shm reaches nobody on another host
        (("shm", "tcp"), False, "tcp"),
        (("tcp",), True, "tcp"),
        (("nixl", "mooncake"), True, "nixl"),
    ],
)
async def test_a_peer_is_written_through_the_first_that_it_offers_and_that_can_apply(
    offers: tuple[str, ...], is_here: bool, chosen: str
) -> None:
    inner = [Scripted(name) for name in ("shm", "nixl", "tcp")]
    choosing: Transport = Choosing(inner)
    await choosing.attach(peer(*offers, is_here=is_here))
    await choosing.attach(peer(*offers, is_here=is_here))  # once is enough
    assert choosing.via("d") == chosen
    assert [each.attached for each in inner if each.name != chosen] == [[], []]
    assert [each.attached for each in inner if each.name == chosen] == [["d"]]
    await choosing.close()


async def test_each_refusal_is_logged_with_its_reason_before_the_next_is_tried() -> None:
    choosing = Choosing([Scripted("shm", refuses="no such file"), Scripted("tcp")])
    with capture_logs() as logs:
        await choosing.attach(peer("shm", "tcp"))
    (line,) = logs
    assert (line["event"], line["transport"]) == ("transport_refused", "shm")
    assert (line["reason"], line["peer"]) == ("no such file", "d")
    assert choosing.via("d") == "tcp"
    await choosing.close()


@pytest.mark.parametrize(
    ("there", "says"),
    [
        (
            peer("shm", "tcp", is_here=False),
            "no transport reaches d, which offers shm, tcp: shm: an",
        ),
        (peer("tcp"), "shm: not offered there; tcp: connection refused"),
        (
            peer("shm", is_here=False),
            "shm: another host, or another container of this one; tcp: not",
        ),
        (peer("nixl"), "d offers nixl, not shm/tcp"),
        (peer(), "d offers no transport, not shm/tcp"),
    ],
)
async def test_when_nothing_fits_both_sides_are_named(there: Peer, says: str) -> None:
    choosing = Choosing([Scripted("shm"), Scripted("tcp", refuses="connection refused")])
    with pytest.raises(TransferFailed, match=says):
        await choosing.attach(there)
    await choosing.close()


async def test_writes_aborts_and_ends_go_to_and_come_from_the_peers_own_transport() -> None:
    shm, tcp = Scripted("shm"), Scripted("tcp")
    choosing = Choosing([shm, tcp])
    await choosing.attach(peer("shm", name="near"))
    await choosing.attach(peer("tcp", name="far"))
    for number, name in enumerate(("near", "far", "nobody", "far")):
        choosing.start(Write(number, name))
    assert [w.id for w in shm.started if w.peer == "near"] == [0]
    assert [w.id for w in tcp.started] == [1, 3]
    choosing.abort(3)
    choosing.abort(77)
    shm.told.put_nowait(Ended(0))
    tcp.told.put_nowait(Ended(1, "lost"))
    stream = choosing.ends()
    ends = {end.id: end.error for end in [await anext(stream) for _ in range(4)]}
    assert ends == {0: None, 1: "lost", 2: "not attached", 3: "aborted"}
    choosing.detach("far")
    choosing.detach("nobody")
    assert ("detach", "far") in tcp.calls
    assert shm.attached == ["near"]
    await choosing.close()


async def test_offers_are_merged_and_every_transport_hears_of_every_attempt() -> None:
    shm, tcp = Scripted("shm"), Scripted("tcp")
    choosing = Choosing([shm, tcp])
    assert choosing.offers == {"shm": b"shm", "tcp": b"tcp"}
    assert choosing.name == "shm/tcp"
    choosing.admit((1, 0), NO_AREAS)
    assert shm.calls == tcp.calls == [("admit", (1, 0))]
    await choosing.close()


@pytest.mark.parametrize(
    ("through", "is_proof"),
    [
        ({"tcp"}, True),
        ({"shm"}, False),
        ({"shm", "tcp"}, False),
        ({"nixl"}, False),  # not known here: nobody can vouch for it
        (set(), False),  # nothing is known of the writers: any may be used
    ],
)
async def test_a_revocation_proves_something_only_for_the_transports_its_writers_use(
    through: set[str], is_proof: bool
) -> None:
    shm, tcp = Scripted("shm"), Scripted("tcp", proves=True)
    choosing = Choosing([shm, tcp])
    assert choosing.revoke((1, 0), frozenset(through)) is is_proof
    assert shm.calls == tcp.calls == [("revoke", (1, 0))]  # all forget the attempt
    await choosing.close()


async def test_the_stream_ends_after_all_ends_of_all_transports() -> None:
    shm, tcp = Scripted("shm"), Scripted("tcp")
    choosing = Choosing([shm, tcp])
    tcp.told.put_nowait(Ended(5, "the transport is closed"))
    await choosing.close()
    assert [end.id async for end in choosing.ends()] == [5]


async def test_one_dead_transport_ends_the_whole_for_its_writes_cannot_be_followed() -> None:
    tcp = Scripted("tcp")
    choosing = Choosing([Scripted("shm"), tcp])
    tcp.told.put_nowait(None)
    assert [end async for end in choosing.ends()] == []
    await choosing.close()


async def test_what_a_transport_raises_is_raised_to_the_reader() -> None:
    tcp = Scripted("tcp")
    choosing = Choosing([Scripted("shm"), tcp])
    tcp.told.put_nowait(OSError("the NIC is gone"))
    with pytest.raises(OSError, match="the NIC is gone"):
        await asyncio.wait_for(anext(choosing.ends()), 5)
    await choosing.close()


# What a config opens.


async def opened(**settings: object) -> Transport:
    config = check(TransferSection, settings, "test")
    memory = PoolMemory(LAYOUT, 2, 1)
    return open_transport(config, memory, "127.0.0.1", ClusterKey(b"k" * 32))


async def test_faults_are_wrapped_around_whatever_is_chosen() -> None:
    transport = await opened(threads=1, faults={"drop": 1.0})
    assert isinstance(transport, FaultyTransport)
    await transport.close()


async def test_one_named_transport_is_that_one_alone() -> None:
    transport = await opened(transport="shm")
    assert isinstance(transport, ShmTransport)
    await transport.close()
