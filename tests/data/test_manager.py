"""Two real managers on loopback: sockets, threads and shared memory, but one process."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import resource
import socket
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import NamedTuple

import msgpack
import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from pdrt.config import TimeoutsSection
from pdrt.data.commands import (
    AbortReceiver,
    AbortSend,
    AdmitReceiver,
    ExpectHandshakes,
    OpenReceiver,
    SendBlocks,
    TellStarted,
)
from pdrt.data.events import (
    PromptStarted,
    Quiet,
    Received,
    ReceiveFailed,
    ReceiverReady,
    SendEnded,
    SenderReady,
    SendFailed,
)
from pdrt.data.handshake import signed
from pdrt.data.memory import PoolMemory
from pdrt.data.process import this_process
from pdrt.data.transport.choosing import Choosing
from pdrt.data.transport.faulty import Fault
from pdrt.data.transport.promise import Transport, Write
from pdrt.data.transport.shm import ShmTransport
from pdrt.data.transport.wrapping import Wrapping
from pdrt.data.wire import Wire
from pdrt.errors import ConfigError, NoPrefill, Unauthorized, Unavailable
from pdrt.keys import ClusterKey
from pdrt.messages import (
    FROM_DECODE,
    Handshake,
    Ping,
    Problem,
    Route,
    Source,
    encode,
    pack_ids,
)
from tests.data.managers import HASH, KEY, LAYOUT, SOURCE, Make, Side, record, route_to, side


class Pair(NamedTuple):
    p: Side
    d: Side

    async def open(self, room: int, tokens: int = 40) -> None:
        """Up to the point where prefill may compute."""
        deadline = time.monotonic() + 60
        self.p.manager.do(ExpectHandshakes(room, 0, tokens, HASH, deadline))
        self.d.manager.do(OpenReceiver(room, 0, SOURCE, deadline))
        await self.d.until(ReceiverReady, room)

    async def shake(self, room: int, blocks: list[int], slot: int = 0, tokens: int = 40) -> None:
        await self.open(room, tokens)
        deadline = time.monotonic() + 60
        self.d.manager.do(AdmitReceiver(room, 0, tuple(blocks), 0, slot, tokens, HASH, deadline))
        await self.p.until(SenderReady, room)


@pytest.fixture(params=["127.0.0.1", "::1"])
def local_ip(request: pytest.FixtureRequest) -> str:
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.bind((request.param, 0))
    except OSError:
        pytest.skip(f"no {request.param} here")
    return str(request.param)


async def new_pair(local_ip: str = "127.0.0.1", make: Make | None = None) -> Pair:
    """`make`: the prefill side's transport."""
    p = side("prefill", lambda _: pytest.fail("it asks nobody"), local_ip=local_ip, make=make)
    d = side("decode", lambda _source: route_to(p.endpoint, this_process()), local_ip=local_ip)
    await p.start()
    await d.start()
    return Pair(p, d)


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    pair = await new_pair()
    yield pair
    await pair.d.stop()
    await pair.p.stop()


def fill(pair: Pair, block: int) -> bytes:
    """Give a source block contents of its own."""
    size = LAYOUT.block_bytes
    data = bytes([block + 1]) * size
    pair.p.manager.memory.pool_view[block * size : (block + 1) * size] = data
    return data


def landed(pair: Pair, block: int) -> bytes:
    size = LAYOUT.block_bytes
    return bytes(pair.d.manager.memory.pool_view[block * size : (block + 1) * size])


async def test_blocks_and_first_token_arrive_over_ipv4_and_ipv6(local_ip: str) -> None:
    pair = await new_pair(local_ip)
    data = [fill(pair, block) for block in range(3)]
    await pair.shake(1, [9, 4, 5])
    pair.p.manager.do(TellStarted(1, 0))
    pair.p.manager.do(SendBlocks(1, 0, (0, 1), 0, None))
    pair.p.manager.do(SendBlocks(1, 0, (2,), 2, record(1, 40)))
    received = await pair.d.until(Received, 1)
    assert received.record == record(1, 40)
    assert [landed(pair, block) for block in (9, 4, 5)] == data
    assert (await pair.p.until(SendEnded, 1)).problem is None
    assert pair.d.has(PromptStarted, 1)
    for stats in (pair.p.manager.stats(), pair.d.manager.stats()):
        assert (stats.rooms, stats.quarantined) == (0, 0)
        assert list(stats.peers.values()) == ["alive"]
    assert pair.p.manager.stats().counters["sent_bytes"] == 3 * LAYOUT.block_bytes + 64
    await pair.d.stop()
    await pair.p.stop()


async def test_many_transfers_at_once_all_arrive(pair: Pair) -> None:
    async def one(room: int) -> None:
        blocks = [(3 * room + n) % 64 for n in range(3)]
        await pair.shake(room, blocks, slot=room)
        pair.p.manager.do(SendBlocks(room, 0, (0, 1, 2), 0, record(room, 40)))
        await pair.d.until(Received, room)
        await pair.p.until(SendEnded, room)

    async with asyncio.TaskGroup() as group:
        for room in range(16):
            group.create_task(one(room))
    assert pair.d.manager.stats().rooms == 0


async def test_a_delayed_write_an_abort_and_the_reuse_of_its_blocks(pair: Pair) -> None:
    """CASES 50: the delay is the test's to end; B is admitted only when A is quiet."""
    for block in range(3):
        fill(pair, block)
    pair.p.faulty.next_writes(Fault.DELAY)
    await pair.shake(1, [0, 1, 2])
    pair.p.manager.do(SendBlocks(1, 0, (0, 1, 2), 0, record(1, 40)))
    pair.d.manager.do(AbortReceiver(1, 0, "client_gone"))
    await pair.p.until(SendFailed, 1)
    await pair.d.until(Quiet, 1)  # prefill took the held write back, and then said so
    await pair.p.until(SendEnded, 1)
    assert not any(landed(pair, 0))
    data = [fill(pair, block) for block in (7, 8, 9)]
    await pair.shake(2, [0, 1, 2])
    pair.p.manager.do(SendBlocks(2, 0, (7, 8, 9), 0, record(2, 40)))
    assert (await pair.d.until(Received, 2)).record.room == 2
    pair.p.faulty.release(1)
    assert [landed(pair, block) for block in range(3)] == data


async def test_a_lost_completion_does_not_keep_the_answer_from_decode(pair: Pair) -> None:
    """CASES 10."""
    pair.p.faulty.next_writes(Fault.DROP)
    await pair.shake(1, [0, 1, 2])
    pair.p.manager.do(SendBlocks(1, 0, (0, 1, 2), 0, record(1, 40)))
    await pair.d.until(Received, 1)
    assert not pair.p.has(SendEnded, 1)
    pair.p.manager.do(AbortSend(1, 0, Problem(code="cancelled", message="the leg is closed")))
    await pair.p.until(SendEnded, 1)
    await pair.shake(2, [3, 4, 5])
    pair.p.manager.do(SendBlocks(2, 0, (0, 1, 2), 0, record(2, 40)))
    await pair.d.until(Received, 2)


@pytest.mark.parametrize("fault", [Fault.TRUNCATE, Fault.CORRUPT])
async def test_a_damaged_write_fails_and_may_be_tried_again(pair: Pair, fault: Fault) -> None:
    pair.p.faulty.next_writes(fault)
    await pair.shake(1, [0, 1, 2])
    pair.p.manager.do(SendBlocks(1, 0, (0, 1, 2), 0, record(1, 40)))
    failed = await pair.d.until(ReceiveFailed, 1)
    assert (failed.problem.code, failed.problem.is_retryable) == ("transfer_failed", True)
    await pair.d.until(Quiet, 1)
    assert not pair.d.has(Received, 1)


async def test_one_failed_write_fails_its_request_alone(pair: Pair) -> None:
    """CASES 26, 9: decode is told, the source blocks are pinned until then, the process lives."""
    rooms = range(1, 6)
    for room in rooms:
        await pair.shake(room, [3 * room, 3 * room + 1, 3 * room + 2], slot=room)
    # A chunk that lies outside the source's memory is what the transport itself refuses.
    pair.p.manager.do(SendBlocks(3, 0, (1 << 20, 1, 2), 0, record(3, 40)))
    for room in (1, 2, 4, 5):
        pair.p.manager.do(SendBlocks(room, 0, (0, 1, 2), 0, record(room, 40)))
    failed = await pair.d.until(ReceiveFailed, 3)
    assert "outside" in failed.problem.message
    assert failed.problem.is_retryable
    await pair.d.until(Quiet, 3)
    ended = await pair.p.until(SendEnded, 3)
    assert ended.problem is not None
    for room in (1, 2, 4, 5):
        await pair.d.until(Received, room)
        assert (await pair.p.until(SendEnded, room)).problem is None
    await pair.shake(6, [3, 4, 5])
    pair.p.manager.do(SendBlocks(6, 0, (0, 1, 2), 0, record(6, 40)))
    await pair.d.until(Received, 6)


async def test_source_blocks_are_pinned_until_the_transport_has_let_go(pair: Pair) -> None:
    """CASES 9: however much the scheduler wants them, SendEnded waits for the end of the write."""
    pair.p.faulty.next_writes(Fault.STALL)
    await pair.shake(1, [0, 1, 2])
    pair.p.manager.do(SendBlocks(1, 0, (0, 1, 2), 0, record(1, 40)))
    await pair.shake(2, [3, 4, 5], slot=1)
    pair.p.manager.do(SendBlocks(2, 0, (3, 4, 5), 0, record(2, 40)))
    await pair.d.until(Received, 2)
    assert not pair.p.has(SendEnded, 1)
    pair.p.faulty.release(*pair.p.faulty.held)
    await pair.d.until(Received, 1)
    assert (await pair.p.until(SendEnded, 1)).problem is None


async def test_a_prefill_worker_that_leaves_tells_decode_before_it_is_gone(pair: Pair) -> None:
    """Elsewhere nobody would see that it has ended: its word frees decode's blocks."""
    pair.p.faulty.next_writes(Fault.STALL)
    await pair.shake(1, [0, 1, 2])
    pair.p.manager.do(SendBlocks(1, 0, (0, 1, 2), 0, record(1, 40)))
    await pair.p.manager.leave(5.0)
    await pair.d.until(Quiet, 1)
    failed = await pair.d.until(ReceiveFailed, 1)
    assert "stopping" in failed.problem.message
    assert failed.problem.is_retryable
    for problem in failed.problem, (await pair.p.until(SendEnded, 1)).problem:
        assert problem is not None
        assert (problem.code, problem.stage) == ("peer_lost", "prefill")
    while pair.d.manager.stats().peers:  # its farewell
        await asyncio.sleep(0)
    await pair.p.manager.leave(5.0)  # said once


class Stubborn(ShmTransport):
    """Its writes do not end, whatever is done; probes do."""

    def start(self, write: Write) -> None:
        if write.key is None:
            super().start(write)


async def test_a_worker_leaves_in_bounded_time_though_a_write_does_not_end() -> None:
    pair = await new_pair(make=lambda memory: Stubborn(memory, threads=1))
    await pair.shake(1, [0, 1, 2])
    pair.p.manager.do(SendBlocks(1, 0, (0, 1, 2), 0, record(1, 40)))
    await pair.p.manager.leave(0.05)
    await pair.d.until(ReceiveFailed, 1)
    assert not pair.d.has(Quiet, 1)
    assert pair.d.manager.stats().quarantined == 1
    await pair.d.stop()
    await pair.p.stop()


class Counting(Wrapping):
    @property
    def counters(self) -> Mapping[str, float]:
        return {"tcp_dropped_frames": 3}


async def test_what_a_transport_counts_is_among_the_workers_counters() -> None:
    """Through all that is wrapped around it, into the metrics."""
    d = side("decode", lambda _: pytest.fail("it asks nobody"), make=_counting)
    await d.start()
    assert d.manager.stats().counters["tcp_dropped_frames"] == 3
    await d.stop()


def _counting(memory: PoolMemory) -> Transport:
    return Choosing([Counting(ShmTransport(memory, threads=1))])


async def test_a_decode_worker_that_leaves_waits_for_its_writers(pair: Pair) -> None:
    pair.p.faulty.next_writes(Fault.STALL)
    await pair.shake(1, [0, 1, 2])
    pair.p.manager.do(SendBlocks(1, 0, (0, 1, 2), 0, record(1, 40)))
    await pair.d.manager.leave(5.0)
    assert pair.d.has(Quiet, 1)
    assert pair.d.manager.stats().rooms == 0
    problem = (await pair.p.until(SendEnded, 1)).problem
    assert problem is not None
    assert (problem.code, problem.stage) == ("peer_lost", "decode")  # another prefill is no help


async def test_a_worker_that_never_served_has_nothing_to_leave() -> None:
    never = side("decode", lambda _: pytest.fail("nobody asks"))
    await never.manager.leave(1.0)
    await never.stop()


async def test_after_a_long_idle_time_the_first_request_finds_its_way(pair: Pair) -> None:
    """CASES 15: a NAT forgot the connections meanwhile; they are made anew, nobody notices."""
    await pair.shake(1, [0, 1, 2])
    pair.p.manager.do(SendBlocks(1, 0, (0, 1, 2), 0, record(1, 40)))
    await pair.d.until(Received, 1)
    await pair.p.until(SendEnded, 1)
    pair.p.manager._wire.hang_up(pair.d.endpoint)  # noqa: SLF001 - the fault to rehearse
    pair.d.manager._wire.hang_up(pair.p.endpoint)  # noqa: SLF001 - the fault to rehearse
    await pair.shake(2, [3, 4, 5])
    pair.p.manager.do(SendBlocks(2, 0, (0, 1, 2), 0, record(2, 40)))
    await pair.d.until(Received, 2)


async def test_a_request_for_which_decode_finds_no_place_ends_at_its_deadline(pair: Pair) -> None:
    """CASES 21: both sides are told once, and nobody asks again and again meanwhile."""
    await pair.shake(1, [0, 1, 2])  # the pair knows each other
    before = len(pair.d.events), len(pair.p.events)
    deadline = time.monotonic() + 0.3
    pair.p.manager.do(ExpectHandshakes(2, 0, 40, HASH, deadline))
    pair.d.manager.do(OpenReceiver(2, 0, SOURCE, deadline))
    await pair.d.until(ReceiverReady, 2)  # and is never admitted
    failed = await pair.d.until(ReceiveFailed, 2)
    stopped = await pair.p.until(SendFailed, 2)
    await pair.p.until(SendEnded, 2)
    assert failed.problem.code == stopped.problem.code == "deadline"
    assert len(pair.d.events) - before[0] == 2
    assert len(pair.p.events) - before[1] == 2


async def test_what_each_leg_calls_the_request_does_not_matter(pair: Pair) -> None:
    """CASES 14: room and attempt, which the router minted, are all that names a transfer."""
    await pair.shake((1 << 63) - 1, [0, 1, 2])
    pair.p.manager.do(SendBlocks((1 << 63) - 1, 0, (0, 1, 2), 0, record((1 << 63) - 1, 40)))
    received = await pair.d.until(Received, (1 << 63) - 1)
    assert (received.room, received.attempt) == ((1 << 63) - 1, 0)


async def test_replayed_forged_expired_and_far_off_handshakes_write_nothing(pair: Pair) -> None:
    """CASES 57: each is counted or refused; no byte lands, no token comes of it."""
    await pair.shake(1, [0, 1, 2])
    pair.p.manager.do(SendBlocks(1, 0, (0, 1, 2), 0, record(1, 40)))
    await pair.d.until(Received, 1)
    await pair.p.until(SendEnded, 1)
    (session,) = pair.p.manager.stats().peers
    base = Handshake(
        room=2,
        attempt=0,
        session=session,
        blocks=pack_ids([9, 10, 11]),
        first_block=0,
        slot=3,
        prompt_tokens=40,
        prompt_hash=HASH,
        decode_ranks=1,
        expires=time.time() + 60,
        token=b"",
        number=100,
    )
    pair.p.manager.do(ExpectHandshakes(2, 0, 40, HASH, time.monotonic() + 60))
    wrong = [
        base,  # without a token
        signed(ClusterKey(b"another cluster's key"), base, pair.d.endpoint),
        replace(signed(KEY, base, pair.d.endpoint), blocks=pack_ids([0, 1, 2])),  # changed after
        signed(KEY, replace(base, number=1), pair.d.endpoint),  # its number was used before
        signed(KEY, replace(base, room=3, expires=time.time() - 1), pair.d.endpoint),
        signed(KEY, replace(base, number=101, blocks=pack_ids([9, 10, 64])), pair.d.endpoint),
    ]
    for handshake in wrong:
        pair.p.manager.hear(encode(FROM_DECODE, handshake))
    refused = await pair.p.until(SendFailed, 2)  # by the last one, which is genuine but impossible
    assert "outside the described region" in refused.problem.message
    counters = pair.p.manager.stats().counters
    assert (counters["dropped_forged_handshake"], counters["dropped_late_handshake"]) == (3, 1)
    pair.p.manager.do(SendBlocks(2, 0, (5, 6, 7), 0, record(2, 40)))
    await pair.p.until(SendEnded, 2)
    assert not any(any(landed(pair, block)) for block in (9, 10, 11))
    assert not pair.d.has(Received, 2)


@pytest.mark.parametrize("fault", [Fault.DUPLICATE, Fault.REORDER])
async def test_doubled_and_reordered_ends_do_no_harm(pair: Pair, fault: Fault) -> None:
    data = [fill(pair, block) for block in range(3)]
    pair.p.faulty.next_writes(fault)
    await pair.shake(1, [0, 1, 2])
    pair.p.manager.do(SendBlocks(1, 0, (0,), 0, None))
    pair.p.manager.do(SendBlocks(1, 0, (1,), 1, None))
    pair.p.manager.do(SendBlocks(1, 0, (2,), 2, record(1, 40)))
    await pair.d.until(Received, 1)
    assert [landed(pair, block) for block in range(3)] == data
    await pair.p.until(SendEnded, 1)


async def test_a_stopped_manager_does_not_disturb_the_next_one() -> None:
    """Sockets, threads and descriptors are back at their baseline."""
    await once_through()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        await once_through()
    assert len(os.listdir("/proc/self/fd")) <= before


async def once_through() -> None:
    pair = await new_pair()
    await pair.shake(1, [0, 1, 2])
    await pair.d.stop()
    await pair.p.stop()
    del pair
    gc.collect()


# What a member of the cluster may send.

JUNK = [
    b"",
    b"junk",
    b"\xc1",
    pickle.dumps({"op": "ping"}),
    b"cos\n_exit\n(I9\ntR.",  # would end this process
    msgpack.packb({"op": "nothing"}),
    msgpack.packb({"op": "ping", "session": 5, "number": "x"}),
    msgpack.packb(["ping"]),
    msgpack.packb({"op": "handshake", "room": -1}),
    msgpack.packb({"op": "attach", "session": "s", "endpoint": "e", "region": {}}),
    b"\x91" * 5000,
    b"\xdd\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    os.urandom(4096),
]


@pytest.mark.parametrize("role", ["p", "d"])
async def test_junk_and_pickle_bombs_from_a_member_are_counted_and_dropped(
    pair: Pair, role: str
) -> None:
    victim = pair.p if role == "p" else pair.d
    for junk in JUNK:
        victim.manager.hear(junk)
    assert victim.manager.stats().counters["dropped_bad_message"] == len(JUNK)
    await pair.shake(1, [0, 1, 2])  # and it serves on


async def test_junk_through_the_socket_does_not_stop_the_service(pair: Pair) -> None:
    wire = Wire(KEY, "127.0.0.1")
    wire.start()
    for junk in JUNK:
        assert wire.send(pair.p.endpoint, junk)
    wire.send(pair.p.endpoint, encode(FROM_DECODE, Ping(session="ghost", number=1)))
    while pair.p.manager.stats().counters.get("dropped_unknown_session", 0) < 1:
        await asyncio.sleep(0)
    assert pair.p.manager.stats().counters["dropped_bad_message"] == len(JUNK)
    await pair.shake(1, [0, 1, 2])
    wire.close()


@pytest.mark.parametrize("endpoint", ["", "junk", "ipc:///tmp/x", "tcp://name:1", "tcp://1.2.3.4"])
async def test_a_peer_cannot_make_us_connect_to_what_is_no_address(endpoint: str) -> None:
    wire = Wire(KEY, "127.0.0.1")
    assert not wire.send(endpoint, b"x")
    wire.close()


# Who is no member.


async def test_strangers_do_not_get_a_byte_through(pair: Pair) -> None:
    """Neither without CURVE, nor with another cluster's key; members still do."""
    context = zmq.Context()
    plain = context.socket(zmq.PUSH)
    plain.linger = 0
    plain.connect(pair.p.endpoint)
    plain.send(pickle.dumps("bomb"), zmq.NOBLOCK)
    stranger = Wire(ClusterKey(b"another cluster's key"), "127.0.0.1")
    stranger.send(pair.p.endpoint, encode(FROM_DECODE, Ping(session="x", number=1)))
    with socket.create_connection(("127.0.0.1", int(pair.p.endpoint.rpartition(":")[2]))) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n" + os.urandom(2000))
        await pair.shake(1, [0, 1, 2])
    counters = pair.p.manager.stats().counters
    assert not [name for name in counters if name.startswith("dropped")]
    plain.close()
    context.term()
    stranger.close()


async def test_knowing_the_public_key_is_not_enough(pair: Pair) -> None:
    """The ZAP handler refuses a client that has not the cluster's own key pair."""
    public, secret = zmq.curve_keypair()
    context = zmq.Context()
    spy = context.socket(zmq.PUSH)
    spy.linger = 0
    spy.curve_serverkey = KEY.curve_pair()[0]
    spy.curve_publickey, spy.curve_secretkey = public, secret
    monitor = spy.get_monitor_socket(
        zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_SUCCEEDED
    )
    spy.connect(pair.p.endpoint)
    spy.send(encode(FROM_DECODE, Ping(session="spy", number=1)), zmq.NOBLOCK)
    while not monitor.poll(0):
        await asyncio.sleep(0)
    event = recv_monitor_message(monitor)["event"]
    await pair.shake(1, [0, 1, 2])
    assert event == zmq.EVENT_HANDSHAKE_FAILED_AUTH
    assert "dropped_unknown_session" not in pair.p.manager.stats().counters
    spy.disable_monitor()
    monitor.close(linger=0)
    spy.close()
    context.term()


# What is sent.


@asynccontextmanager
async def wire() -> AsyncIterator[Wire]:
    made = Wire(KEY, "127.0.0.1", peers=1200)
    made.start()
    guard = asyncio.create_task(made.guard())
    yield made
    guard.cancel()
    await asyncio.gather(guard, return_exceptions=True)
    made.close()


async def test_who_is_hung_up_on_still_hears_the_last_word() -> None:
    async with wire() as here, wire() as there:
        assert here.send(there.endpoint, b"no")
        here.hang_up(there.endpoint)
        assert await there.receive() == b"no"


@pytest.fixture
def many_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] < 8192:
        pytest.skip("too few open files are allowed here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], 8192), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("many_files")
async def test_as_many_peers_are_spoken_to_as_the_limits_allow() -> None:
    """By itself ZeroMQ refuses the 1024th socket, and every one after it."""
    async with wire() as here:
        taken = [here.send(f"tcp://127.0.0.1:{20000 + n}", b"hello") for n in range(1200)]
        assert all(taken)


# The shell itself.


async def test_a_dead_listener_ends_the_manager() -> None:
    """CASES 102: the worker sees it and ends; its supervisor starts another."""
    pair = await new_pair()
    await pair.shake(1, [0, 1, 2])
    pair.p.manager._wire._pull.close(linger=0)  # noqa: SLF001 - the fault to rehearse
    assert pair.p.task is not None
    with pytest.raises(ExceptionGroup):
        await pair.p.task
    await pair.d.stop()
    await pair.p.stop()


async def test_a_dead_transport_ends_the_manager() -> None:
    pair = await new_pair()
    await pair.shake(1, [0, 1, 2])
    await pair.p.manager.transport.close()
    assert pair.p.task is not None
    with pytest.raises(ExceptionGroup):
        await pair.p.task
    await pair.d.stop()
    await pair.p.stop()


async def test_an_address_that_is_not_ours_is_a_start_up_error() -> None:
    wire = Wire(KEY, "192.0.2.1")
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
        wire.start()
    wire.close()


async def test_a_bootstrap_server_that_comes_up_late_is_asked_again() -> None:
    """CASES 6: and each server is asked once for all requests that wait."""
    asked = 0
    p = side("prefill", lambda _source: pytest.fail("prefill asks nobody"))
    await p.start()

    def late(_source: Source) -> Route:
        nonlocal asked
        asked += 1
        if asked < 3:
            raise Unavailable("not yet")
        return route_to(p.endpoint, this_process())

    d = side("decode", late)
    await d.start()
    for room in range(5):
        d.manager.do(OpenReceiver(room, 0, SOURCE, time.monotonic() + 60))
    for room in range(5):
        await d.until(ReceiverReady, room)
    assert asked == 3
    await d.stop()
    await p.stop()


async def test_a_bootstrap_server_that_stays_unready_is_told_with_its_last_answer() -> None:
    def unready(_source: Source) -> Route:
        raise NoPrefill("rank 0,0,0 never registered")

    d = side("decode", unready)
    d.manager.timeouts = TimeoutsSection(connect_s=0.05)
    await d.start()
    d.manager.do(OpenReceiver(1, 0, SOURCE, time.monotonic() + 60))
    failed = await d.until(ReceiveFailed, 1)
    assert "never registered" in failed.problem.message
    assert failed.problem.is_retryable
    await d.stop()


async def test_a_bootstrap_server_that_refuses_fails_the_attempt_at_once() -> None:
    def refuse(_source: Source) -> Route:
        raise Unauthorized("wrong key")

    d = side("decode", refuse)
    await d.start()
    d.manager.do(OpenReceiver(1, 0, SOURCE, time.monotonic() + 60))
    failed = await d.until(ReceiveFailed, 1)
    assert (failed.problem.code, failed.problem.stage) == ("unauthorized", "bootstrap")
    assert not failed.problem.is_retryable
    await d.stop()
