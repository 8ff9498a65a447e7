"""tcp against a hostile network: who gets in, and what lands."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import suppress

import numpy as np
import pytest

from pdrt.config import TransferSection
from pdrt.data.transport.promise import Key, SlotWrite
from pdrt.data.transport.tcp import TcpTransport, open_tcp
from pdrt.data.transport.tcp_arrivals import MAX_OPEN
from pdrt.data.transport.tcp_receive import MAX_STRANGERS
from pdrt.data.transport.tcp_wire import NAME_BYTES, Answer, Head, Kind, Offer, Status
from pdrt.errors import ConfigError, TransferFailed
from pdrt.keys import ClusterKey
from tests.data.tcp_rig import (
    Network,
    RawWriter,
    counted,
    end_of,
    is_hung_up_on,
    offer_of,
    peer_at,
    raw_writer,
    still_works,
    target,
)
from tests.data.transports import BLOCKS, CLUSTER, LAYOUT, LOCAL, Bench, opened

SLOT = bytes(range(64))
LARGE = [*range(BLOCKS - 1)] * 200  # about 50 MiB
OTHER: Key = (8, 1)
OVER = "the attempt is not admitted there"
OUTSIDE = "a frame outside of what the attempt may fill"


@pytest.fixture
async def rig() -> AsyncIterator[Bench]:
    async with opened("tcp") as rig:
        yield rig


@pytest.fixture
async def network(rig: Bench) -> AsyncIterator[Network]:
    """Between the writer and `c`, which is a's memory reached that way."""
    network = Network(offer_of(target(rig)))
    await rig.transport.attach(peer_at(rig, await network.start()))
    yield network
    await network.close()


@pytest.fixture
async def raw(rig: Bench) -> AsyncIterator[RawWriter]:
    writer = await raw_writer(offer_of(target(rig)))
    yield writer
    await writer.close()


# Who gets in.


@pytest.mark.parametrize(
    "junk", [b"\0" * 500, b"GET / HTTP/1.1\r\n\r\n" * 20, b"\xff" * 5000, b"PDRT-TCP 1\r\n" * 50]
)
async def test_junk_instead_of_a_greeting_is_hung_up_on(rig: Bench, junk: bytes) -> None:
    offer = offer_of(target(rig))
    reader, writer = await asyncio.open_connection(offer.host, offer.port)
    writer.write(junk)
    await is_hung_up_on(reader)
    await counted(rig, "refused")
    writer.transport.abort()
    await still_works(rig)


async def test_half_a_greeting_is_counted_when_its_sender_leaves(rig: Bench) -> None:
    offer = offer_of(target(rig))
    _, writer = await asyncio.open_connection(offer.host, offer.port)
    writer.write(b"PDRT-TCP 1\r\n")
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    await counted(rig, "refused")
    await still_works(rig)


async def test_strangers_are_few_and_members_are_not_disturbed(rig: Bench) -> None:
    offer = offer_of(target(rig))
    silent = [
        await asyncio.open_connection(offer.host, offer.port) for _ in range(MAX_STRANGERS + 1)
    ]
    assert await is_hung_up_on(silent[-1][0])
    assert target(rig).counts["crowded_out"] == target(rig).counters["tcp_crowded_out"] == 1
    await still_works(rig)
    for _, writer in silent:
        writer.transport.abort()
    await counted(rig, "refused", MAX_STRANGERS)
    await (await raw_writer(offer)).close()


async def test_another_cluster_s_writer_is_refused_and_told_of_the_key(rig: Bench) -> None:
    stranger = TcpTransport(rig.source, LOCAL, ClusterKey(b"another secret altogether"))
    with pytest.raises(TransferFailed, match="is the cluster key the same on both sides"):
        await stranger.attach(rig.peer("a"))
    await stranger.close()
    await counted(rig, "refused")
    await still_works(rig)


async def test_a_target_without_the_key_gets_no_byte_of_kv(rig: Bench) -> None:
    """Mutual: it may listen at the right address, and is found out all the same."""
    impostor = TcpTransport(rig.peers["b"], LOCAL, ClusterKey(b"another secret altogether"))
    offer = Offer.unpack(impostor.offers["tcp"])
    with pytest.raises(TransferFailed, match="cluster key"):
        await rig.transport.attach(peer_at(rig, offer))
    await impostor.close()


async def test_a_greeting_that_was_overheard_opens_nothing(rig: Bench, network: Network) -> None:
    rig.transport.start(rig.write(1, "c", [3]))
    assert await end_of(rig, 1) is None
    offer = offer_of(target(rig))
    for said in list(network.said):
        reader, writer = await asyncio.open_connection(offer.host, offer.port)
        writer.write(said)
        assert await is_hung_up_on(reader)
        writer.transport.abort()
    await counted(rig, "refused", 2)


async def test_who_listens_at_a_dead_target_s_port_is_not_taken_for_it(rig: Bench) -> None:
    offer = offer_of(target(rig))
    old = Offer(offer.host, offer.port, os.urandom(NAME_BYTES))
    with pytest.raises(TransferFailed, match="another process listens there now"):
        await rig.transport.attach(peer_at(rig, old))


async def test_an_address_where_nobody_listens_is_named(rig: Bench) -> None:
    offer = offer_of(target(rig))
    await target(rig).close()
    with pytest.raises(TransferFailed, match=f"tcp to {LOCAL}:{offer.port}: Connection refused"):
        await rig.transport.attach(peer_at(rig, offer))


async def test_an_address_that_is_not_ours_is_a_start_up_error(rig: Bench) -> None:
    """CASES 25, 105: the wrong address is found out when we listen."""
    transport = TcpTransport(rig.source, "203.0.113.7", CLUSTER)
    with pytest.raises(ConfigError, match=r"cannot listen on 203\.0\.113\.7"):
        _ = transport.offers
    await transport.close()


async def test_a_transport_as_the_config_says_carries_a_write(rig: Bench) -> None:
    transport = open_tcp(TransferSection(stripes=64), rig.source, LOCAL, CLUSTER)
    other = Bench(transport, rig.source, rig.peers, rig.targets)
    reader = asyncio.create_task(other.read())
    await transport.attach(rig.peer("a"))
    transport.start(rig.write(1, "a", [3]))
    assert await end_of(other, 1) is None
    await transport.close()
    await reader


# What lands.


async def test_a_write_of_an_attempt_that_was_never_admitted_fails_early(rig: Bench) -> None:
    rig.transport.start(rig.write(1, "a", LARGE * 20, SLOT, OTHER))  # 1 GiB
    assert await end_of(rig, 1) == OVER
    assert target(rig).counts["dropped_frames"] < 100  # of 125: it was told to stop
    assert not rig.peers["a"].array.any()
    await still_works(rig)


@pytest.mark.parametrize(
    ("blocks", "slot", "error"),
    [([3], None, None), ([3, 4], None, OUTSIDE), ([], SLOT, OUTSIDE), ([3], SLOT, OUTSIDE)],
)
async def test_nothing_lands_outside_of_what_was_admitted(
    rig: Bench, blocks: list[int], slot: bytes | None, error: str | None
) -> None:
    """CASES 26: and one write that fails harms no other."""
    memory, size = rig.peers["a"], LAYOUT.block_bytes
    target(rig).admit(OTHER, np.array([[memory.pool_at + 3 * size, size]], dtype=np.int64))
    rig.transport.start(rig.write(1, "a", blocks, slot, OTHER))
    rig.transport.start(rig.write(2, "a", [9]))
    assert await end_of(rig, 1) == error
    assert await end_of(rig, 2) is None
    assert not any(rig.block("a", 4))
    assert not any(memory.slots_view)


async def test_the_slot_of_a_write_that_failed_stays_empty(rig: Bench) -> None:
    """Though the slot itself was admitted: it would vouch for bytes that are not there."""
    memory, size = rig.peers["a"], LAYOUT.block_bytes
    areas = [[0, 64], [memory.pool_at + 3 * size, size]]
    target(rig).admit(OTHER, np.array(areas, dtype=np.int64))
    rig.transport.start(rig.write(1, "a", [3, 4], SLOT, OTHER))
    assert await end_of(rig, 1) == OUTSIDE
    assert not any(memory.slots_view)


async def test_a_probe_stays_in_the_probe_area(rig: Bench) -> None:
    rig.transport.start(rig.write(1, "a", [3], key=None))
    assert await end_of(rig, 1) == OUTSIDE
    assert not rig.peers["a"].array.any()


async def test_revoking_in_the_middle_of_a_frame_does_not_wait_for_its_writer(
    rig: Bench, raw: RawWriter
) -> None:
    """CASES 50: the writer stands still with half a frame out; what it sends later is dropped."""
    memory = rig.peers["a"]
    frame = raw.frame(1, memory.pool_at, b"\1" * 100_000, total=100_000, slot=SlotWrite(0, SLOT))
    await raw.send(frame[:50_000])
    while not memory.pool_view[40_000]:
        await asyncio.sleep(0)
    assert target(rig).revoke((7, 1), frozenset({"tcp"}))
    memory.array[:] = 0
    await raw.send(frame[50_000:])
    assert await raw.answer() == Answer(Status.FAILED, 1, OVER)
    assert not memory.array.any()
    assert target(rig).counts["dropped_frames"] == 1


async def test_the_slot_waits_for_the_bytes_of_every_stripe(rig: Bench) -> None:
    memory, link = rig.peers["a"], os.urandom(NAME_BYTES)
    first, second = [await raw_writer(offer_of(target(rig)), link) for _ in range(2)]
    part = first.frame(1, memory.pool_at, b"\1" * 1000)
    await first.send(part[:-1])
    last = second.frame(1, memory.pool_at + 1000, b"\2" * 1000, total=2000, slot=SlotWrite(0, SLOT))
    await second.send(last + second.packed(Head(Kind.PING)))
    assert await second.answer() == Answer(Status.PONG)  # so it has taken in the last frame
    assert not any(memory.slots_view)
    await first.send(part[-1:])
    assert await first.answer() == Answer(Status.PLACED, 1)
    assert bytes(memory.slots_view[:64]) == SLOT
    assert bytes(memory.pool_view[:2000]) == b"\1" * 1000 + b"\2" * 1000
    await first.close()
    await second.close()


async def test_a_cancelled_write_is_confirmed_when_all_of_it_has_passed(rig: Bench) -> None:
    memory, link = rig.peers["a"], os.urandom(NAME_BYTES)
    first, second = [await raw_writer(offer_of(target(rig)), link) for _ in range(2)]
    part = first.frame(1, memory.pool_at, b"\1" * 1000)
    await second.send(second.packed(Head(Kind.CANCEL, 1, total=1000)))
    await second.send(second.packed(Head(Kind.PING)))
    assert await second.answer() == Answer(Status.PONG)
    await first.send(part)
    assert await first.answer() == Answer(Status.FAILED, 1, "aborted")
    assert not memory.array.any()
    await first.close()
    await second.close()


async def test_a_forged_frame_ends_its_link_and_no_other(rig: Bench, raw: RawWriter) -> None:
    link = os.urandom(NAME_BYTES)
    forger, sibling = [await raw_writer(offer_of(target(rig)), link) for _ in range(2)]
    memory = rig.peers["a"]
    frame = bytearray(forger.frame(1, memory.pool_at, b"\1" * 100, total=100))
    frame[40] ^= 1  # the first byte of the destination
    await forger.send(bytes(frame))
    assert await is_hung_up_on(forger.reader)
    assert await is_hung_up_on(sibling.reader)
    await counted(rig, "bad_frames")
    assert not memory.array.any()
    await raw.send(raw.frame(1, memory.pool_at, b"\1" * 100, total=100))
    assert await raw.answer() == Answer(Status.PLACED, 1)
    await forger.close()
    await sibling.close()


async def test_a_frame_that_is_sent_again_is_a_forged_one(rig: Bench, raw: RawWriter) -> None:
    frame = raw.frame(1, rig.peers["a"].pool_at, b"\1" * 100, total=100)
    await raw.send(frame)
    assert await raw.answer() == Answer(Status.PLACED, 1)
    rig.peers["a"].array[:] = 0
    await raw.send(frame)
    assert await is_hung_up_on(raw.reader)
    assert not rig.peers["a"].array.any()


async def test_a_write_of_more_bytes_than_it_said_is_hung_up_on(rig: Bench, raw: RawWriter) -> None:
    await raw.send(raw.frame(1, rig.peers["a"].pool_at, b"\1" * 100, total=99))
    assert await is_hung_up_on(raw.reader)
    await counted(rig, "bad_frames")


async def test_lengths_that_are_not_the_payload_s_are_hung_up_on(
    rig: Bench, raw: RawWriter
) -> None:
    at = rig.peers["a"].pool_at
    head = Head(Kind.DATA, 1, (7, 1), True, 100, 1, 100)
    await raw.send(raw.packed(head, np.array([[0, at, 1 << 16]])) + b"\1" * 100)
    assert await is_hung_up_on(raw.reader)
    assert not rig.peers["a"].array.any()


@pytest.mark.parametrize("header", [b"\0" * 40, b"\xff" * 40, b"\1\0\0\0" + b"\xff" * 36])
async def test_a_header_that_is_none_is_hung_up_on(
    rig: Bench, raw: RawWriter, header: bytes
) -> None:
    await raw.send(header)
    assert await is_hung_up_on(raw.reader)
    await counted(rig, "bad_frames")


async def test_a_writer_cannot_begin_writes_without_end(rig: Bench, raw: RawWriter) -> None:
    """CASES 49: what one peer can make us remember is bounded."""
    at = rig.peers["a"].pool_at
    with suppress(ConnectionError):
        await raw.send(b"".join(raw.frame(n, at, b"\1") for n in range(MAX_OPEN + 1)))
    assert await is_hung_up_on(raw.reader)
    await still_works(rig)
